"""Rows of a database with their owners, queries over many of them at once, and adding those that were exported."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from mucudnn.database import schema
from mucudnn.database.schema import ENVIRONMENT_COLUMNS, PROBLEM_COLUMNS
from mucudnn.database.sqlite_file import SqliteFile
from mucudnn.running.environment import Environment
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import ConvProblem
from mucudnn.words.results import Measurement, MicroConfig, is_busy, is_doubtful


@dataclass(frozen=True, slots=True)
class StoredRow:
    """A row of a table with its environment and problem.

    owner: ids of both; ``None`` where it has no problem. values: by ``schema.ROW_COLUMNS``.
    """

    owner: tuple[int, int | None]
    values: dict[str, Any]

    @property
    def table(self) -> str:
        return schema.table_of(self.values["kind"])

    @property
    def is_doubtful(self) -> bool:
        """Whether it should be measured again."""
        return self.values["kind"] != "failure" and is_doubtful(self.values["noise"], self.values["load"])

    @property
    def key(self) -> tuple[Any, ...]:
        """Values of which the newest row counts."""
        return self.table, self.owner, *(self.values[name] for name in schema.KEYS[self.table].split(", "))


def every_row(file: SqliteFile, condition: str = "TRUE") -> Iterator[StoredRow]:
    """Yield all rows of a file, oldest first; those of which a condition in SQL is true."""
    for environment_id, problem_id, *columns in file.read(schema.every_row(condition)):
        yield StoredRow((environment_id, problem_id), dict(zip(schema.ROW_COLUMNS, columns, strict=True)))


def latest_valid(rows: Iterable[StoredRow]) -> list[StoredRow]:
    """Return the row of each key that counts, of rows in the order in which they were made."""
    found: dict[tuple[Any, ...], StoredRow] = {}
    for row in rows:
        if row.key not in found or counts(row.values["load"], found[row.key].values["load"]):
            found[row.key] = row
    return [*found.values()]


def counts(load: float | None, before: float | None) -> bool:
    """Whether a row counts instead of an older one: nothing that was not disturbed is replaced by what was."""
    return is_busy(load) <= is_busy(before)


def problems(file: SqliteFile, environment: Environment) -> frozenset[ConvProblem]:
    """Return the problems with measurements."""
    find, values = schema.find(environment)
    rows = file.read(
        f"SELECT {schema.PROBLEM} FROM problems WHERE id IN "
        f"(SELECT DISTINCT problem_id FROM measurements WHERE environment_id = ({find}) AND reason IS NULL)",
        values,
    )
    return frozenset(map(schema.problem_from, rows))


def versions(file: SqliteFile, environment: Environment) -> dict[str, tuple[int, ...]]:
    """Return, for each algorithm, the versions that were measured, ascending."""
    find, values = schema.find(environment)
    rows = file.read(
        f"SELECT DISTINCT algorithm, version FROM measurements WHERE environment_id = ({find}) ORDER BY 1, 2", values
    )
    found: dict[str, tuple[int, ...]] = defaultdict(tuple)
    for algorithm, version in rows:
        found[algorithm] += (version,)
    return dict(found)


def measurements(
    file: SqliteFile, environment: Environment, wanted: Iterable[ConvProblem], versions: Mapping[str, int]
) -> dict[ConvProblem, tuple[Measurement, ...]]:
    """Return what ``Database.measurements`` returns, for many problems in one query."""
    by_values = {tuple(schema.flat(problem)): problem for problem in wanted}
    ids = file.read(f"SELECT id, {schema.PROBLEM} FROM problems")
    by_id = {row[0]: by_values[row[1:]] for row in map(tuple, ids) if row[1:] in by_values}
    find, values = schema.find(environment)
    rows = file.read(
        f"SELECT problem_id, algorithm, micro_batch_size, version, reason, {', '.join(schema.COSTS)}, load "
        f"FROM measurements WHERE environment_id = ({find}) AND problem_id IN (SELECT value FROM json_each(?)) "
        f"ORDER BY problem_id, {schema.KEYS['measurements']}, measured_at",  # as it lies in the file
        [*values, json.dumps(list(by_id))],
    )
    micro_config = cache(MicroConfig)  # rows are many, and micro-configs few
    newest: dict[ConvProblem, dict[MicroConfig, tuple[Any, list[Any]]]] = {p: {} for p in by_values.values()}
    for problem_id, algorithm, micro_batch_size, version, reason, *costs in rows:
        if versions.get(algorithm) == version:
            of_problem, key = newest[by_id[problem_id]], micro_config(algorithm, micro_batch_size)
            if key not in of_problem or counts(costs[-1], of_problem[key][1][-1]):
                of_problem[key] = reason, costs
    return {
        problem: tuple(Measurement(m, *costs) for m, (reason, costs) in of_problem.items() if reason is None)
        for problem, of_problem in newest.items()
    }


def confirmation(file: SqliteFile, environment: Environment, fingerprint: str) -> tuple[str, dict[str, Any]] | None:
    """Return when the one that counts was made, and its findings; ``None``: there is none."""
    find, values = schema.find(environment)
    newest: sqlite3.Row | None = None
    for row in file.read(
        f"SELECT * FROM confirmations WHERE environment_id = ({find}) AND fingerprint = ? ORDER BY measured_at",
        [*values, fingerprint],
    ):
        if newest is None or counts(row["load"], newest["load"]):
            newest = row
    return None if newest is None else (newest["measured_at"], json.loads(newest["findings"]))


def add_exported(
    connection: sqlite3.Connection, rows: Iterable[Mapping[str, Any]], *, replaces: bool = False
) -> Counter[str]:
    """Add rows with their time stamps; counts those ``added`` and ``known`` before.

    replaces: a row with the key and time stamp of one that is there. Raises ``InvalidInputError`` for values that
    there cannot be.
    """

    @cache
    def environment_id(values: Sequence[Any]) -> int:
        return schema.identify(connection, Environment(*values))

    @cache
    def problem_id(values: Sequence[Any]) -> int:
        return schema.identify(connection, schema.problem_from(values))

    require_key = cache(schema.whole_run_from)  # keys recur
    found = Counter(added=0, known=0)
    for row in rows:
        table = schema.table_of(row["kind"])
        try:
            owner = [environment_id(tuple(map(row.get, ENVIRONMENT_COLUMNS)))]
            if "problem_id" in schema.OWNERS[table]:
                owner.append(problem_id(tuple(map(row.get, PROBLEM_COLUMNS))))
        except (ValueError, TypeError) as error:
            raise InvalidInputError(str(error)) from None
        values = (*owner, *map(row.get, schema.COLUMNS[table]))
        found["added" if schema.insert(connection, table, values, replaces=replaces) else "known"] += 1
        if table == "verifications":
            require_key(row["configuration"])
    return found
