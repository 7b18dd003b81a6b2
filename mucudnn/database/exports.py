"""Exports of a database as CSV or JSON lines, and import of such files, which are called profiles."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from mucudnn.database import schema
from mucudnn.database.database import Database
from mucudnn.database.samples import packed, unpacked
from mucudnn.database.sqlite_file import MEMORY
from mucudnn.words.errors import DatabaseError, InvalidInputError

_SQLITE = b"SQLite format 3\0"
COLUMNS = (*schema.ROW_COLUMNS, "schema")  # schema: ``schema.VERSION`` of the exported file
_TEXTS = frozenset(
    (
        *("kind", "measured_at", "device", "capability", "torch", "library", "compiled", "numerics"),
        *("operation", "dtype", "memory_format", "algorithm", "reason", "configuration"),
        *("fingerprint", "findings"),
    )
)
_EXPORT_AGAIN = "export it again with mucudnn database export FILE"
_KINDS = ("measurement", "failure", "verification", "confirmation")

Record = dict[str, Any]


def export_csv(database: Database, stream: TextIO) -> None:
    """Write all rows as CSV with a header line, oldest first; samples are JSON lists.

    The column ``kind`` is measurement, failure, verification or confirmation.
    """
    writer = csv.writer(stream)  # CR LF line ends (RFC 4180), so that values with CR or LF are quoted
    writer.writerow(COLUMNS)
    for record in _exported(database):
        cells = map(record.get, COLUMNS)
        writer.writerow([json.dumps(cell) if isinstance(cell, list) else cell for cell in cells])


def export_json_lines(database: Database, stream: TextIO) -> None:
    """Write the same rows as ``export_csv``, as one JSON object per line, without empty columns."""
    for record in _exported(database):
        present = {name: value for name, value in record.items() if value is not None}
        stream.write(json.dumps(present, allow_nan=False) + "\n")


def _exported(database: Database) -> Iterator[Record]:
    for row in database.every_row():
        samples = {name: unpacked(row[name]) for name in schema.SAMPLE_COLUMNS if row[name] is not None}
        yield row | samples | {"schema": schema.VERSION}


def open_stored(path: Path | str) -> Database:
    """Open an SQLite file read-only, or read a profile (an exported database) into memory, depending on its content.

    Raises ``DatabaseError`` for any other file, and for files that ``Database`` or ``read_profile`` rejects.
    """
    path = Path(path)
    return Database(path, read_only=True) if _content(path).startswith(_SQLITE) else read_profile(path)


def read_profile(path: Path | str) -> Database:
    """Return a database in memory with all rows of a profile (an exported database), time stamps included.

    Raises ``DatabaseError`` for the first invalid row, naming file, line, error and allowed values.
    """
    path, reached = Path(path), 1
    text = _text(path)
    database = Database(MEMORY)

    def rows() -> Iterator[schema.Row]:
        nonlocal reached
        for number, read in _json_lines(text) if text.lstrip().startswith("{") else _csv_lines(path, text):
            reached = number
            yield _row(read)

    try:
        database.add_exported(rows())
    except InvalidInputError as error:
        database.close()
        raise DatabaseError(f"profile {path}, line {reached}: {error}; fix that, or {_EXPORT_AGAIN}") from None
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
        f"{path} is neither a database nor a profile: {reason}; name an SQLite file of mucudnn, or an export of "
        "mucudnn database export (CSV or JSON lines)"
    )


# Parsers, which yield each line's number with its record or an error text


def _json_lines(text: str) -> Iterator[tuple[int, Record | str]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                read = json.loads(line)
            except (ValueError, RecursionError) as error:
                yield number, f"broken JSON: {error}"
            else:
                yield number, read if isinstance(read, dict) else "not a JSON object; write one object a line"


def _csv_lines(path: Path, text: str) -> Iterator[tuple[int, Record | str]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    columns: list[str] | None = None
    before = 0
    try:
        for cells in reader:
            if columns is None:
                columns = _checked_columns(path, cells)
            elif len(cells) == len(columns):
                yield before + 1, _csv_record(dict(zip(columns, cells, strict=True)))
            elif cells:
                as_many = f"there must be {len(columns)}, as many as columns in line 1"
                yield before + 1, f"has {len(cells)} values; {as_many}"
            before = reader.line_num
    except csv.Error as error:
        yield before + 1, f"broken CSV: {error}"


def _checked_columns(path: Path, columns: list[str]) -> list[str]:
    """Return the names of the columns; raise ``DatabaseError`` unless they are an export's columns, in any order."""
    if "kind" not in columns:
        raise _not_a_profile(path, "its first line does not name the columns of an export")
    wrong = [f"no column {name}" for name in COLUMNS if name not in columns]
    wrong += [f"unknown column {name!r}" for name in columns if name not in COLUMNS]
    wrong += [f"column {name} twice" for name in COLUMNS if columns.count(name) > 1]
    if wrong:
        allowed = ", ".join(COLUMNS)
        raise DatabaseError(f"profile {path}, line 1: {', '.join(wrong)}; the columns are {allowed}; {_EXPORT_AGAIN}")
    return columns


def _csv_record(cells: Mapping[str, str]) -> Record:
    """Return the values of a CSV line by column, without empty cells except in text columns that may be empty."""
    may_be_empty = {*schema.ENVIRONMENT_COLUMNS, *(["reason"] if cells["kind"] == "failure" else [])}
    return {
        column: cell if column in _TEXTS else _value(cell)
        for column, cell in cells.items()
        if cell or column in may_be_empty
    }


def _value(cell: str) -> Any:
    """Convert a cell to a number or a list of samples.

    Other text is returned unchanged; the database table rejects it later.
    """
    with suppress(ValueError, RecursionError):
        return json.loads(cell)
    return cell


def _row(record: Record | str) -> schema.Row:
    """Convert an exported record to a database row.

    Raises ``InvalidInputError`` for invalid records and for other schema versions.
    """
    if isinstance(record, str):
        raise InvalidInputError(record)
    if record.get("schema") != schema.VERSION:
        raise InvalidInputError(f"schema is {record.get('schema')!r}; it must be {schema.VERSION}")
    if record.get("kind") not in _KINDS:
        raise InvalidInputError(f"kind is {record.get('kind')!r}; it must be one of {', '.join(_KINDS)}")
    if unknown := record.keys() - {*COLUMNS}:
        raise InvalidInputError(f"unknown columns: {', '.join(sorted(unknown))}")
    samples = {name: packed(name, record[name]) for name in schema.SAMPLE_COLUMNS if record.get(name) is not None}
    return record | samples
