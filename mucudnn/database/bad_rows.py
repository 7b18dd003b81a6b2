"""Bad rows, with values that there cannot be: they are passed over, and what they were about is measured again."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mucudnn.database import schema
from mucudnn.database.column_rules import RULES, is_of_another_version, own_faults, owner_faults
from mucudnn.database.sqlite_file import SqliteFile
from mucudnn.words.results import is_doubtful
from mucudnn.words.values import shown
from mucudnn.words.warning import warn

_MOST_SHOWN = 3  # of the faults of one row
_NOT_OF_FAILURES = frozenset((*schema.COSTS, "load", *schema.RAW["measurements"]))


@dataclass(frozen=True, slots=True)
class StoredRow:
    """A row of a table with its environment and problem, and everything that is wrong with it.

    owner: ids of both; ``None`` where it has no problem. values: by ``schema.ROW_COLUMNS``.
    """

    owner: tuple[Any, Any]
    values: dict[str, Any]
    faults: Sequence[str]

    @property
    def table(self) -> str:
        return schema.table_of(self.values["kind"])

    @property
    def is_bad(self) -> bool:
        """Whether it is wrong for every mucudnn: a row with names that a later one may know is not bad."""
        return bool(self.faults) and not is_of_another_version(self.values)

    @property
    def is_doubtful(self) -> bool:
        """Whether a sound one should be measured again."""
        v = self.values
        return v["kind"] != "failure" and is_doubtful(v["noise"], v["load"], v["method"])

    @property
    def key(self) -> dict[str, Any]:
        """Column -> value: together no other row of the table has them."""
        names = (*schema.KEYS[self.table].split(", "), "measured_at")
        owner = dict(zip(schema.OWNERS[self.table], self.owner, strict=False))
        return owner | {name: self.values[name] for name in names}

    def __str__(self) -> str:
        key = ", ".join(f"{name} {shown(value)}" for name, value in self.key.items())
        more = len(self.faults) - _MOST_SHOWN
        return f"table {self.table}, {key}: {'; '.join(self.faults[:_MOST_SHOWN])}{f' and {more} more' * (more > 0)}"


def every_row(file: SqliteFile, condition: str = "TRUE") -> Iterator[StoredRow]:
    """Yield all rows of a file, sound or not, oldest first; those of which a condition in SQL is true."""
    of_owner: dict[tuple[Any, Any], list[str]] = {}  # owners are few, and rows many
    for environment_id, problem_id, *columns in file.read(schema.every_row(condition)):
        owner, values = (environment_id, problem_id), dict(zip(schema.ROW_COLUMNS, columns, strict=True))
        if owner not in of_owner:
            of_owner[owner] = owner_faults(values)
        yield StoredRow(owner, values, [*of_owner[owner], *own_faults(values)])


class SoundRows:
    """Reads a file without its bad rows. One warning tells of all that the file has."""

    def __init__(self, file: SqliteFile) -> None:
        self._file = file
        self._has_told = False

    def read(self, sql: str, parameters: Sequence[Any] = ()) -> list[sqlite3.Row]:
        """Rows of any columns of a table, under their names, or of measurements with ``reason`` among them."""
        rows = self._file.read(sql, parameters)
        sound = _without_bad(rows)
        if len(sound) < len(rows):
            self.tell()
        return sound

    def read_unchecked(self, sql: str, parameters: Sequence[Any] = ()) -> list[sqlite3.Row]:
        return self._file.read(sql, parameters)

    def bad_rows(self) -> list[StoredRow]:
        return [row for row in every_row(self._file) if row.is_bad]

    def tell(self) -> None:
        """Warn once of what cannot be used, and say what to do."""
        if self._has_told:
            return
        self._has_told = True
        if bad := self.bad_rows():
            rows, they = ("1 bad row", "it") if len(bad) == 1 else (f"{len(bad)} bad rows", "them")
            warn(
                f"database {self._file.path} has {rows}, passed over as if nothing had been measured: {bad[0]}; "
                f"mucudnn database prune removes {they}",
                stacklevel=4,
            )


def _without_bad(rows: list[sqlite3.Row]) -> list[sqlite3.Row]:
    """Return the sound rows. They are looked at one by one only where something is wrong: by columns is faster."""
    names = rows[0].keys() if rows else []
    measured = [row for row in rows if "reason" not in names or row["reason"] is None]
    failed = [row for row in rows if "reason" in names and row["reason"] is not None]
    if all(_are_sound(names, part) for part in (measured, failed)):
        return rows
    return [row for row in rows if _are_sound(names, [row])]


def _are_sound(names: Sequence[str], rows: Sequence[sqlite3.Row]) -> bool:
    """Whether all values are allowed. The rows are of one kind."""
    is_failure = bool(rows) and "reason" in names and rows[0]["reason"] is not None
    columns = zip(names, zip(*rows, strict=True), strict=False)
    return all(all(map(_rule(name, is_failure), values)) for name, values in columns)


def _rule(name: str, is_failure: bool) -> Callable[[Any], bool]:
    if name not in RULES:
        return lambda _: True
    if name in (_NOT_OF_FAILURES if is_failure else schema.OF_FAILURES):
        return lambda value: value is None
    return RULES[name].allows
