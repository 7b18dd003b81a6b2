"""Building blocks of printed tables: columns, and numbers in milliseconds, ratios and MiB."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from mucudnn.core.config import Config
from mucudnn.core.values import format_bytes

PIPED_WIDTH = 320  # columns of a table that goes to a file or another program; on CUDA tables are wide
_BOUNDS = ("workspace_limit", "workspace_budget")


def output() -> Console:
    """Return a console on standard output; if that is not a terminal, the console is wide enough for every table."""
    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False, markup=False, emoji=False)


def new_table(title: str, left: tuple[str, ...], right: Sequence[str], footer: tuple[str, ...] = ()) -> Table:
    """Return a table with left-aligned columns, then right-aligned ones. footer: one text per column, or none."""
    printed = Table(title=title, title_justify="left", caption_justify="left", show_footer=bool(footer))
    for column in left:
        printed.add_column(column)
    for column in right:
        printed.add_column(column, justify="right")
    for index, text in enumerate(footer):
        printed.columns[index].footer = text
    return printed


def memory_bound(config: Config) -> str:
    """Return what bounds memory under a config as text for titles, such as ``workspace limit 64 MiB``."""
    if config.workspace_budget_bytes is not None:
        return f"workspace budget {format_bytes(config.workspace_budget_bytes)}"
    if config.has_headroom_limit:
        return "workspace within the headroom"
    return f"workspace limit {format_bytes(config.workspace_limit_bytes)}"


def bound_in_words(settings: Mapping[str, Any]) -> str:
    """Return the workspace limit or budget in a folder's settings as text, such as ``workspace limit 64 MiB``."""
    return memory_bound(Config(**{name: settings[name] for name in _BOUNDS}))


def spread(samples_s: Sequence[float]) -> dict[str, float | None]:
    """Return the median of samples as ``time_s``, and their interquartile range over the median as ``noise``.

    Both are None if there are no samples.

    >>> spread([0.02, 0.02])
    {'time_s': 0.02, 'noise': 0.0}
    """
    if not samples_s:
        return {"time_s": None, "noise": None}
    lower, middle, upper = np.quantile(samples_s, (0.25, 0.5, 0.75))
    return {"time_s": float(middle), "noise": float((upper - lower) / middle)}


def shares(kinds_s: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each kind of layer in the total time.

    >>> shares({"3x3": 3.0, "rest": 1.0})
    {'3x3': 0.75, 'rest': 0.25}
    """
    whole_s = sum(kinds_s.values())
    return {kind: seconds / whole_s for kind, seconds in kinds_s.items()} if whole_s else {}


def kinds_table(title: str, left: tuple[str, ...], rows: Sequence[tuple[Sequence[str], Mapping[str, float]]]) -> Table:
    """Return a table of the share of each kind of layer in percent.

    left: titles of the first columns. rows: the texts in these columns, and the seconds by kind of layer.
    """
    kinds = list(dict.fromkeys(kind for _, kinds_s in rows for kind in kinds_s))
    printed = new_table(f"{title}: share of time by kind of layer, %", left, kinds)
    for texts, kinds_s in rows:
        of = shares(kinds_s)
        printed.add_row(*texts, *(f"{100 * of[kind]:.1f}" if kind in of else "" for kind in kinds))
    return printed


def short_name(names: Sequence[str]) -> str:
    """Shorten layer names ``a, b, c`` to ``a +2``, for a table row that several equal layers share."""
    first, *others = names
    first = first or "(the model itself)"
    return f"{first} +{len(others)}" if others else first


def some(texts: Sequence[str], most: int = 3) -> str:
    """Join the first ``most`` texts with semicolons, and append the number of remaining texts.

    >>> some(["a", "b", "c"], most=2)
    'a; b; and 1 more'
    """
    more = f"; and {len(texts) - most} more" if len(texts) > most else ""
    return f"{'; '.join(texts[:most])}{more}"


def long_name(names: Sequence[str]) -> str:
    """Join the names of equal layers in full, as ``a, b, c``, for CSV and JSON files."""
    return ", ".join(names)


def milliseconds(time_s: float) -> str:
    """Format a time in milliseconds, without the unit.

    >>> milliseconds(0.02)
    '20.00'
    """
    return f"{time_s * 1e3:.2f}"


def ratio(value: float) -> str:
    """Format a ratio with two decimals and a multiplication sign.

    >>> ratio(1.4)
    '1.40×'
    """
    return f"{value:.2f}×"


def images_per_s(images: int, time_s: float) -> str:
    """Format the throughput in images per second.

    >>> images_per_s(8, 0.25)
    '32.0'
    """
    return f"{images / time_s:.1f}"
