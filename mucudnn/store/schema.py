"""The SQL tables of the database, and functions that read and write keys (environments, problems), rows and values."""

from __future__ import annotations

import json
import sqlite3
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import cache, lru_cache
from itertools import chain, groupby
from math import inf, isfinite
from typing import Any

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import ITEM_BYTES, MOST_SAMPLES, ConvProblem, MemoryFormat, Operation
from mucudnn.core.records import BUSY, Environment, MicroConfig
from mucudnn.core.values import shown

APPLICATION_ID = int.from_bytes(b"mucu", "big")

VERSION = 10  # files of any other are rejected

KINDS = ("measurement", "failure", "verification", "timing")
Row = dict[str, Any]  # by ``ROW_COLUMNS``; samples in the storage format

COSTS = ("setup_s", "step_s", "prepared_bytes", "scratch_bytes", "relative_error", "noise", "samples")
TIMES = ("baseline_s", "time_s", "noise")  # of a whole run
SAMPLES = {
    "measurement": ("setup_samples_s", "step_samples_s"),
    "verification": ("baseline_samples_s", "time_samples_s"),
}
SAMPLE_COLUMNS = tuple(chain.from_iterable(SAMPLES.values()))
ENVIRONMENT_COLUMNS = ("device", "capability", "threads", "torch", "library", "compiled", "numerics")
SIZES = (
    *("c", "h", "w", "k", "r", "s", "stride_h", "stride_w", "padding_h", "padding_w", "dilation_h", "dilation_w"),
    "groups",
)
OF_VOLUMES = ("d", "t", "stride_d", "padding_d", "dilation_d")  # all 0 for images
PROBLEM_COLUMNS = ("operation", *SIZES, "dtype", "memory_format", *OF_VOLUMES)
# The row of a key that counts is the newest undisturbed one, or the newest if all are disturbed. Adding it removes the
# others.
KEYS = {
    "measurements": ("environment_id", "problem_id", "algorithm", "version", "micro_batch_size"),
    "verifications": ("environment_id", "problem_id", "configuration"),
    "timings": ("environment_id", "subject"),
}
_TABLE_OF = dict(zip(KINDS, ("measurements", "measurements", "verifications", "timings"), strict=True))
_RANK = f"iif(load > {BUSY}, '0', '1') || measured_at"
_KINDS = {
    "measurements": "iif(reason IS NULL, 'measurement', 'failure')",
    "verifications": "'verification'",
    "timings": "'timing'",
}
_VALUES = {
    "measurements": (
        *("measured_at", *COSTS, "reason", "load", "passed_over", "needed_bytes", "least_s"),
        *SAMPLES["measurement"],
    ),
    "verifications": ("measured_at", *TIMES, "load", *SAMPLES["verification"]),
    "timings": ("measured_at", "seconds", "load"),
}
ROW_COLUMNS = (
    *("kind", "measured_at", *ENVIRONMENT_COLUMNS, *PROBLEM_COLUMNS, "algorithm", "version", "micro_batch_size"),
    *(*COSTS, "reason", "configuration", "baseline_s", "time_s", "load", "passed_over", "needed_bytes", "least_s"),
    *SAMPLE_COLUMNS,
    *("subject", "seconds"),
)

# Exceptions of SQLite and sqlite3 for values that a table rejects
_REFUSALS = (
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    OverflowError,
    UnicodeEncodeError,
)


# Tables


def _checked(column: str, kind: str, condition: str, allowed: str) -> str:
    """Return the SQL definition of a column. SQLite's errors quote its constraint's name, the allowed values."""
    return f"""{column} {kind} CONSTRAINT "{column} must be {allowed}" CHECK ({condition.format(column)})"""


def _whole(column: str, least: int, most: int = 2**63 - 1) -> str:
    allowed = f"at least {least}" if most == 2**63 - 1 else f"from {least} to {most}"
    return _checked(column, "INTEGER", f"{{0}} BETWEEN {least} AND {most}", f"a whole number, {allowed}")


def _real(column: str, least: str = ">= 0") -> str:
    words = {">= 0": "at least 0", "> 0": "above 0"}[least]
    return _checked(column, "REAL", f"{{0}} {least} AND {{0}} < 9e999", f"finite and {words}")


def _one_of(column: str, names: Iterable[str]) -> str:
    listed = [*map(str, names)]
    return _checked(column, "TEXT", f"{{0}} IN ({str(listed)[1:-1]})", "one of " + ", ".join(listed))


def _share(column: str) -> str:
    return _checked(column, "REAL", "{0} BETWEEN 0 AND 1", "from 0 to 1, or nothing where it is unknown")


def _series(column: str) -> str:
    return _checked(column, "BLOB", "length({0}) > 0 AND length({0}) % 8 = 0", "numbers of 8 bytes, or nothing")


def _required(*definitions: str) -> str:
    return ", ".join(definition.replace(" CONSTRAINT", " NOT NULL CONSTRAINT", 1) for definition in definitions)


def _key(table: str) -> str:
    return f"PRIMARY KEY ({', '.join(KEYS[table])}, measured_at)) WITHOUT ROWID, STRICT"


_OWNER = "{0}_id INTEGER NOT NULL REFERENCES {0}s".format
_OWNERS = f"{_OWNER('environment')}, {_OWNER('problem')}"
_TIME_STAMP = _required(
    _checked(
        "measured_at",
        "TEXT",
        "{0} GLOB '[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]T[0-9][0-9]:*.??????+00:00'",
        "a time in UTC to the microsecond, as 2026-01-31T12:00:00.000000+00:00",
    )
)
_IS_ARRAY = "json_valid({0}) AND json_type({0}) = 'array'"
_CONFIGURATION = _checked("configuration", "TEXT", _IS_ARRAY, "JSON, an array")
_NAME = _checked("algorithm", "TEXT", "{0} <> ''", "the name of an algorithm")
_BYTES = [_whole(name, 0, 2**48) for name in ("prepared_bytes", "scratch_bytes")]  # sums fit 64 bits
_PASSED_OVER = _checked("passed_over", "INTEGER", "{0} IN (1, 2)", "1, 2 (by its arithmetic alone), or nothing")
_SIZES = [_whole(name, 0 if name.startswith("padding") else 1) for name in SIZES]
_SUBJECT = _checked("subject", "TEXT", "{0} <> ''", "a text that says what was timed")
_SECONDS = _checked("seconds", "TEXT", _IS_ARRAY, "JSON, an array")
TIMINGS = f"""TABLE timings ({_OWNER("environment")}, {_required(_SUBJECT)}, {_TIME_STAMP}, {_required(_SECONDS)},
    {_share("load")}, {_key("timings")}"""
PROBLEMS = f"""TABLE problems (id INTEGER PRIMARY KEY, {_required(_one_of("operation", Operation), *_SIZES)},
    {_required(_one_of("dtype", ITEM_BYTES), _one_of("memory_format", MemoryFormat))},
    {_required(*(_whole(name, 0) for name in OF_VOLUMES))}, UNIQUE ({", ".join(PROBLEM_COLUMNS)})) STRICT"""
# Measurements and failures share a table, so that the newer one is valid; a failure has a reason and no costs
TABLES = tuple(
    f"""
CREATE TABLE environments (id INTEGER PRIMARY KEY, device TEXT NOT NULL, capability TEXT NOT NULL,
    {_required(_whole("threads", 1))}, torch TEXT NOT NULL, library TEXT NOT NULL, compiled TEXT NOT NULL,
    numerics TEXT NOT NULL, UNIQUE ({", ".join(ENVIRONMENT_COLUMNS)})) STRICT;
CREATE {PROBLEMS};
CREATE TABLE measurements ({_OWNERS}, {_required(_NAME, _whole("version", 0), _whole("micro_batch_size", 1))},
    {_TIME_STAMP}, {_real("setup_s")}, {_real("step_s")}, {", ".join(_BYTES)}, {_real("relative_error")},
    {_real("noise")}, {_whole("samples", 1)}, reason TEXT, {_share("load")},
    {_PASSED_OVER}, {_whole("needed_bytes", 0)}, {_real("least_s", "> 0")},
    {", ".join(map(_series, SAMPLES["measurement"]))},
    CONSTRAINT "a measurement has all costs, and a failure none" CHECK (
        coalesce({", ".join((*COSTS, "load", *SAMPLES["measurement"]))}) IS NULL AND reason IS NOT NULL
        OR {" AND ".join(f"{name} IS NOT NULL" for name in COSTS)}
        AND coalesce(reason, passed_over, needed_bytes, least_s) IS NULL),
    {_key("measurements")};
CREATE TABLE verifications ({_OWNERS}, {_required(_CONFIGURATION)}, {_TIME_STAMP},
    {_required(_real("baseline_s", "> 0"), _real("time_s", "> 0"), _real("noise"))}, {_share("load")},
    {", ".join(map(_series, SAMPLES["verification"]))},
    {_key("verifications")};
CREATE {TIMINGS};
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION}
""".split(";")
)


# Rows


def select(table: str, condition: str, columns: str = "*") -> str:
    """Return SQL for the rows of a table by key; of equal keys, the row that counts is the last one."""
    return f"SELECT {columns} FROM {table} WHERE {condition} ORDER BY {', '.join(KEYS[table])}, {_RANK}"


def count_rows(condition: str) -> str:
    """Return SQL that counts the rows that meet a condition, and those measured under load, by kind of row."""
    busy = f"count(iif(load > {BUSY}, 1, NULL))"
    counts = (f"SELECT {_KINDS[table]}, count(*), {busy} FROM {table} WHERE {condition} GROUP BY 1" for table in KEYS)
    return " UNION ALL ".join(counts)


def select_rows(condition: str = "TRUE", tables: Iterable[str] = KEYS) -> str:
    """Return SQL that selects ``ROW_COLUMNS`` of the rows of tables that meet a condition, oldest first."""
    selections = []
    for table in tables:
        columns = {*ENVIRONMENT_COLUMNS, *KEYS[table], *_VALUES[table]}
        joined = f"{table} JOIN environments ON environments.id = environment_id"
        if "problem_id" in KEYS[table]:
            columns.update(PROBLEM_COLUMNS)
            joined += " JOIN problems ON problems.id = problem_id"
        cells = (name if name in columns else "NULL" for name in ROW_COLUMNS[1:])
        selections.append(f"SELECT {_KINDS[table]}, {', '.join(cells)} FROM {joined} WHERE {condition}")
    order = (ROW_COLUMNS.index("measured_at"), *range(len(ROW_COLUMNS)))  # a deterministic order
    return f"{' UNION ALL '.join(selections)} ORDER BY {', '.join(str(index + 1) for index in order)}"


def add_rows(
    connection: sqlite3.Connection, rows: Iterable[Mapping[str, Any]], *, replaces: bool = False
) -> Counter[str]:
    """Add rows with their time stamps; return the numbers of ``added`` rows and of rows already ``known``.

    rows: values by column, as in ``ROW_COLUMNS``, without columns that are None.
    replaces: whether to replace rows with the same key and time stamp.

    Raises ``InvalidInputError`` for invalid values.
    """

    @cache
    def environment_id(*values: Any) -> int:
        return identify(connection, Environment(*values))

    @cache
    def problem_id(*values: Any) -> int:
        return identify(connection, problem_from(values))

    counts = Counter(added=0, known=0)
    for row in rows:
        table = _TABLE_OF[row["kind"]]
        ids = {}
        try:
            ids["environment_id"] = environment_id(*map(row.get, ENVIRONMENT_COLUMNS))
            if "problem_id" in KEYS[table]:
                ids["problem_id"] = problem_id(*map(row.get, PROBLEM_COLUMNS))
        except (ValueError, TypeError) as error:
            raise InvalidInputError(str(error)) from None
        owned = {**row, **ids}
        values = {name: owned.get(name) for name in (*KEYS[table], *_VALUES[table])}
        is_added = _insert(connection, table, values, replaces=replaces)
        if table == "verifications":
            whole_run_from(row["configuration"])
        elif table == "timings":
            seconds_from(row["seconds"])
        if is_added:  # the best row of this key stays, which need not be this one
            has_key = f"({', '.join(KEYS[table])}) = ({', '.join('?' * len(KEYS[table]))})"
            key = [values[name] for name in KEYS[table]]
            best = f"(SELECT max({_RANK}) FROM {table} WHERE {has_key})"
            connection.execute(f"DELETE FROM {table} WHERE {has_key} AND {_RANK} < {best}", key * 2)
            is_there = f"SELECT 1 FROM {table} WHERE {has_key} AND measured_at = ?"
            is_added = connection.execute(is_there, [*key, row["measured_at"]]).fetchone() is not None
        counts["added" if is_added else "known"] += 1
    return counts


def _insert(connection: sqlite3.Connection, table: str, values: Mapping[str, Any], *, replaces: bool = False) -> bool:
    """Add a row to a table, and return whether it was added.

    replaces: whether to replace a row with the same key, rather than keep it.

    Raises ``InvalidInputError`` for values that the table rejects.
    """
    verb, otherwise = ("REPLACE", "") if replaces else ("INSERT", " ON CONFLICT DO NOTHING")
    marks = ", ".join("?" * len(values))
    insertion = f"{verb} INTO {table} ({', '.join(values)}) VALUES ({marks}){otherwise}"
    try:
        return connection.execute(insertion, [*values.values()]).rowcount > 0
    except _REFUSALS as error:
        raise InvalidInputError(str(error).removeprefix("CHECK constraint failed: ")) from None


# Environments and problems


def identify(connection: sqlite3.Connection, key: Environment | ConvProblem) -> int:
    """Return the row id of an environment or a problem, adding its row if missing."""
    table = _table(key)
    _insert(connection, table, named(key))
    if (row := connection.execute(*find(key)).fetchone()) is None:
        raise sqlite3.DatabaseError(f"the index of {table} disagrees with the table")
    return int(row[0])


def find(key: Environment | ConvProblem) -> tuple[str, list[str | int]]:
    """Return SQL that selects the row id of an environment or a problem, and the parameters of the SQL."""
    values = named(key)
    columns, marks = ", ".join(values), ", ".join("?" * len(values))
    return f"SELECT id FROM {_table(key)} WHERE ({columns}) = ({marks})", [*values.values()]


def _table(key: Environment | ConvProblem) -> str:
    return "environments" if isinstance(key, Environment) else "problems"


def named(key: Environment | ConvProblem) -> dict[str, str | int]:
    """Return the values of an environment or a problem by column, with strides and the like split into columns."""
    values = {field.name: getattr(key, field.name) for field in fields(key)}
    if isinstance(key, Environment):
        return values
    for name in ("stride", "padding", "dilation"):
        *depth, values[f"{name}_h"], values[f"{name}_w"] = values.pop(name)
        values[f"{name}_d"] = depth[0] if depth else 0
    return {column: values[column] for column in PROBLEM_COLUMNS}


def problem_from(values: Sequence[Any]) -> ConvProblem:
    """Return the problem with these values, which are in the order of ``PROBLEM_COLUMNS``.

    Raises ``ValueError`` or ``TypeError`` for invalid values.
    """
    operation, c, h, w, k, r, s, *pairs, groups, dtype, memory_format = values[: -len(OF_VOLUMES)]
    d, t, *deep = values[-len(OF_VOLUMES) :]
    axes = (*([deep] if d else []), pairs[::2], pairs[1::2])
    stride, padding, dilation = zip(*axes, strict=True)
    given: tuple[Any, ...] = stride, padding, dilation, groups, dtype, MemoryFormat(memory_format), d, t
    return ConvProblem(Operation(operation), c, h, w, k, r, s, *given)


# Stored values: samples as bytes; the keys of whole runs, and the seconds of timings, as JSON


def packed(name: str, samples: Sequence[float]) -> bytes:
    """Return timings as bytes of little-endian float64, which preserves them exactly.

    Raises ``InvalidInputError`` for values that are not times.
    """
    try:
        if all(0 <= sample < inf for sample in samples):
            return struct.pack(f"<{len(samples)}d", *samples)
    except (TypeError, OverflowError, struct.error):
        pass
    raise InvalidInputError(f"{name} is {shown(samples)}; it must be seconds, each finite and at least 0")


def unpacked(stored: bytes) -> list[float]:
    """Return the timings in bytes made by ``packed``."""
    return [*struct.unpack(f"<{len(stored) // 8}d", stored)]


def configuration_key(micro_configs: Sequence[MicroConfig], versions: Mapping[str, int], *, fresh: bool = False) -> str:
    """Return JSON with a list ``[algorithm, version, micro-batch size, count]`` for each series of equal micro-configs.

    fresh: whether each call allocates its workspace instead of keeping one; then all lists end with ``"fresh"``.
    """
    series = [(micro_config, len(list(equal))) for micro_config, equal in groupby(micro_configs)]
    ending = ["fresh"] if fresh else []
    return json.dumps([[m.algorithm, versions[m.algorithm], m.micro_batch_size, count, *ending] for m, count in series])


def micro_configs_from(key: str, versions: Mapping[str, int], *, fresh: bool = False) -> tuple[MicroConfig, ...] | None:
    """Return the micro-configs (algorithm and micro-batch size) in a key made by ``configuration_key``.

    Returns None for an invalid key, and for a key with other versions or another kind of workspace.
    """
    with suppress(InvalidInputError):
        micro_configs, versions_in_key, is_fresh = whole_run_from(key)
        if is_fresh == fresh and versions_in_key.items() <= versions.items():
            return micro_configs
    return None


@lru_cache(maxsize=4096)
def whole_run_from(key: str) -> tuple[tuple[MicroConfig, ...], Mapping[str, int], bool]:
    """Parse a key made by ``configuration_key``; return its micro-configs, its versions, and whether it is ``fresh``.

    Raises ``InvalidInputError`` for any other text.
    """
    with suppress(ValueError, TypeError, LookupError):
        parts = json.loads(key)
        versions, fresh = {part[0]: part[1] for part in parts}, parts[0][4:] == ["fresh"]
        if sum(size * count for _, _, size, count, *_ in parts) > MOST_SAMPLES:
            raise ValueError
        micro_configs = tuple(MicroConfig(name, size) for name, _, size, count, *_ in parts for _ in range(count))
        if configuration_key(micro_configs, versions, fresh=fresh) == key:
            return micro_configs, versions, fresh
    raise InvalidInputError(
        f"configuration is {shown(key)}; it must be as mucudnn writes it: [algorithm, version, micro-batch size, "
        "count] for each run of equal micro-batches"
    )


def seconds_from(text: str) -> list[list[float]]:
    """Return the samples of each call that was timed, from JSON. Raises ``InvalidInputError`` for any other text."""
    with suppress(ValueError, TypeError):
        calls = json.loads(text)
        if calls and all(calls) and all(isfinite(second) and second >= 0 for second in chain.from_iterable(calls)):
            return [[float(second) for second in samples] for samples in calls]
    raise InvalidInputError(f"seconds is {shown(text)}; it must be a list of seconds, at least 0, for each call")
