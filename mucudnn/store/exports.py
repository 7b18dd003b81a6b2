"""Exports of a database as JSON lines, and import of such files, which are called profiles."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from mucudnn.core.errors import DatabaseError, InvalidInputError
from mucudnn.core.problem import ConvProblem
from mucudnn.core.records import Environment
from mucudnn.store import schema
from mucudnn.store.database import Database
from mucudnn.store.schema import packed, unpacked
from mucudnn.store.sqlite_file import MEMORY

_SQLITE = b"SQLite format 3\0"
_COLUMNS = (*schema.ROW_COLUMNS, "schema")  # schema: ``schema.VERSION`` of the exported file
_EXPORT_AGAIN = "export it again with mucudnn database export FILE"


def export_json_lines(
    database: Database,
    stream: TextIO,
    environment: Environment | None = None,
    problems: Iterable[ConvProblem] | None = None,
) -> None:
    """Write all rows, oldest first, as one JSON object per line, without empty columns; samples are lists.

    The column ``kind`` is measurement, failure, verification or timing.

    environment: the only environment of which to write rows; None for all.
    problems: the only problems of which to write rows; None for all.
    """
    for row in database.every_row(environment, problems):
        samples = {name: unpacked(row[name]) for name in schema.SAMPLE_COLUMNS if row[name] is not None}
        record = row | samples | {"schema": schema.VERSION}
        present = {name: value for name, value in record.items() if value is not None}
        stream.write(json.dumps(present, allow_nan=False) + "\n")


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
    path, reached, reason = Path(path), 1, None
    try:
        text = _content(path).decode("utf-8-sig")
        if not text.lstrip().startswith("{"):
            reason = "its first line is not a JSON object" if text.strip() else "it is empty"
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not text in UTF-8"
    if reason is not None:
        raise DatabaseError(
            f"{path} is neither a database nor a profile: {reason}; name an SQLite file of mucudnn, or an export of "
            "mucudnn database export"
        )
    database = Database(MEMORY)

    def rows() -> Iterator[schema.Row]:
        nonlocal reached
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                reached = number
                yield _row(line)

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


def _row(line: str) -> schema.Row:
    """Convert a line of a profile to a database row.

    Raises ``InvalidInputError`` for invalid records and for other schema versions.
    """
    try:
        record: schema.Row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"broken JSON: {error}") from None
    if not isinstance(record, dict):
        raise InvalidInputError("not a JSON object; write one object a line")
    if record.get("schema") != schema.VERSION:
        raise InvalidInputError(f"schema is {record.get('schema')!r}; it must be {schema.VERSION}")
    if record.get("kind") not in schema.KINDS:
        raise InvalidInputError(f"kind is {record.get('kind')!r}; it must be one of {', '.join(schema.KINDS)}")
    if unknown := record.keys() - {*_COLUMNS}:
        raise InvalidInputError(f"unknown columns: {', '.join(sorted(unknown))}")
    samples = {name: packed(name, record[name]) for name in schema.SAMPLE_COLUMNS if record.get(name) is not None}
    return record | samples
