"""What is done to whole databases: counting rows, taking over those of another, removing those no longer used."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from mucudnn.database import schema
from mucudnn.database.file import DatabaseFile
from mucudnn.environment import Environment


def count(file: DatabaseFile, environment: Environment) -> tuple[int, int, int]:
    """Measurements, failures and verifications of an environment, superseded ones included."""
    find, values = schema.find(environment)
    measured, failed = file.read(
        f"SELECT count(*) - count(reason), count(reason) FROM measurements WHERE environment_id = ({find})", values
    )[0]
    verified = file.read(f"SELECT count(*) FROM verifications WHERE environment_id = ({find})", values)[0][0]
    return measured, failed, verified


def merge(connection: sqlite3.Connection, source: DatabaseFile) -> dict[str, int]:
    """Copy the rows of ``source`` and count them: ``added``, ``known`` (there before) and ``incompatible``."""
    environments, problems = _environment_ids(connection, source), _problem_ids(connection, source)
    counts = Counter(added=0, known=0, incompatible=0)
    for table in schema.KEYS:
        for environment_id, problem_id, *values in source.read(f"SELECT * FROM {table}"):
            if problem_id in problems:
                row = (environments[environment_id], problems[problem_id], *values)
                counts["added" if schema.insert(connection, table, row, otherwise="IGNORE") else "known"] += 1
            else:
                counts["incompatible"] += 1
    return dict(counts)


def prune(
    connection: sqlite3.Connection, environments: Sequence[Environment] | None, versions: Mapping[str, int] | None
) -> int:
    """Delete superseded rows, and where given those of other environments and versions. Returns how many."""
    removed = sum(connection.execute(sql, values).rowcount for sql, values in _prunings(environments, versions))
    for key in ("environment", "problem"):
        used = " UNION ".join(f"SELECT {key}_id FROM {table}" for table in schema.KEYS)
        connection.execute(f"DELETE FROM {key}s WHERE id NOT IN ({used})")
    return removed


def _environment_ids(connection: sqlite3.Connection, source: DatabaseFile) -> dict[int, int]:
    """Id there -> id here."""
    rows = source.read(f"SELECT id, {schema.ENVIRONMENT} FROM environments")
    return {row[0]: schema.identify(connection, Environment(*row[1:])) for row in rows}


def _problem_ids(connection: sqlite3.Connection, source: DatabaseFile) -> dict[int, int]:
    """Id there -> id here, of the problems that this version knows."""
    rows = source.read(f"SELECT id, {schema.PROBLEM} FROM problems")
    known = ((row[0], schema.known_problem(row[1:])) for row in rows)
    return {there: schema.identify(connection, problem) for there, problem in known if problem is not None}


def _prunings(
    environments: Sequence[Environment] | None, versions: Mapping[str, int] | None
) -> Iterator[tuple[str, Sequence[str | int]]]:
    """Statements with their parameters, to be executed in this order."""
    for table, key in schema.KEYS.items():
        if environments is not None:
            finds, values = zip(*map(schema.find, environments), strict=True)
            yield f"DELETE FROM {table} WHERE environment_id NOT IN ({' UNION '.join(finds)})", [*chain(*values)]
        if versions is not None:
            yield f"DELETE FROM {table} WHERE {schema.OTHER_VERSIONS[table]}", [json.dumps(dict(versions))]
        same = f"environment_id, problem_id, {key}"
        newest = f"SELECT {same}, max(measured_at) FROM {table} GROUP BY {same}"
        yield f"DELETE FROM {table} WHERE ({same}, measured_at) NOT IN ({newest})", []
