"""Elements shared by the pictures: style, colours, axes, bars, box plots and legends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pandas
from numpy.typing import ArrayLike, NDArray

from mucudnn.bench.contests.variants import TORCH
from mucudnn.bench.pages.measured import CONTESTANT
from mucudnn.bench.report.plots import new_figure
from mucudnn.words.torch_settings import TORCHS_OWN
from mucudnn.words.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.artist import Artist
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
_MOST_LETTERS = 44
_COLUMNS = 3  # number of panels side by side
_PANEL_INCHES = 4.4
_LEGEND_INCHES = 2.8  # width of one column of a legend


def one_line(text: str) -> str:
    """Return the text on one line, without formulas or characters that SVG forbids, for use in a picture."""
    return "".join(one if one.isprintable() else " " for one in text).replace("$", r"\$")


def plain(text: str) -> str:
    """Return the text in the form of ``one_line``, shortened to 44 characters."""
    return one_line(text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 1]}…")


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
    """Add one legend above all axes of a figure, with each label once."""
    pairs = (zip(*axes.get_legend_handles_labels(), strict=True) for axes in figure.axes)
    handles = {text: handle for each in pairs for handle, text in each}
    columns = max(1, int(figure.get_figwidth() / _LEGEND_INCHES))
    figure.legend(list(handles.values()), list(handles), loc="outside upper left", ncols=columns, frameon=False)


def panels(count: int, height_inches: float) -> tuple[Figure, list[Axes]]:
    """Create a figure with ``count`` axes, three in each row."""
    columns = min(_COLUMNS, count)
    lines = -(-count // columns)
    figure = new_figure(_PANEL_INCHES * columns, lines * height_inches, "")
    every = list(figure.subplots(lines, columns, squeeze=False).flatten())
    for axes in every[count:]:
        axes.set_visible(False)
    return figure, every[:count]


def named_rows(
    names: Sequence[str], row_inches: float, width_inches: float, columns: int = 1
) -> tuple[Figure, list[Axes]]:
    """Create a figure with axes side by side that share a y axis, on which the names are listed from top to bottom."""
    figure = new_figure(width_inches, max(2.5, 1.3 + row_inches * len(names)), "")
    every = list(figure.subplots(1, columns, sharey=True, squeeze=False)[0])
    name_places(every[0], names)
    return figure, every


def name_places(axes: Axes, names: Sequence[str]) -> None:
    """Label the y axis with the names from top to bottom, at the coordinates 0, 1, 2 and so on."""
    axes.set_yticks(range(len(names)), [plain(name) for name in names], fontsize=7)
    axes.set_ylim(len(names) - 0.4, -0.6)


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


def draw_boxes(
    axes: Axes, values: Sequence[ArrayLike], places: Sequence[float], width: float, colour: str, **style: Any
) -> None:
    """Draw a horizontal box plot for each group of values."""
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
        **style,
    )


def draw_samples(axes: Axes, by_name: Iterable[tuple[str, Sequence[float], str]]) -> None:
    """Draw time samples in milliseconds: for each name a violin plot, a box plot, and a point for every sample.

    by_name: the samples in seconds and the colour of each name.
    """
    names = []
    for place, (name, samples_s, colour) in enumerate(by_name):
        names.append(name)
        times = np.array(samples_s) * 1e3
        if np.ptp(times) > 0:
            shape = axes.violinplot(
                [times], [place], orientation="horizontal", widths=0.85, showextrema=False, points=40
            )
            for body in cast("list[Artist]", shape["bodies"]):
                body.set(facecolor=colour, alpha=0.3)
            draw_boxes(axes, [times], [place], 0.3, colour, showfliers=False)
        axes.plot(times, np.full(len(times), place), "|", color=colour, markersize=4)
        axes.plot([np.median(times)], [place], "D", color=colour, markersize=3)
    name_places(axes, names)
    axes.set_xlim(left=0)


def draw_bars(
    axes: Axes, y: ArrayLike, left: ArrayLike, right: ArrayLike, thickness: float, colour: str, **style: Any
) -> None:
    """Draw horizontal bars of one colour as a single path, which keeps picture files small."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    y, left, right = (np.asarray(each, dtype=float) for each in (y, left, right))
    top, bottom = y - thickness / 2, y + thickness / 2
    corners = np.stack([left, top, right, top, right, bottom, left, bottom, left, top], axis=-1).reshape(-1, 5, 2)
    path = Path.make_compound_path_from_polys(corners)
    axes.add_artist(PathPatch(path, facecolor=colour, edgecolor="none", **style))
    axes.update_datalim(corners.reshape(-1, 2))  # add_patch would compute the limits edge by edge, which is slow
