"""Shares what the pictures of reports have in common: labels, series and their colours, empty axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas

from mucudnn.bench.contests.torch_variants import TORCH
from mucudnn.bench.pages.measured import CONTESTANT
from mucudnn.bench.pages.pictures.svg import SERIES
from mucudnn.words.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

TORCH_COLOUR = SERIES[-1]
_MOST_LETTERS = 34
_LEGEND_INCHES = 2.8  # of a column of a legend


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


def legend_above(figure: Figure, handles: Sequence[Artist], labels: Sequence[str]) -> None:
    """Put a legend above all axes, where it hides nothing, in as many columns as there is room for."""
    columns = max(1, int(figure.get_figwidth() / _LEGEND_INCHES))
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, frameon=False)


def height(rows: int, each: float, least: float = 2.5) -> float:
    """Return inches for so many rows, and for what is above and below them."""
    return max(least, 1.3 + each * rows)
