"""Pictures of a result folder, as SVG.

Each function that draws one returns ``None`` if there is no data for its picture. matplotlib is optional, imported to
draw a figure, and its global state is left alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from io import BytesIO
from itertools import cycle
from math import nan
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas
from numpy.typing import ArrayLike, NDArray

from mucudnn.bench.results.pages.measured import (
    TunedOperation,
    gains,
    has_problems,
    published_gains_of,
    tuned_operations,
)
from mucudnn.bench.results.pages.tables import with_series
from mucudnn.bench.results.reading import ResultFolder
from mucudnn.bench.results.variants import TORCH
from mucudnn.core.errors import UnavailableError
from mucudnn.core.problem import Operation
from mucudnn.core.torch_settings import TORCHS_OWN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT, LINE = "#1f2328", "#59636e", "#d0d7de"
SERIES = ("#0b62a8", "#b35900", "#1a7f37", "#8250df", "#b3202b", "#0a7b83", "#9a6700", "#6e7781")
TORCH_COLOUR = SERIES[-1]
MARKERS = "os^vD<>"
# Keep text as text, in the reader's own font, and make the files reproducible.
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "mucudnn",
    "font.family": "sans-serif",
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.titlecolor"), INK),
    "axes.edgecolor": FAINT,
    "grid.color": LINE,
}
_SVG_DPI = 72  # resolution of matplotlib's SVG, which is fixed
_MOST_LETTERS = 44
_COLUMNS = 3  # number of panels side by side
_PANEL_INCHES = 4.4
_LEGEND_INCHES, _LEGEND_LINE_INCHES = 2.8, 0.2  # width of a column of a legend, height of a line
_MIB = 2**20
MOST_OPERATIONS = 6  # At most this many operations are drawn side by side: those on which PyTorch takes longest.


# The kinds of pictures: title, and caption that says how to read it.
KINDS = {
    "speedups": (
        "Speedup of each layer, by workspace limit",
        "PyTorch's time over ours, on a logarithmic scale; right of the line is faster. Bars are 95 % intervals "
        "over rounds.",
    ),
    "divided": (
        "What dividing gains, by workspace limit",
        "Time of the best undivided algorithm over that of the divided mini-batch under the same workspace limit, "
        "all operations of a layer together; lines are 95 % intervals over rounds. Layers that run the same "
        "configuration as the undivided are left out. Published elsewhere: bars that "
        "the authors of μ-cuDNN show in github.com/spcl/ucudnn for the same geometry, N = 256, on a "
        "P100-SXM2, read to 0.01; they do not say which operations were summed.",
    ),
    "limits": (
        "How far from the machine's limit",
        "Left: the rate of each row against the operations for each byte that must move; the line is the machine's "
        "limit (the roofline of Williams, Waterman, Patterson 2009), which Winograd and FFT can pass. Right: time "
        "over that limit; each box has half of the rows of its kind of layer, with the median inside, the whiskers "
        "have all.",
    ),
    "desirable": (
        "Desirable sets: what workspace buys",
        f"The {MOST_OPERATIONS} operations that take PyTorch longest. The line is the desirable set: no "
        "configuration has less time with as much workspace. Squares are algorithms on the undivided mini-batch, "
        "the grey one PyTorch's own. Times are sums of measured parts.",
    ),
}


def drawn(folder: ResultFolder, rows: pandas.DataFrame) -> Iterator[tuple[str, bytes]]:
    """Yield the name of each picture that the folder has data for, and its SVG file.

    All pictures are of convolutions.

    rows: the result of ``measured``.

    Raises ``UnavailableError`` if matplotlib is not installed.
    """
    if not has_problems(rows):
        return
    with _styled():
        figures = speedups(rows), divided(rows), limits(rows), desirable(tuned_operations(folder))
        for name, figure in zip(KINDS, figures, strict=True):
            if figure is not None:
                yield name, svg(figure)


def curves(by_title: Mapping[str, Sequence[tuple[int, float]]]) -> bytes:
    """Draw the least time by memory as an SVG file, with a panel for each curve.

    by_title: of each curve that has any, the points (bytes, seconds), ascending in bytes.

    Raises ``UnavailableError`` if matplotlib is not installed.
    """
    with _styled():
        drawn = {title: points for title, points in by_title.items() if points}
        figure, panel = panels(len(drawn), 2.6)
        for axes, (title, points) in zip(panel, drawn.items(), strict=True):
            x, y = zip(*((size / _MIB, 1e3 * time_s) for size, time_s in points), strict=True)
            axes.step(x, y, where="post", color=SERIES[0])
            axes.plot(x, y, ".", color=SERIES[0], markersize=4)
            axes.set_ylim(bottom=0)
            label(axes, plain(title), "MiB", "ms")
        return svg(figure)


def _styled() -> AbstractContextManager[None]:
    """Return a context with the style of all pictures. Raises ``UnavailableError`` if matplotlib is not installed."""
    try:
        from matplotlib import rc_context
    except ImportError:
        raise UnavailableError("plots need matplotlib, which is not installed: pip install matplotlib") from None
    styled: AbstractContextManager[None] = rc_context(STYLE)
    return styled


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """Return an empty figure in constrained layout."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width_inches, height_inches), layout="constrained")


def svg(figure: Figure) -> bytes:
    """Return a figure made by ``new_figure`` as an SVG file.

    The layout is computed first, because ``savefig`` would draw the figure twice, once only for the layout.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    FigureCanvasSVG(figure)  # The layout depends on the canvas's text widths.
    figure.set_dpi(_SVG_DPI)
    if layout := figure.get_layout_engine():
        layout.execute(figure)
        figure.set_layout_engine(None)
    stream = BytesIO()
    figure.savefig(stream, format="svg", dpi=_SVG_DPI, metadata={"Date": None})
    return stream.getvalue()


def speedups(rows: pandas.DataFrame) -> Figure | None:
    """Draw the speedup of each layer under each workspace limit, with one panel for each operation."""
    rows = with_series(rows.dropna(subset=["speedup"]))
    if rows.empty:
        return None
    layers, by_series = list(dict.fromkeys(rows["layer"])), colours(rows["series"])
    operations = [name for name in Operation if (rows["operation"] == name).any()]
    figure, panel = named_rows(layers, 0.2, 4 + 3 * len(operations), len(operations))
    for axes, operation in zip(panel, operations, strict=True):
        label(axes, operation.replace("_", " "), "speedup over PyTorch", "")
        for index, (name, colour) in enumerate(by_series.items()):
            points = rows[(rows["operation"] == operation) & (rows["series"] == name)]
            y = beside(points["layer"].map(layers.index), index, len(by_series))
            ends = np.column_stack([points["speedup_low"], points["speedup_high"], np.full(len(points), nan)])
            axes.plot(ends.ravel(), np.repeat(y, 3), color=colour, linewidth=0.8)  # a single line keeps the file small
            axes.plot(
                points["speedup"], y, MARKERS[index % len(MARKERS)], color=colour, markersize=2.5, label=plain(name)
            )
        x_ratio_axis(axes)
    legend_above(figure)
    return figure


def divided(rows: pandas.DataFrame) -> Figure | None:
    """Draw the speedup of dividing over the best undivided algorithm, next to the speedups in the paper."""
    bars = gains(rows)
    if bars.empty or (bars := bars[bars["gain"].notna() & ~bars["is_same"]]).empty:
        return None
    layers, published = list(dict.fromkeys(bars["layer"])), published_gains_of(bars)
    titles = ["measured here", "published elsewhere: P100-SXM2, N = 256"][: 2 if len(published) else 1]
    figure, panel = named_rows(layers, 0.28, 5 + 4 * len(titles), len(titles))
    for axes, title in zip(panel, titles, strict=True):
        axes.axvline(1, color=FAINT, linewidth=1)
        label(axes, title, "time of the undivided / divided", "")
    # Measured here: a bar with its interval for each policy and limit.
    bars = with_series(bars.assign(contestant="mucudnn"))
    by_series = colours(bars["series"])
    for index, (name, colour) in enumerate(by_series.items()):
        series = bars[bars["series"] == name]
        y = beside(series["layer"].map(layers.index), index, len(by_series))
        low, high = (series[end].fillna(series["gain"]) for end in ("gain_low", "gain_high"))
        ends = np.maximum([series["gain"] - low, high - series["gain"]], 0)
        panel[0].barh(y, series["gain"], 0.72 / len(by_series), color=colour, label=plain(name))
        panel[0].errorbar(series["gain"], y, xerr=ends, fmt="none", ecolor=FAINT, elinewidth=0.8)
    # Published: a bar for each limit.
    if len(published):
        gains_of = published.drop(columns="layer")
        for index, (limit, colour) in enumerate(zip(gains_of, (SERIES[6], SERIES[4], SERIES[3]), strict=True)):
            y = beside(published["layer"].map(layers.index), index, gains_of.shape[1])
            name = f"published, {str(limit).replace('MiB', ' MiB')}"
            panel[1].barh(y, gains_of[limit], 0.72 / gains_of.shape[1], color=colour, alpha=0.6, label=name)
    legend_above(figure)
    return figure


def limits(rows: pandas.DataFrame) -> Figure | None:
    """Draw a roofline plot (achieved rates against peak rates), and the ratio of time to bound by kind of layer."""
    rows = with_series(rows.dropna(subset=["over_bound"]))
    if rows.empty:
        return None
    kinds, by_series = sorted(set(rows["kind"])), colours(rows["series"])
    figure = new_figure(13, max(4.5, 1.3 + 0.13 * len(kinds) * len(by_series)))
    rates, boxes = figure.subplots(1, 2)
    # The rate of each row, and the ratios of each kind of layer.
    for index, (name, colour) in enumerate(by_series.items()):
        series = rows[rows["series"] == name]
        rates.plot(
            series["flops_per_byte"],
            series["flops_per_s"] / 1e9,
            MARKERS[index % len(MARKERS)],
            color=colour,
            markersize=3,
            alpha=0.7,
            label=plain(name),
        )
        by_kind = dict(iter(series.groupby("kind")["over_bound"]))
        thin = {"color": colour, "linewidth": 0.9}
        boxes.boxplot(
            list(by_kind.values()),
            positions=list(beside([kinds.index(kind) for kind in by_kind], index, len(by_series))),
            widths=0.6 / len(by_series),
            orientation="horizontal",
            showcaps=False,
            manage_ticks=False,
            boxprops=thin,
            whiskerprops=thin,
            medianprops={"color": colour, "linewidth": 2},
            whis=(0, 100),  # to the least and the most
        )
    # The machine's limit.
    for _, alike in rows.groupby("dtype"):
        roof = alike.assign(roof=alike["flops"] / alike["bound_s"] / 1e9).sort_values("flops_per_byte")
        rates.plot(roof["flops_per_byte"], roof["roof"], color=FAINT, linewidth=1.2)
    rates.set_xscale("log")
    rates.set_yscale("log")
    label(rates, "rate of the direct method", "FLOP for each byte that must move", "GFLOP/s")
    x_ratio_axis(boxes)
    boxes.set_yticks(range(len(kinds)), kinds)
    boxes.set_ylim(len(kinds) - 0.5, -0.5)
    label(boxes, "time / bound by kind of layer", "time / bound", "")
    legend_above(figure)
    return figure


def desirable(operations: Sequence[TunedOperation]) -> Figure | None:
    """Draw each desirable set (time against workspace), and the undivided algorithms as points.

    The points follow the solver's model (``solver.front.pool``), which pools an algorithm's setup time and prepared
    bytes over all its micro-batch sizes. Otherwise a point could lie below the desirable set.
    """
    drawn = [operation for operation in operations if len(operation.desirable)][:MOST_OPERATIONS]
    if not drawn:
        return None
    figure, panel = panels(len(drawn), 2.6)
    for axes, operation in zip(panel, drawn, strict=True):
        # The undivided algorithms.
        by_algorithm = operation.allowed.groupby("algorithm")
        undivided = operation.allowed[operation.allowed["micro_batch_size"] == operation.batch_size]
        names = undivided["algorithm"]
        times = (names.map(by_algorithm["setup_s"].median()) + undivided["step_s"]) * 1e3
        sizes = (names.map(by_algorithm["prepared_bytes"].max()) + undivided["scratch_bytes"]) / _MIB
        # The desirable set, to the right end of all points.
        points = operation.desirable.sort_values("workspace_bytes")
        x, y = list(points["workspace_bytes"] / _MIB), list(points["time_s"] * 1e3)
        axes.step([*x, max([*x, *sizes])], [*y, y[-1]], where="post", color=SERIES[0], label="desirable set")
        axes.plot(x, y, ".", color=SERIES[0], markersize=4)
        is_torchs = names == TORCHS_OWN
        axes.plot(sizes[~is_torchs], times[~is_torchs], "s", color=SERIES[1], markersize=4, label="undivided")
        axes.plot(sizes[is_torchs], times[is_torchs], "s", color=TORCH_COLOUR, markersize=4, label="PyTorch, undivided")
        axes.set_ylim(bottom=0)
        label(axes, plain(operation.name), "workspace, MiB", "ms")
    legend_above(figure)
    return figure


def label(axes: Axes, title: str, x: str, y: str) -> None:
    """Set title and axis labels of a plot, and draw a light grid. The labels x and y include units."""
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    for axis, text in ((axes.xaxis, x), (axes.yaxis, y)):
        if not text:
            axis.set_label_coords(0, 0)  # Skips matplotlib's slow search for a place that is clear of tick labels.
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def plain(text: str) -> str:
    """Return at most 44 characters of text on one line, without formulas or characters that SVG forbids."""
    text = text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 1]}…"
    return "".join(letter if letter.isprintable() else " " for letter in text).replace("$", r"\$")


def colours(names: Iterable[str]) -> dict[str, str]:
    """Assign a colour to each name, most frequent name first; PyTorch's own convolution is grey."""
    ranked = [name for name, _ in Counter(names).most_common()]
    rivals = [name for name in ranked if name not in (TORCH, TORCHS_OWN)]
    by_name = dict(zip(rivals, cycle(SERIES[:-1]), strict=False))
    return {name: by_name.get(name, TORCH_COLOUR) for name in ranked}


def legend_above(figure: Figure) -> None:
    """Add one legend above all axes of a figure, with each label once; the figure grows by its height."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        lines, texts = axes.get_legend_handles_labels()
        handles |= dict(zip(texts, lines, strict=True))
    columns = max(1, int(figure.get_figwidth() / _LEGEND_INCHES))
    figure.set_figheight(figure.get_figheight() + _LEGEND_LINE_INCHES * -(-len(handles) // columns))
    figure.legend(list(handles.values()), list(handles), loc="outside upper left", ncols=columns, frameon=False)


def panels(count: int, height_inches: float) -> tuple[Figure, list[Axes]]:
    """Create a figure with ``count`` axes, three in each row."""
    columns = min(_COLUMNS, count)
    lines = -(-count // columns)
    figure = new_figure(_PANEL_INCHES * columns, lines * height_inches)
    return figure, [figure.add_subplot(lines, columns, number) for number in range(1, count + 1)]


def named_rows(
    names: Sequence[str], row_inches: float, width_inches: float, columns: int = 1
) -> tuple[Figure, list[Axes]]:
    """Create a figure with axes side by side that share a y axis, on which the names are listed from top to bottom."""
    figure = new_figure(width_inches, max(2.5, 1.3 + row_inches * len(names)))
    panel = list(figure.subplots(1, columns, sharey=True, squeeze=False)[0])
    panel[0].set_yticks(range(len(names)), [plain(str(name)) for name in names], fontsize=7)
    panel[0].set_ylim(len(names) - 0.4, -0.6)
    return figure, panel


def beside(places: ArrayLike, index: ArrayLike, count: int) -> NDArray[np.float64]:
    """Return the y coordinates of series ``index`` of ``count``, which are drawn side by side at each place."""
    return np.asarray(places, dtype=float) + 0.8 * ((np.asarray(index) + 0.5) / count - 0.5)


def x_ratio_axis(axes: Axes) -> None:
    """Make the x axis logarithmic, for ratios: label ticks with plain numbers, and draw a line at 1."""
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    axes.axvline(1, color=FAINT, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
