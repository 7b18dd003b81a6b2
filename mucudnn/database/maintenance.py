"""Work on whole databases: counting rows, and removing those no longer used."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from mucudnn.database import schema
from mucudnn.database.sqlite_file import SqliteFile
from mucudnn.running.environment import Environment

Statement = tuple[str, Sequence[Any] | Mapping[str, Any]]  # SQL and its parameters


def count(file: SqliteFile, environment: Environment) -> tuple[int, int, int, int]:
    """Count measurements, failures, whole runs and confirmations of an environment, superseded ones included."""
    find, values = schema.find(environment)
    measured, failed = file.read(
        f"SELECT count(*) - count(reason), count(reason) FROM measurements WHERE environment_id = ({find})", values
    )[0]
    verified, confirmed = (
        file.read(f"SELECT count(*) FROM {table} WHERE environment_id = ({find})", values)[0][0]
        for table in ("verifications", "confirmations")
    )
    return measured, failed, verified, confirmed


def prune(
    connection: sqlite3.Connection,
    environments: Sequence[Environment] | None,
    versions: Mapping[str, int] | None,
    failures: bool,
) -> int:
    """Delete superseded rows, and where given those of others, or failures. Returns how many."""
    statements = _prunings(environments, versions, failures)
    removed = sum(connection.execute(sql, values).rowcount for sql, values in statements)
    measured = " UNION ".join(f"SELECT environment_id FROM {table}" for table in schema.KEYS)
    connection.execute(f"DELETE FROM rates WHERE environment_id NOT IN ({measured})")
    for key in ("environment", "problem"):
        owned = (table for table, owners in schema.OWNERS.items() if f"{key}_id" in owners)
        used = " UNION ".join(f"SELECT {key}_id FROM {table}" for table in owned)
        connection.execute(f"DELETE FROM {key}s WHERE id NOT IN ({used})")
    return removed


def _prunings(
    environments: Sequence[Environment] | None, versions: Mapping[str, int] | None, failures: bool
) -> Iterator[Statement]:
    """Yield statements in the order to execute them: failures last, or an older measurement would take their place."""
    for table, key in schema.KEYS.items():
        if environments is not None:
            finds, values = zip(*map(schema.find, environments), strict=True)
            yield f"DELETE FROM {table} WHERE environment_id NOT IN ({' UNION '.join(finds)})", [*chain(*values)]
        if versions is not None:
            yield f"DELETE FROM {table} WHERE {schema.OTHER_VERSIONS[table]}", {"versions": json.dumps(dict(versions))}
        same = ", ".join((*schema.OWNERS[table], key))
        counts = f"SELECT {same}, max({schema.RANK}) FROM {table} GROUP BY {same}"
        yield f"DELETE FROM {table} WHERE ({same}, {schema.RANK}) NOT IN ({counts})", []
    if failures:
        yield "DELETE FROM measurements WHERE reason IS NOT NULL", []
