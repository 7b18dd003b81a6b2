"""Work on whole databases: counting rows, taking over those of another, removing those no longer used."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from mucudnn.database import schema
from mucudnn.database.bad_rows import StoredRow, every_row
from mucudnn.database.queries import add_exported
from mucudnn.database.sqlite_file import UNDECODABLE, SqliteFile
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


def that_count(rows: Iterable[StoredRow]) -> list[StoredRow]:
    """Return the sound rows that count, of rows in the order in which they were made: one of each key.

    Of a problem all that was measured, and run whole, was so in one way: the newest that there is.
    """
    found: dict[tuple[Any, ...], StoredRow] = {}
    for row in rows:
        key = tuple(value for name, value in row.key.items() if name != "measured_at")
        if not row.faults and (key not in found or _rank(row) >= _rank(found[key])):
            found[key] = row
    newest: dict[tuple[Any, ...], int] = defaultdict(int)
    for row in found.values():
        of = row.owner, row.values["kind"]
        newest[of] = max(row.values["method"], newest[of])

    def is_of_newest(row: StoredRow) -> bool:
        kinds = {"failure": (), "measurement": ("measurement",), "verification": ("measurement", "verification")}
        return all(row.values["method"] >= newest[row.owner, kind] for kind in kinds[row.values["kind"]])

    return [row for row in found.values() if is_of_newest(row)]


def _rank(row: StoredRow) -> tuple[int, bool]:
    return schema.rank(*(row.values[name] for name in schema.CIRCUMSTANCES))


def merge(connection: sqlite3.Connection, rows: Iterable[StoredRow]) -> Counter[str]:
    """Copy rows and count them: ``added``, ``known`` (there before), ``incompatible`` and ``bad`` (left behind)."""
    counts = Counter(incompatible=0, bad=0)

    def sound() -> Iterator[Mapping[str, Any]]:
        for row in rows:
            if row.faults:
                counts["bad" if row.is_bad else "incompatible"] += 1
            else:
                yield row.values

    counts.update(add_exported(connection, sound()))
    return counts


def prune(
    file: SqliteFile,
    connection: sqlite3.Connection,
    environments: Sequence[Environment] | None,
    versions: Mapping[str, int] | None,
    failures: bool,
) -> int:
    """Delete bad rows, superseded ones, and where given those of others, or failures. Returns how many."""
    statements = chain(_without_bad(file), _prunings(environments, versions, failures))
    removed = sum(connection.execute(sql, values).rowcount for sql, values in statements)
    measured = " UNION ".join(f"SELECT environment_id FROM {table}" for table in schema.KEYS)
    connection.execute(f"DELETE FROM rates WHERE environment_id NOT IN ({measured})")
    for key in ("environment", "problem"):
        owned = (table for table, owners in schema.OWNERS.items() if f"{key}_id" in owners)
        used = " UNION ".join(f"SELECT {key}_id FROM {table}" for table in owned)
        connection.execute(f"DELETE FROM {key}s WHERE id NOT IN ({used})")
    return removed


def _without_bad(file: SqliteFile) -> Iterator[Statement]:
    """Delete bad rows first: then none supersedes a sound one, and no key is left that SQLite cannot read."""
    for row in every_row(file):
        if row.is_bad:
            marks, values = zip(*map(_exactly, row.key.values()), strict=True)
            yield f"DELETE FROM {row.table} WHERE ({', '.join(row.key)}) IS ({', '.join(marks)})", values


def _exactly(value: Any) -> tuple[str, Any]:
    """Return SQL for a value that was read, and its parameter, also for text that is not in UTF-8."""
    return ("+CAST(? AS TEXT)", value.encode(errors=UNDECODABLE)) if isinstance(value, str) else ("?", value)


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
