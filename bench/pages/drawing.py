"""Shares what the pictures of reports have in common: style, labels, series and their colours, empty axes."""

from __future__ import annotations

from base64 import b64encode
from collections import Counter
from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pandas

from mucudnn.bench.contests.names import TORCH
from mucudnn.bench.pages.measured import CONTESTANT
from mucudnn.bench.report.plots import new_figure, write_figure
from mucudnn.words.torch_settings import TORCHS_OWN
from mucudnn.words.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT, LINE = "#1f2328", "#59636e", "#d0d7de"
SERIES = ("#0b62a8", "#b35900", "#1a7f37", "#8250df", "#b3202b", "#0a7b83", "#9a6700", "#6e7781")
# Text stays text, in the reader's own font; equal pictures are equal files.
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "mucudnn",
    "font.family": "sans-serif",
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.titlecolor"), INK),
    "axes.edgecolor": FAINT,
    "grid.color": LINE,
}
TORCH_COLOUR = SERIES[-1]
Rectangle = tuple[float, float, float, float]  # left, right, upper, lower
MARKERS = "os^vD<>"
_MOST_LETTERS = 34
_COLUMNS = 3  # of panels
_PANEL_INCHES = 4.4
_LEGEND_INCHES = 2.8  # of a column of a legend


def embedded(figure: Figure) -> str:
    """Return the figure as an address that holds the whole SVG file, as an ``img`` of a page has it."""
    stream = BytesIO()
    write_figure(figure, stream, "svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{b64encode(stream.getvalue()).decode()}"


def one_line(text: str) -> str:
    """Return text as pictures can have it: one line, no characters that SVG forbids, no formulas."""
    return "".join(one if one.isprintable() else " " for one in text).replace("$", r"\$")


def plain(text: str) -> str:
    """Return text as ``one_line`` does, and not too long."""
    return one_line(text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 1]}…")


def series_label(contestant: str, policy: str | None, limit_bytes: float) -> str:
    """Name a contestant under its choices: ``mucudnn, power-of-two, 64 MiB``."""
    if pandas.isna(policy):
        return contestant
    limit = "no limit" if pandas.isna(limit_bytes) else format_bytes(int(limit_bytes))
    return ", ".join((contestant, *(() if policy == contestant else (policy,)), limit))


def with_series(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Return the rows with ``series``, the name of each contestant under its choices."""
    every = zip(*(rows[name] for name in CONTESTANT), strict=True)
    return rows.assign(series=[series_label(*each) for each in every])


def colours(series: Sequence[str]) -> dict[str, str]:
    """Return a colour for each series: torch's own, and the others in their order."""
    others = [name for name in dict.fromkeys(series) if name != TORCH]
    return {TORCH: TORCH_COLOUR} | {name: SERIES[index % (len(SERIES) - 1)] for index, name in enumerate(others)}


def ranked_colours(names: Sequence[str]) -> dict[str, str]:
    """Return a colour for each name, those that occur most often first; torch's own has that of torch."""
    found = [name for name, _ in Counter(names).most_common()]
    others = [name for name in found if name != TORCHS_OWN]
    by_name = {name: SERIES[index % (len(SERIES) - 1)] for index, name in enumerate(others)}
    return {name: by_name.get(name, TORCH_COLOUR) for name in found}


def legend_above(figure: Figure, handles: Sequence[Artist], labels: Sequence[str]) -> None:
    """Put a legend above all axes, where it hides nothing, in as many columns as there is room for."""
    columns = max(1, int(figure.get_figwidth() / _LEGEND_INCHES))
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, frameon=False)


def panels(count: int, height_inches: float) -> tuple[Figure, list[Axes]]:
    """Return a figure with so many axes, side by side in a few columns, each of this height."""
    columns = min(_COLUMNS, count)
    lines = -(-count // columns)
    figure = new_figure(_PANEL_INCHES * columns, lines * height_inches, "")
    every = list(figure.subplots(lines, columns, squeeze=False).flatten())
    for axes in every[count:]:
        axes.set_visible(False)
    return figure, every[:count]


def draw_samples(axes: Axes, samples_s: Sequence[float], place: int, colour: str) -> None:
    """Draw samples at a place of the y axis, in milliseconds: a violin, a box of half of them, and every sample."""
    times = np.array(samples_s) * 1e3
    if np.ptp(times) > 0:
        violin = axes.violinplot([times], [place], orientation="horizontal", widths=0.85, showextrema=False, points=40)
        for body in cast("list[Artist]", violin["bodies"]):
            body.set(facecolor=colour, alpha=0.3)
        thin = {"color": colour, "linewidth": 0.9}
        axes.boxplot(
            [times],
            positions=[place],
            widths=0.3,
            orientation="horizontal",
            showcaps=False,
            showfliers=False,
            manage_ticks=False,
            boxprops=thin,
            whiskerprops=thin,
            medianprops={"color": colour, "linewidth": 2},
        )
    axes.plot(times, np.full(len(times), place), "|", color=colour, markersize=4)
    axes.plot([np.median(times)], [place], "D", color=colour, markersize=3)


def name_places(axes: Axes, names: Sequence[str]) -> None:
    """Name the places of the y axis from the top down, and let x begin at 0."""
    axes.set_yticks(range(len(names)), [plain(name) for name in names], fontsize=7)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.spines[["left"]].set_color(FAINT)


def draw_rectangles(axes: Axes, rectangles: Sequence[Rectangle], colour: str, **style: Any) -> None:
    """Draw all rectangles of a colour as one path, which makes a small file."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    corners = np.array(
        [
            [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
            for left, right, top, bottom in rectangles
        ]
    )
    path = Path.make_compound_path_from_polys(corners)
    axes.add_artist(PathPatch(path, facecolor=colour, edgecolor="none", **style))
    axes.update_datalim(corners.reshape(-1, 2))  # add_patch would look for the extremes of each edge


def height(rows: int, each: float, least: float = 2.5) -> float:
    """Return inches for so many rows, and for what is above and below them."""
    return max(least, 1.3 + each * rows)
