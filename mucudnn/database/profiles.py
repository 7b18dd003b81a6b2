"""Profiles, the files that ``mucudnn database export`` writes as CSV or JSON lines: read back, every bad row named."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mucudnn.database import schema
from mucudnn.database.column_rules import COLUMNS_OF, ENVIRONMENT_COLUMNS, PROBLEM_COLUMNS, row_faults
from mucudnn.database.database import Database
from mucudnn.database.migrations import BEFORE_EXPORTS_SAID, SINCE_VERSION_1, migrated_row
from mucudnn.database.samples import from_export
from mucudnn.database.sqlite_file import MEMORY
from mucudnn.words.errors import DatabaseError

_SQLITE = b"SQLite format 3\0"
_MOST_SHOWN = 20  # bad rows in one message
_TEXTS = frozenset(
    (
        *("kind", "measured_at", "device", "capability", "torch", "library", "compiled", "numerics"),
        *("operation", "dtype", "memory_format", "algorithm", "reason", "configuration"),
        *("fingerprint", "versions", "findings"),
    )
)
_EXPORT_AGAIN = "export it again with mucudnn database export FILE"
_KEY_COLUMNS = ("measured_at", *ENVIRONMENT_COLUMNS, *PROBLEM_COLUMNS, *", ".join(schema.KEYS.values()).split(", "))

Line = tuple[int, dict[str, Any] | str]  # its number, and its row or what is wrong with the whole of it


def open_stored(path: Path | str) -> Database:
    """Open a database to read from: the SQLite file, or the profile in memory; its content says which, not its name.

    Raises ``DatabaseError`` for any other file, and for what ``Database`` and ``read_profile`` refuse.
    """
    path = Path(path)
    return Database(path, read_only=True) if _content(path).startswith(_SQLITE) else read_profile(path)


def read_profile(path: Path | str) -> Database:
    """Return a database in memory with all rows of the profile and their time stamps: the newest of a key counts.

    Raises ``DatabaseError`` with file, line, column, what is wrong and what is allowed, for every bad row.
    """
    path = Path(path)
    rows, faults = _checked(_lines(path, _text(path)))
    if faults:
        more = f"\n  and {len(faults) - _MOST_SHOWN} more" if len(faults) > _MOST_SHOWN else ""
        listed = "".join(f"\n  {fault}" for fault in faults[:_MOST_SHOWN])
        raise DatabaseError(f"profile {path} is not used; mend these rows, or {_EXPORT_AGAIN}:{listed}{more}")
    database = Database(MEMORY)
    database.add_exported(rows)
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


def _json_row(line: str) -> dict[str, Any] | str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"broken JSON: {error}"
    return row if isinstance(row, dict) else "not a JSON object; write one object a line"


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
                yield before + 1, f"has {len(cells)} values; there must be {len(columns)}, as many as columns in line 1"
            before = reader.line_num
    except csv.Error as error:
        yield before + 1, f"broken CSV: {error}"  # and nothing tells where the next row begins


def _checked_columns(path: Path, columns: list[str]) -> list[str]:
    """Raises ``DatabaseError`` unless they are those of an export, of this or an earlier version, in any order."""
    if "kind" not in columns:
        raise _not_a_profile(path, "its first line does not name the columns of an export")
    required = [name for name in schema.ROW_COLUMNS if name not in SINCE_VERSION_1]
    wrong = [f"no column {name}" for name in required if name not in columns]
    wrong += [f"unknown column {name!r}" for name in columns if name not in schema.EXPORT_COLUMNS]
    wrong += [f"column {name} twice" for name in schema.EXPORT_COLUMNS if columns.count(name) > 1]
    if wrong:
        allowed = ", ".join(schema.EXPORT_COLUMNS)
        raise DatabaseError(f"profile {path}, line 1: {', '.join(wrong)}; the columns are {allowed}; {_EXPORT_AGAIN}")
    return columns


def _csv_row(cells: Mapping[str, str]) -> dict[str, Any]:
    """Read cells: numbers where they are some; an empty cell is a value only where the kind has a text."""
    own_texts = _TEXTS.intersection(COLUMNS_OF.get(cells["kind"], ()))
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


def _checked(lines: Iterator[Line]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the good rows, and what is wrong with the others."""
    rows: list[dict[str, Any]] = []
    faults: list[str] = []
    line_of: dict[tuple[Any, ...], int] = {}
    for number, line in lines:
        row: dict[str, Any] | str = line if isinstance(line, str) else from_export({**SINCE_VERSION_1, **line})
        wrong = [row] if isinstance(row, str) else row_faults(row)
        if isinstance(row, dict) and not wrong:
            first = line_of.setdefault(_key(row), number)
            wrong = [f"has the key and measured_at of line {first}; keep one of the two"] if first != number else []
            rows.append(migrated_row(row, row.pop("schema", BEFORE_EXPORTS_SAID)))
        if wrong:
            faults.append(f"line {number}: {'; '.join(wrong)}")
    return rows, faults


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the values that can be in a database once."""
    return tuple(map(row.get, _KEY_COLUMNS))
