// Sorts and filters the tables of this page, which can be read without it.
for (const section of document.querySelectorAll("section.table")) {
  const body = section.querySelector("tbody");
  const rows = Array.from(body.rows);
  const titles = Array.from(section.querySelectorAll(".titles th"));
  const form = section.querySelector(".filters");
  const search = form.querySelector("input");
  const selects = Array.from(form.querySelectorAll("select"));
  const told = form.querySelector("output");
  const words = [];

  const text = (row, column) => row.cells[column].textContent;

  // Empty cells stay last in either direction.
  function compare(a, b, isNumber, sign) {
    if (a === "" || b === "") return (a === "") - (b === "");
    return sign * (isNumber ? Number(a) - Number(b) : a.localeCompare(b, undefined, { numeric: true }));
  }

  function sort(title, column) {
    const isNumber = title.classList.contains("n");
    const sign = title.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    const keyed = rows.map((row) => [text(row, column), row]);
    keyed.sort((a, b) => compare(a[0], b[0], isNumber, sign));
    body.append(...keyed.map((pair) => pair[1]));
    for (const other of titles) other.setAttribute("aria-sort", "none");
    title.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  }

  function filter() {
    const sought = search.value.trim().toLowerCase().split(/\s+/);
    const picked = selects.filter((select) => select.value !== "");
    let shown = 0;
    rows.forEach((row, index) => {
      words[index] ??= Array.from(row.cells, (cell) => cell.textContent).join("\n").toLowerCase();
      const fits = sought.every((word) => words[index].includes(word)) &&
        picked.every((select) => text(row, Number(select.dataset.column)) === select.value);
      row.hidden = !fits;
      shown += fits;
    });
    told.textContent = `${shown} of ${rows.length} rows`;
  }

  titles.forEach((title, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...title.childNodes);
    button.addEventListener("click", () => sort(title, column));
    title.append(button);
    title.setAttribute("aria-sort", "none");
  });
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
}
// Folded parts are printed, too.
window.addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
document.documentElement.dataset.ready = "yes";
