"""Tells of results that an earlier run has left in the folder of ``--out``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mucudnn.bench.folders.writing import FolderWriter


def tell_nothing_is_left(folder: FolderWriter) -> None:
    """Say that the folder has all, and who shows it."""
    from mucudnn.terminal.console import output

    text = f"{folder.path} has it all, and nothing was measured: mucudnn report {folder.path} shows it"
    output().print(text, soft_wrap=True)
