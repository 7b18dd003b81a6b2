"""Plain-text tables and lines of at most ``WIDTH`` columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from textwrap import fill

WIDTH = 100
_LEAST_NAME = 16  # columns
_MOST_NAMED = 4


def filled(text: str) -> str:
    """Wrap a line of text at ``WIDTH`` columns, with indented continuation lines."""
    return fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def listed(names: Sequence[str]) -> str:
    """Join names with commas; if there are more than four, list the first four and count the rest.

    >>> listed(["a", "b", "c", "d", "e"])
    'a, b, c, d and 1 more'
    """
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(names[:_MOST_NAMED])}{more}"


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a text line for each row, with aligned columns. Too long names in the first column lose their middle."""
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    first = min(first, max(WIDTH - sum(widths) - len("  ") * len(widths), _LEAST_NAME))
    for name, *cells in rows:
        keep = (first - 1) // 2
        shown = name if len(name) <= first else f"{name[: first - 1 - keep]}…{name[-keep:]}"
        padded = (cell.ljust(width) for cell, width in zip((shown, *cells), (first, *widths), strict=True))
        yield "  ".join(padded).rstrip()


def preformatted(text: str) -> str:
    """Return text as HTML that keeps its lines and columns."""
    return f"<pre>{escape(text)}</pre>"
