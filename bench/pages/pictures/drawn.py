"""Pictures of a result folder, drawn by matplotlib from what ``measured`` returned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from mucudnn.bench.pages.pictures import cuts, limits, samples, speedups
from mucudnn.bench.pages.pictures.svg import STYLE, inline_svg
from mucudnn.bench.report.plots import require_matplotlib, save_figure
from mucudnn.words.errors import UnavailableError

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from mucudnn.bench.pages.page import Report


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of picture. draw: returns the figure, or ``None`` where the rows have nothing for it."""

    title: str
    caption: str
    draw: Callable[[pandas.DataFrame], Figure | None]


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture in the page: its SVG, what it is called, and what it shows."""

    title: str
    caption: str
    svg: str


_TOLD_BY_TABLE = "All of its numbers are in the table of operations."
KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "speedups": Kind("Speedup of each layer, by workspace limit", speedups.CAPTION, speedups.draw),
        "limits": Kind("How far from the machine's limit", limits.CAPTION, limits.draw),
        "samples": Kind("Samples of each contestant", samples.CAPTION, samples.draw),
        "cuts": Kind("How the mini-batch is cut", cuts.CAPTION, cuts.draw),
    }
)


def pictures_or_reason(report: Report) -> tuple[list[Picture], str]:
    """Return all pictures that the rows suffice for, or none and the reason."""
    try:
        require_matplotlib()
    except UnavailableError as error:
        return [], str(error)
    from matplotlib import rc_context

    with rc_context(STYLE):
        figures = {name: kind.draw(report.rows) for name, kind in KINDS.items()}
        return [
            Picture(kind.title, kind.caption, inline_svg(figure, name, f"{kind.title}. {_TOLD_BY_TABLE}"))
            for name, kind in KINDS.items()
            if (figure := figures[name]) is not None
        ], ""


def write_picture(name: str, rows: pandas.DataFrame, path: Path) -> bool:
    """Draw one picture into a PNG or an SVG file; False: the rows have nothing for it, and there is no file.

    Raises ``UnavailableError`` where matplotlib is not installed, and ``OutputError`` for a file that cannot be.
    """
    require_matplotlib()
    from matplotlib import rc_context

    with rc_context(STYLE):
        figure = KINDS[name].draw(rows)
        if figure is not None:
            save_figure(figure, path)
    return figure is not None
