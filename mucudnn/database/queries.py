"""Queries over many rows at once: to solve from them again, and to add rows that were exported."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from mucudnn.database import schema
from mucudnn.database.bad_rows import SoundRows
from mucudnn.database.column_rules import ENVIRONMENT_COLUMNS, PROBLEM_COLUMNS, known_problem
from mucudnn.running.environment import Environment
from mucudnn.words.problem import ConvProblem
from mucudnn.words.results import METHOD, Measurement, MicroConfig, is_busy, of_one_way

_TABLE_COLUMNS = {
    "measurements": (
        *(*schema.KEYS["measurements"].split(", "), "measured_at", *schema.COSTS, "reason", *schema.CIRCUMSTANCES),
        *("passed_over", "needed_bytes", *schema.RAW["measurements"]),
    ),
    "verifications": (
        *(*schema.KEYS["verifications"].split(", "), "measured_at", *schema.TIMES, *schema.CIRCUMSTANCES),
        *schema.RAW["verifications"],
    ),
    "confirmations": (schema.KEYS["confirmations"], "measured_at", "versions", "findings", *schema.CIRCUMSTANCES),
}


def problems(stored: SoundRows, environment: Environment) -> frozenset[ConvProblem]:
    """Return the problems with measurements, as far as this version knows them."""
    find, values = schema.find(environment)
    rows = stored.read_unchecked(
        f"SELECT {schema.PROBLEM} FROM problems WHERE id IN "
        f"(SELECT DISTINCT problem_id FROM measurements WHERE environment_id = ({find}) AND reason IS NULL)",
        values,
    )
    found = frozenset(map(known_problem, rows))
    if None in found:
        stored.tell()
    return frozenset(problem for problem in found if problem is not None)


def versions(stored: SoundRows, environment: Environment) -> dict[str, tuple[int, ...]]:
    """Return, for each algorithm, the versions that were measured, ascending."""
    find, values = schema.find(environment)
    rows = stored.read(
        f"SELECT DISTINCT algorithm, version FROM measurements WHERE environment_id = ({find}) ORDER BY 1, 2", values
    )
    found: dict[str, tuple[int, ...]] = defaultdict(tuple)
    for algorithm, version in rows:
        found[algorithm] += (version,)
    return dict(found)


def measurements(
    stored: SoundRows, environment: Environment, wanted: Iterable[ConvProblem], versions: Mapping[str, int]
) -> dict[ConvProblem, tuple[Measurement, ...]]:
    """Return what ``Database.measurements`` returns, for many problems in one query."""
    by_values = {tuple(schema.flat(problem)): problem for problem in wanted}
    ids = stored.read_unchecked(f"SELECT id, {schema.PROBLEM} FROM problems")
    by_id = {row[0]: by_values[row[1:]] for row in map(tuple, ids) if row[1:] in by_values}
    find, values = schema.find(environment)
    raw = schema.RAW["measurements"]  # read to be checked alone: a row is sound or bad wherever it is read
    columns = ", ".join((*raw, *schema.COSTS, *schema.CIRCUMSTANCES))
    rows = stored.read(
        f"SELECT problem_id, algorithm, micro_batch_size, version, reason, {columns} FROM measurements "
        f"WHERE environment_id = ({find}) AND problem_id IN (SELECT value FROM json_each(?)) "
        f"ORDER BY problem_id, {schema.KEYS['measurements']}, measured_at",  # as it lies in the file
        [*values, json.dumps(list(by_id))],
    )
    micro_config = cache(MicroConfig)  # rows are many, and micro-configs few
    newest: dict[ConvProblem, dict[MicroConfig, tuple[Any, list[Any]]]] = {p: {} for p in by_values.values()}
    for problem_id, algorithm, micro_batch_size, version, reason, *rest in rows:
        if versions.get(algorithm) == version:
            costs = rest[len(raw) :]
            of_problem, key = newest[by_id[problem_id]], micro_config(algorithm, micro_batch_size)
            if key not in of_problem or schema.rank(*costs[-2:]) >= schema.rank(*of_problem[key][1][-2:]):
                of_problem[key] = reason, costs
    return {
        problem: of_one_way([Measurement(m, *costs) for m, (reason, costs) in of_problem.items() if reason is None])
        for problem, of_problem in newest.items()
    }


def newest_method(stored: SoundRows, environment: Environment, problem: ConvProblem) -> int:
    """Return the newest way in which anything of a problem was measured; 0: nothing was."""
    find_environment, environment_values = schema.find(environment)
    find_problem, problem_values = schema.find(problem)
    rows = stored.read_unchecked(
        f"SELECT max(method) FROM measurements WHERE environment_id = ({find_environment}) "
        f"AND problem_id = ({find_problem}) AND reason IS NULL AND typeof(method) = 'integer' AND method <= {METHOD}",
        environment_values + problem_values,
    )
    return rows[0][0] or 0


def confirmation(stored: SoundRows, environment: Environment, fingerprint: str) -> tuple[str, dict[str, Any]] | None:
    """Return when the one that counts was made, and its findings; ``None``: there is none."""
    find, values = schema.find(environment)
    newest: sqlite3.Row | None = None
    for row in stored.read(
        f"SELECT * FROM confirmations WHERE environment_id = ({find}) AND fingerprint = ? AND method = {METHOD} "
        "ORDER BY measured_at",
        [*values, fingerprint],
    ):
        if newest is None or is_busy(row["load"]) <= is_busy(newest["load"]):
            newest = row
    return None if newest is None else (newest["measured_at"], json.loads(newest["findings"]))


def add_exported(
    connection: sqlite3.Connection, rows: Iterable[Mapping[str, Any]], *, otherwise: str = "IGNORE"
) -> Counter[str]:
    """Add rows, which are without faults, with their time stamps; counts those ``added`` and ``known`` before.

    otherwise: what becomes of a row with the key and time stamp of one that is there, IGNORE or REPLACE.
    """

    @cache
    def environment_id(environment: Environment) -> int:
        return schema.identify(connection, environment)

    @cache
    def problem_id(problem_values: Sequence[Any]) -> int:
        return schema.identify(connection, schema.problem_from(problem_values))

    counts = Counter(added=0, known=0)
    for row in rows:
        table = schema.table_of(row["kind"])
        owner = [environment_id(Environment(*(row[column] for column in ENVIRONMENT_COLUMNS)))]
        if "problem_id" in schema.OWNERS[table]:
            owner.append(problem_id(tuple(row[column] for column in PROBLEM_COLUMNS)))
        values = (*owner, *map(row.get, _TABLE_COLUMNS[table]))
        counts["added" if schema.insert(connection, table, values, otherwise=otherwise) else "known"] += 1
    return counts
