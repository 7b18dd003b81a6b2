// Draws the pictures of the layer that is picked, from the numbers beside them: see layer_pictures.py.
{
  const WIDTH = 420, LEFT = 130, RIGHT = 12, TOP = 8, BOTTOM = 34, ROW = 16, HEIGHT = 150;
  const text = (value) => String(Number(value.toPrecision(3)));
  const short = (name) => (name.length > 20 ? `…${name.slice(-19)}` : name); // the ends of names differ
  const colour = (index) => `var(--s${(index % 8) + 1})`;
  const median = (values) => {
    const sorted = [...values].sort((a, b) => a - b), middle = sorted.length >> 1;
    return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
  };

  function element(parent, name, attributes, content) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (content !== undefined) made.textContent = content;
    parent.append(made);
    return made;
  }

  // A scale from values to places: its ticks are even steps, or powers of a base.
  function scale(values, from, to, base) {
    const map = base ? Math.log : (value) => value;
    const low = base ? Math.min(...values) : 0, high = Math.max(...values);
    const span = map(high) - map(low) || 1;
    const place = (value) => from + ((map(value) - map(low)) / span) * (to - from);
    const ticks = [];
    if (base) {
      const first = Math.ceil(Math.log(low) / Math.log(base) - 1e-9), last = Math.log(high) / Math.log(base) + 1e-9;
      const step = Math.max(1, Math.ceil((last - first) / 6));
      for (let exponent = first; exponent <= last; exponent += step) ticks.push(base ** exponent);
      if (ticks.length < 2) ticks.splice(0, ticks.length, ...new Set([low, high]));
    } else {
      const rough = (high || 1) / 4, power = 10 ** Math.floor(Math.log10(rough));
      const step = power * [1, 2, 5, 10].find((each) => each * power >= rough);
      for (let value = 0; value <= high * (1 + 1e-9); value += step) ticks.push(value);
    }
    return { place, ticks };
  }

  function axis(svg, { place, ticks }, bottom, label, left) {
    for (const tick of ticks) {
      const x = place(tick);
      element(svg, "path", { d: `M${x} ${TOP}V${bottom}`, stroke: "var(--line)" });
      element(svg, "text", { x, y: bottom + 13, "text-anchor": "middle" }, text(tick));
    }
    element(svg, "text", { x: (left + WIDTH - RIGHT) / 2, y: bottom + 27, "text-anchor": "middle" }, label);
  }

  function picture(parent, title, height, told) {
    const figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    caption.textContent = title;
    figure.append(caption);
    const svg = element(figure, "svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": `${title}. ${told}` });
    parent.append(figure);
    return svg;
  }

  // Rows with a name each, in which draw puts its marks.
  function rowsPicture(parent, title, label, rows, values, base, told, draw) {
    const bottom = TOP + ROW * rows.length;
    const svg = picture(parent, title, bottom + BOTTOM, rows.map((row) => `${row.name}: ${told(row)}`).join("; "));
    const x = scale(values, LEFT, WIDTH - RIGHT, base);
    axis(svg, x, bottom, label, LEFT);
    rows.forEach((row, index) => {
      const y = TOP + ROW * (index + 0.5);
      element(svg, "text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, short(row.name));
      draw(svg, row, x.place, y);
    });
  }

  function linesPicture(parent, title, xLabel, yLabel, lines, xBase, yBase, told) {
    const points = lines.flatMap((line) => line.points), bottom = TOP + HEIGHT, left = 46;
    const svg = picture(parent, title, bottom + BOTTOM, told);
    const x = scale(points.map((point) => point[0]), left, WIDTH - RIGHT, xBase);
    const y = scale(points.map((point) => point[1]), bottom, TOP + 4, yBase);
    axis(svg, x, bottom, xLabel, left);
    for (const tick of y.ticks) {
      element(svg, "path", { d: `M${left} ${y.place(tick)}H${WIDTH - RIGHT}`, stroke: "var(--line)" });
      element(svg, "text", { x: left - 4, y: y.place(tick) + 4, "text-anchor": "end" }, text(tick));
    }
    element(svg, "text", { x: 11, y: TOP + HEIGHT / 2, "text-anchor": "middle", transform: `rotate(-90 11 ${TOP + HEIGHT / 2})` }, yLabel);
    for (const line of lines) {
      const places = line.points.map(([a, b]) => [x.place(a), y.place(b)]);
      const path = places.map(([a, b], index) => (index === 0 ? `M${a} ${b}` : line.steps ? `H${a}V${b}` : `L${a} ${b}`));
      const end = line.steps ? `H${WIDTH - RIGHT}` : "";
      if (line.joined) element(svg, "path", { d: path.join("") + end, fill: "none", stroke: line.colour, "stroke-width": 1.5 });
      for (const [cx, cy] of places) element(svg, "circle", { cx, cy, r: line.joined ? 2 : 4, fill: line.colour });
    }
    const legend = document.createElement("ul");
    legend.className = "legend";
    for (const line of lines) {
      const item = document.createElement("li"), mark = document.createElement("span");
      mark.style.background = line.colour;
      item.append(mark, line.name);
      legend.append(item);
    }
    svg.parentNode.append(legend);
  }

  function samplesPicture(parent, part, data) {
    const rows = part.samples.map(([of, ...values]) => ({ name: data.contestants[of], of, values }));
    const told = (row) => `${row.values.length} samples, median ${text(median(row.values))} ms`;
    const every = rows.flatMap((row) => row.values);
    rowsPicture(parent, `${part.title}: samples`, "ms", rows, every, 0, told, (svg, row, place, y) => {
      const marks = row.values.map((value) => `M${place(value)} ${y - 5}v10`).join("");
      element(svg, "path", { d: marks, stroke: colour(row.of), opacity: 0.7 });
      element(svg, "circle", { cx: place(median(row.values)), cy: y, r: 3.5, fill: colour(row.of) });
    });
  }

  function cutsPicture(parent, part, data) {
    const rows = part.cuts.map(([of, ...pieces]) => ({ name: data.contestants[of], pieces }));
    const told = (row) => row.pieces.map(([of, size, count]) => `${count} of ${size} by ${data.algorithms[of]}`).join(", ");
    const title = `${part.title}: the mini-batch of ${part.n}, cut`;
    rowsPicture(parent, title, "samples", rows, [part.n], 0, told, (svg, row, place, y) => {
      let done = 0;
      for (const [of, size, count] of row.pieces) {
        const parts = count <= 64 ? count : 1;
        for (let index = 0; index < parts; index += 1) {
          const next = done + (size * count) / parts;
          const width = Math.max(place(next) - place(done) - 1, 0.5);
          const piece = element(svg, "rect", { x: place(done), y: y - 6, width, height: 12, fill: colour(of) });
          element(piece, "title", {}, `${data.algorithms[of]} ${size}`);
          done = next;
        }
      }
    });
  }

  function frontPicture(parent, part, data) {
    const undivided = part.candidates.filter(([, size, , , , error]) => size === part.n && error >= 0);
    const front = { name: "desirable set", points: part.front, joined: true, steps: true, colour: "var(--ink)" };
    const others = undivided.map(([of, , setup, step, workspace]) => (
      { name: `${data.algorithms[of]} ${part.n}`, points: [[workspace, setup + step]], colour: colour(of) }));
    const told = part.front.map(([size, time]) => `${text(size)} MiB: ${text(time)} ms`).join("; ");
    linesPicture(parent, `${part.title}: desirable set`, "workspace, MiB", "ms", [front, ...others], 0, 0, told);
  }

  function sizesPicture(parent, part, data) {
    const lines = new Map();
    for (const [of, size, , step, , error] of part.candidates) {
      if (error < 0 || step <= 0) continue;
      if (!lines.has(of)) lines.set(of, { name: data.algorithms[of], points: [], joined: true, colour: colour(of) });
      lines.get(of).points.push([size, step / size]);
    }
    const every = [...lines.values()];
    if (!every.length) return;
    const told = every.map((line) => `${line.name}: ${line.points.map(([size, time]) => `${text(time)} ms at ${size}`).join(", ")}`);
    const title = `${part.title}: time of a sample by micro-batch size`;
    linesPicture(parent, title, "micro-batch size", "ms per sample", every, 2, 10, told.join("; "));
  }

  function errorsPicture(parent, part, data) {
    const largest = new Map();
    for (const [of, , , , , error] of part.candidates) {
      if (Math.abs(error) > Math.abs(largest.get(of) ?? 0)) largest.set(of, error);
    }
    const rows = [...largest].map(([of, error]) => ({ name: data.algorithms[of], of, error: Math.abs(error), barred: error < 0 }));
    if (!rows.length) return;
    rows.sort((a, b) => a.error - b.error);
    const told = (row) => text(row.error) + (row.barred ? ", barred" : "");
    const every = rows.map((row) => row.error);
    rowsPicture(parent, `${part.title}: relative error`, "against float64", rows, every, 10, told, (svg, row, place, y) => {
      const x = place(row.error);
      if (row.barred) element(svg, "path", { d: `M${x - 4} ${y - 4}l8 8m0 -8l-8 8`, stroke: "var(--alarm)", "stroke-width": 2 });
      else element(svg, "circle", { cx: x, cy: y, r: 3.5, fill: colour(row.of) });
    });
  }

  for (const section of document.querySelectorAll(".layer-pictures")) {
    const form = section.querySelector("form"), select = form.querySelector("select");
    const drawn = section.querySelector(".drawn"), told = form.querySelector("output");
    let data;
    select.addEventListener("change", () => {
      data ??= JSON.parse(section.querySelector("script").textContent);
      drawn.replaceChildren();
      const layer = data.layers[select.value];
      for (const part of select.value === "" ? [] : layer.parts) {
        if (part.samples.length) samplesPicture(drawn, part, data);
        if (part.cuts.length) cutsPicture(drawn, part, data);
        if (part.front?.length) frontPicture(drawn, part, data);
        if (part.candidates) sizesPicture(drawn, part, data);
        if (part.candidates) errorsPicture(drawn, part, data);
      }
      told.textContent = select.value === "" ? "" : `${drawn.children.length} pictures of ${layer.name}`;
    });
    form.addEventListener("submit", (event) => event.preventDefault());
    form.hidden = false;
  }
}
