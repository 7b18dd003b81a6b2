"""Tables of which every column is a function of the row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from mucudnn.core.tables import Table, new_table

T = TypeVar("T")
Columns = Mapping[str, Callable[[T], str]]  # the text of a row in each column, by the column's title


def table_of(
    rows: Iterable[T],
    title: str,
    left: Columns[T],
    right: Columns[T],
    *,
    caption: str = "",
    failure: Callable[[T], str | None] = lambda row: None,
) -> Table:
    """Return a table with a line for each row.

    left: columns that are aligned left.
    right: columns after these, aligned right.
    failure: why a row has no values on the right, which is shown in their place; None if it has.
    """
    printed = new_table(title, tuple(left), tuple(right))
    for row in rows:
        reason = failure(row)
        cells = [text(row) for text in right.values()] if reason is None else [reason]
        printed.add_row(*(text(row) for text in left.values()), *cells)
    printed.caption = caption
    return printed
