"""Draws plots with matplotlib, but without its global state. matplotlib is optional, and imported to draw a figure."""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mucudnn.terminal.files import whole_file
from mucudnn.words.errors import UnavailableError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


TORCH_COLOUR, OTHER_COLOUR, OURS_COLOUR, ALARM_COLOUR = "#7a7a7a", "#e08214", "#1b6ca8", "#c0202b"
_PNG_DPI = 130
_SVG_DPI = 72  # resolution of matplotlib's SVG, which is fixed


def require_matplotlib() -> None:
    """Raise ``UnavailableError`` if matplotlib is not installed. Call this before a long measurement."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UnavailableError("plots need matplotlib, which is not installed: pip install 'mucudnn[report]'") from None


def new_figure(width_inches: float, height_inches: float, title: str) -> Figure:
    """Return an empty figure with a title, in constrained layout."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    return figure


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG file, which is replaced as a whole."""
    with whole_file(path) as stream:
        write_figure(figure, stream, "png", dpi=_PNG_DPI)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as an SVG file if the file name ends in .svg, otherwise as a PNG file."""
    if path.suffix.lower() != ".svg":
        save_png(figure, path)
        return
    with whole_file(path) as stream:
        write_figure(figure, stream, "svg", metadata={"Date": None})


def write_figure(figure: Figure, stream: IO[Any], form: str, dpi: int = _SVG_DPI, **rest: Any) -> None:
    """Write a figure made by ``new_figure`` as ``png`` or ``svg``. rest: passed to ``Figure.savefig``.

    The layout is computed first, because ``savefig`` would draw the figure twice, once only for the layout.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    (FigureCanvasSVG if form == "svg" else FigureCanvasAgg)(figure)  # The layout depends on the canvas's text widths.
    figure.set_dpi(dpi)
    if layout := figure.get_layout_engine():
        layout.execute(figure)
        figure.set_layout_engine(None)
    figure.savefig(stream, format=form, dpi=dpi, **rest)


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
