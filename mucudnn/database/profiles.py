"""Profiles, which ``mucudnn database export`` writes as CSV or JSON lines: read back, the first fault named."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mucudnn.database import schema
from mucudnn.database.database import Database
from mucudnn.database.samples import from_export
from mucudnn.database.sqlite_file import MEMORY
from mucudnn.words.errors import DatabaseError, InvalidInputError

_SQLITE = b"SQLite format 3\0"
_TEXTS = frozenset(
    (
        *("kind", "measured_at", "device", "capability", "torch", "library", "compiled", "numerics"),
        *("operation", "dtype", "memory_format", "algorithm", "reason", "configuration"),
        *("fingerprint", "versions", "findings"),
    )
)
_EXPORT_AGAIN = "export it again with mucudnn database export FILE"
_KINDS = ("measurement", "failure", "verification", "confirmation")

Line = tuple[int, dict[str, Any]]  # its number and its row


def open_stored(path: Path | str) -> Database:
    """Open a database to read from: the SQLite file, or the profile in memory; its content says which, not its name.

    Raises ``DatabaseError`` for any other file, and for what ``Database`` and ``read_profile`` refuse.
    """
    path = Path(path)
    return Database(path, read_only=True) if _content(path).startswith(_SQLITE) else read_profile(path)


def read_profile(path: Path | str) -> Database:
    """Return a database in memory with all rows of the profile and their time stamps: the newest of a key counts.

    Raises ``DatabaseError`` with file, line, what is wrong and what is allowed, for the first row that is.
    """
    path, reached = Path(path), 0
    database = Database(MEMORY)

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal reached
        for number, row in _lines(path, _text(path)):
            reached = number
            yield _current(row)

    try:
        database.add_exported(rows())
    except (InvalidInputError, csv.Error) as error:
        database.close()
        raise DatabaseError(f"profile {path}, line {reached}: {error}; mend that, or {_EXPORT_AGAIN}") from None
    return database


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DatabaseError(f"{path} cannot be read: {error.strerror}; name another database or profile") from error


def _text(path: Path) -> str:
    try:
        text = _content(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_a_profile(path, f"byte {error.start} is not text in UTF-8") from error
    if not text.strip():
        raise _not_a_profile(path, "it is empty")
    return text


def _not_a_profile(path: Path, reason: str) -> DatabaseError:
    return DatabaseError(
        f"{path} is neither a database nor a profile: {reason}; name an SQLite file of mucudnn, or what mucudnn "
        "database export wrote (CSV or JSON lines)"
    )


def _lines(path: Path, text: str) -> Iterator[Line]:
    return _json_lines(text) if text.lstrip().startswith("{") else _csv_lines(path, text)


def _json_lines(text: str) -> Iterator[Line]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, _json_row(line)


def _json_row(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return {"kind": None, "broken": f"broken JSON: {error}"}
    return row if isinstance(row, dict) else {"kind": None, "broken": "not a JSON object; write one object a line"}


def _csv_lines(path: Path, text: str) -> Iterator[Line]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    columns: list[str] | None = None
    before = 0
    try:
        for cells in reader:
            if columns is None:
                columns = _checked_columns(path, cells)
            elif len(cells) == len(columns):
                yield before + 1, _csv_row(dict(zip(columns, cells, strict=True)))
            elif cells:
                wrong = f"has {len(cells)} values; there must be {len(columns)}, as many as columns in line 1"
                yield before + 1, {"kind": None, "broken": wrong}
            before = reader.line_num
    except csv.Error as error:
        yield before + 1, {"kind": None, "broken": f"broken CSV: {error}"}


def _checked_columns(path: Path, columns: list[str]) -> list[str]:
    """Raises ``DatabaseError`` unless they are those of an export, in any order."""
    if "kind" not in columns:
        raise _not_a_profile(path, "its first line does not name the columns of an export")
    wrong = [f"no column {name}" for name in schema.EXPORT_COLUMNS if name not in columns]
    wrong += [f"unknown column {name!r}" for name in columns if name not in schema.EXPORT_COLUMNS]
    wrong += [f"column {name} twice" for name in schema.EXPORT_COLUMNS if columns.count(name) > 1]
    if wrong:
        allowed = ", ".join(schema.EXPORT_COLUMNS)
        raise DatabaseError(f"profile {path}, line 1: {', '.join(wrong)}; the columns are {allowed}; {_EXPORT_AGAIN}")
    return columns


def _csv_row(cells: Mapping[str, str]) -> dict[str, Any]:
    """Read cells: numbers where they are some; an empty cell is a value only of texts that may be empty."""
    is_failure = cells["kind"] == "failure"
    own_texts = {*schema.ENVIRONMENT_COLUMNS, *(["reason"] if is_failure else [])}
    return {
        column: cell if column in _TEXTS else _list(cell) if column in schema.SAMPLE_COLUMNS else _number(cell)
        for column, cell in cells.items()
        if cell or column in own_texts
    }


def _list(text: str) -> Any:
    """Read the JSON of samples; what is none stays text."""
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return text


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _current(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as it is stored. Raises ``InvalidInputError`` for one of another version, or that is none."""
    if "broken" in row:
        raise InvalidInputError(row["broken"])
    if row.get("schema") != schema.VERSION:
        raise InvalidInputError(f"schema is {row.get('schema')!r}; it must be {schema.VERSION}")
    if row.get("kind") not in _KINDS:
        raise InvalidInputError(f"kind is {row.get('kind')!r}; it must be one of {', '.join(_KINDS)}")
    if unknown := row.keys() - {*schema.EXPORT_COLUMNS}:
        raise InvalidInputError(f"unknown columns: {', '.join(sorted(unknown))}")
    return from_export(row)
