"""Writes results as JSON objects and CSV rows. Each file is replaced as a whole, as in ``terminal.files``."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mucudnn.core.errors import OutputError
from mucudnn.core.files import whole_text

if TYPE_CHECKING:
    import pandas


def write_each(*files: tuple[Path | None, Callable[[Path], None]]) -> None:
    """Write each file whose path is not None by calling its function, even if another file fails.

    Raises ``OutputError`` with all failures, after trying all files.
    """
    failures = []
    for path, write in files:
        if path is not None:
            try:
                write(path)
            except OutputError as error:
                failures.append(str(error))
    if failures:
        raise OutputError("\n".join(failures))


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write one JSON object, with null for infinity and NaN. The file is replaced as a whole."""
    with whole_text(path) as stream:
        stream.write(json_text(record))


def json_text(record: Mapping[str, Any]) -> str:
    """Return a JSON object as the text that ``write_json`` would write."""
    return json.dumps(_finite(record), indent=2, allow_nan=False) + "\n"


def json_line(record: Mapping[str, Any]) -> str:
    """Return a JSON object as one line of a JSON Lines file, with null for infinity and NaN."""
    return json.dumps(_finite(record), allow_nan=False) + "\n"


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as CSV, with the keys of the first row as columns; write an empty file if there are no rows."""
    with whole_text(path) as stream:
        writer = csv.DictWriter(stream, rows[0] if rows else ())
        if rows:
            writer.writeheader()
        writer.writerows(rows)


def write_csv_of(path: Path, frame: pandas.DataFrame) -> None:
    """Write a data frame as CSV, without its index and with all digits of numbers. The file is replaced as a whole."""
    with whole_text(path) as stream:
        frame.to_csv(stream, index=False)


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if isfinite(value) else None
        case Mapping():
            return {key: _finite(each) for key, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
    return value
