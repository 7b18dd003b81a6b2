"""Elements shared by the pictures: style, colours, axes, box plots and legends.

matplotlib is optional, imported to draw a figure, and its global state is left alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas
from numpy.typing import ArrayLike, NDArray

from mucudnn.bench.results.pages.measured import CONTESTANT
from mucudnn.bench.results.variants import TORCH
from mucudnn.core.errors import UnavailableError
from mucudnn.core.torch_settings import TORCHS_OWN
from mucudnn.core.values import format_bytes

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


def require_matplotlib() -> None:
    """Raise ``UnavailableError`` if matplotlib is not installed. Call this before a long measurement."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UnavailableError("plots need matplotlib, which is not installed: pip install 'mucudnn[report]'") from None


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


def label(axes: Axes, title: str, x: str, y: str) -> None:
    """Set title and axis labels of a plot, and draw a light grid. x, y: the labels, which include units."""
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    for axis, text in ((axes.xaxis, x), (axes.yaxis, y)):
        if not text:
            axis.set_label_coords(0, 0)  # Skips matplotlib's slow search for a place that is clear of tick labels.
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def batch_axis(axes: Axes, up_to: int) -> None:
    """Make the x axis one of batch sizes from 1 to ``up_to``: logarithmic, with ticks at powers of two and the end."""
    from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

    axes.set_xscale("log", base=2)
    sizes = [2**exponent for exponent in range(up_to.bit_length()) if 2**exponent < 0.8 * up_to]
    axes.xaxis.set_major_locator(FixedLocator([*sizes, up_to]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlim(0.9, 1.1 * up_to)


def ratio_axis(axes: Axes) -> None:
    """Make the y axis logarithmic, for positive ratios, with tick labels such as 0.5 instead of powers of ten."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    least, most = axes.get_ylim()
    axes.set_ylim(0.8 * least, max(1.25 * most, 4 * least))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))


def plain(text: str) -> str:
    """Return at most 44 characters of text on one line, without formulas or characters that SVG forbids."""
    text = text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 1]}…"
    return "".join(one if one.isprintable() else " " for one in text).replace("$", r"\$")


def series_label(contestant: str, policy: str | None, limit_bytes: float) -> str:
    """Return a legend label from a contestant, policy and workspace limit: ``mucudnn, power-of-two, 64 MiB``."""
    if pandas.isna(policy):
        return contestant
    limit = "no limit" if pandas.isna(limit_bytes) else format_bytes(int(limit_bytes))
    return ", ".join((contestant, *(() if policy == contestant else (policy,)), limit))


def with_series(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Add the column ``series`` to the rows: the contestant, policy and workspace limit as a legend label."""
    every = zip(*(rows[name] for name in CONTESTANT), strict=True)
    return rows.assign(series=[series_label(*each) for each in every])


def colours(names: Iterable[str]) -> dict[str, str]:
    """Assign a colour to each name, most frequent name first; PyTorch's own convolution is grey."""
    found = [name for name, _ in Counter(names).most_common()]
    others = [name for name in found if name not in (TORCH, TORCHS_OWN)]
    by_name = {name: SERIES[index % (len(SERIES) - 1)] for index, name in enumerate(others)}
    return {name: by_name.get(name, TORCH_COLOUR) for name in found}


def legend_above(figure: Figure) -> None:
    """Add one legend above all axes of a figure, with each label once; the figure grows by its height."""
    pairs = (zip(*axes.get_legend_handles_labels(), strict=True) for axes in figure.axes)
    handles = {text: handle for each in pairs for handle, text in each}
    columns = max(1, int(figure.get_figwidth() / _LEGEND_INCHES))
    figure.set_figheight(figure.get_figheight() + _LEGEND_LINE_INCHES * -(-len(handles) // columns))
    figure.legend(list(handles.values()), list(handles), loc="outside upper left", ncols=columns, frameon=False)


def panels(count: int, height_inches: float) -> tuple[Figure, list[Axes]]:
    """Create a figure with ``count`` axes, three in each row."""
    columns = min(_COLUMNS, count)
    lines = -(-count // columns)
    figure = new_figure(_PANEL_INCHES * columns, lines * height_inches)
    every = list(figure.subplots(lines, columns, squeeze=False).flatten())
    for axes in every[count:]:
        axes.set_visible(False)
    return figure, every[:count]


def named_rows(
    names: Sequence[str], row_inches: float, width_inches: float, columns: int = 1
) -> tuple[Figure, list[Axes]]:
    """Create a figure with axes side by side that share a y axis, on which the names are listed from top to bottom."""
    figure = new_figure(width_inches, max(2.5, 1.3 + row_inches * len(names)))
    every = list(figure.subplots(1, columns, sharey=True, squeeze=False)[0])
    every[0].set_yticks(range(len(names)), [plain(name) for name in names], fontsize=7)
    every[0].set_ylim(len(names) - 0.4, -0.6)
    return figure, every


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


def draw_boxes(axes: Axes, values: Sequence[ArrayLike], places: Sequence[float], width: float, colour: str) -> None:
    """Draw a horizontal box plot for each group of values, with whiskers to the least and the most."""
    thin = {"color": colour, "linewidth": 0.9}
    axes.boxplot(
        values,
        positions=places,
        widths=width,
        orientation="horizontal",
        showcaps=False,
        manage_ticks=False,
        boxprops=thin,
        whiskerprops=thin,
        medianprops={"color": colour, "linewidth": 2},
        whis=(0, 100),
    )
