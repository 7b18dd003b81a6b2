"""Tables and prose are compared as a whole with ``tests/snapshots``, where they stand as users see them.

``MUCUDNN_SNAPSHOTS=write make test`` writes them anew: look at the difference before you commit it.
"""

from __future__ import annotations

import io
import os

from rich.console import Console
from support.places import SNAPSHOTS

from mucudnn.core.tables import Table

IS_WRITING = os.environ.get("MUCUDNN_SNAPSHOTS") == "write"
_WIDTH = 200  # wide enough for every table, and for prose in a line


def printed(*parts: Table | str) -> str:
    """Tables and prose as commands print them, without the blanks that fill up lines."""
    console = Console(file=io.StringIO(), width=_WIDTH, highlight=False, markup=False, emoji=False)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def assert_as_stored(name: str, *parts: Table | str) -> None:
    """Compare with ``tests/snapshots/NAME.txt``."""
    path, text = SNAPSHOTS / f"{name}.txt", printed(*parts)
    if IS_WRITING:
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{path} says otherwise"
