"""Files of results that are never half written, however the process that writes them ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_json(path: Path, record: dict[str, Any]) -> None:
    """See ``write_whole``."""
    write_whole(path, json.dumps(record, indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Replace the file as a whole; links, and what is no file (``/dev/stdout``), are written to as they are."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_text(text, encoding="utf-8")
        return
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
