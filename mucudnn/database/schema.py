"""The tables of the database, and the way from keys and values to their rows and back."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from datetime import UTC, datetime
from itertools import chain, groupby, product
from typing import Any

from mucudnn.running.environment import Environment
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import ITEM_BYTES, MOST_SAMPLES, ConvProblem, MemoryFormat, Operation
from mucudnn.words.results import (
    ACTIVATIONS,
    BUSY,
    How,
    MicroConfig,
    WithCachedFilter,
    WithEpilogue,
    WithFreshWorkspace,
    epilogue_of,
)
from mucudnn.words.values import shown

APPLICATION_ID = int.from_bytes(b"mucu", "big")

VERSION = 7  # files of another one are refused; until the first published version none is read

TIMES = ("baseline_s", "time_s", "noise")  # of a whole run
COSTS = ("setup_s", "step_s", "prepared_bytes", "scratch_bytes", "relative_error", "noise", "samples")
# Nobody needs these to choose: what the times were computed from, and the processor meanwhile
SAMPLES = {
    "measurements": ("setup_samples_s", "step_samples_s"),
    "verifications": ("baseline_samples_s", "time_samples_s"),
}
PROCESSOR = ("stolen", "clock_hz")
RAW = {table: (*samples, *PROCESSOR) for table, samples in SAMPLES.items()}
ENVIRONMENT = "device, capability, threads, torch, library, compiled, numerics"
PROBLEM = (
    "operation, c, h, w, k, r, s, stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w, groups, "
    "dtype, memory_format"
)
ENVIRONMENT_COLUMNS, PROBLEM_COLUMNS = tuple(ENVIRONMENT.split(", ")), tuple(PROBLEM.split(", "))
KEYS = {
    "measurements": "algorithm, version, micro_batch_size",
    "verifications": "configuration",
    "confirmations": "fingerprint",
}
OWNER_IDS = ("environment_id", "problem_id")
OWNERS = dict.fromkeys(KEYS, OWNER_IDS) | {"confirmations": OWNER_IDS[:1]}  # a whole model has many problems
COLUMNS = {
    "measurements": (
        *(*KEYS["measurements"].split(", "), "measured_at", *COSTS, "reason", "load", "passed_over", "needed_bytes"),
        *RAW["measurements"],
    ),
    "verifications": (KEYS["verifications"], "measured_at", *TIMES, "load", *RAW["verifications"]),
    "confirmations": (KEYS["confirmations"], "measured_at", "versions", "findings", "load"),
}


def _checked(column: str, kind: str, condition: str, allowed: str) -> str:
    """Return the definition of a column. The name of its constraint is what an error says: what is allowed."""
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


def _json(column: str, kind: str) -> str:
    return _checked(column, "TEXT", f"json_valid({{0}}) AND json_type({{0}}) = '{kind}'", f"JSON, an {kind}")


def _required(*definitions: str) -> str:
    return ", ".join(each.replace(" CONSTRAINT", " NOT NULL CONSTRAINT", 1) for each in definitions)


_OWNER = "{0}_id INTEGER NOT NULL REFERENCES {0}s".format
_OWNERS = f"{_OWNER('environment')}, {_OWNER('problem')}"
_TIME_STAMP = _required(
    _checked(
        *("measured_at", "TEXT", "{0} GLOB '[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]T[0-9][0-9]:*.??????+00:00'"),
        "a time in UTC to the microsecond, as 2026-01-31T12:00:00.000000+00:00",
    )
)
_FINGERPRINT = _required(_checked("fingerprint", "TEXT", "{0} <> ''", "some text"))
_NAME = _checked("algorithm", "TEXT", "{0} <> ''", "the name of an algorithm")
_BYTES = [_whole(name, 0, 2**48) for name in ("prepared_bytes", "scratch_bytes")]  # sums fit 64 bits
_PASSED_OVER = _checked("passed_over", "INTEGER", "{0} IN (1, 2)", "1, 2 (by its arithmetic alone), or nothing")
_SIZES = [_whole(name, 0 if name.startswith("padding") else 1) for name in PROBLEM_COLUMNS[1:-2]]

# A failure is a row with a reason and without costs: so the newest row of a candidate says which of the two it is.
# SQLite refuses other values (STRICT, CHECK), and what it cannot express ``add_exported`` does: what is read is right.
TABLES = tuple(
    f"""
CREATE TABLE environments (id INTEGER PRIMARY KEY, device TEXT NOT NULL, capability TEXT NOT NULL,
    {_required(_whole("threads", 1))}, torch TEXT NOT NULL, library TEXT NOT NULL, compiled TEXT NOT NULL,
    numerics TEXT NOT NULL, UNIQUE ({ENVIRONMENT})) STRICT;
CREATE TABLE problems (id INTEGER PRIMARY KEY, {_required(_one_of("operation", Operation), *_SIZES)},
    {_required(_one_of("dtype", ITEM_BYTES), _one_of("memory_format", MemoryFormat))}, UNIQUE ({PROBLEM})) STRICT;
CREATE TABLE measurements ({_OWNERS}, {_required(_NAME, _whole("version", 0), _whole("micro_batch_size", 1))},
    {_TIME_STAMP}, {_real("setup_s")}, {_real("step_s")}, {", ".join(_BYTES)}, {_real("relative_error")},
    {_real("noise")}, {_whole("samples", 1)}, reason TEXT, {_share("load")},
    {_PASSED_OVER}, {_whole("needed_bytes", 0)},
    {", ".join(map(_series, SAMPLES["measurements"]))}, {_share("stolen")}, {_real("clock_hz", "> 0")},
    CONSTRAINT "a measurement has all costs, and a failure none" CHECK (
        coalesce({", ".join(COSTS)}, load, {", ".join(RAW["measurements"])}) IS NULL AND reason IS NOT NULL
        OR {" AND ".join(f"{name} IS NOT NULL" for name in COSTS)}
        AND coalesce(reason, passed_over, needed_bytes) IS NULL),
    PRIMARY KEY (environment_id, problem_id, {KEYS["measurements"]}, measured_at)) WITHOUT ROWID, STRICT;
CREATE TABLE verifications ({_OWNERS}, {_required(_json("configuration", "array"))}, {_TIME_STAMP},
    {_required(_real("baseline_s", "> 0"), _real("time_s", "> 0"), _real("noise"))}, {_share("load")},
    {", ".join(map(_series, SAMPLES["verifications"]))}, {_share("stolen")}, {_real("clock_hz", "> 0")},
    PRIMARY KEY (environment_id, problem_id, {KEYS["verifications"]}, measured_at)) WITHOUT ROWID, STRICT;
CREATE TABLE confirmations ({_OWNER("environment")}, {_FINGERPRINT}, {_TIME_STAMP},
    {_required(_json("versions", "object"), _json("findings", "object"))}, {_share("load")},
    PRIMARY KEY (environment_id, fingerprint, measured_at)) WITHOUT ROWID, STRICT;
CREATE TABLE rates (environment_id INTEGER PRIMARY KEY REFERENCES environments,
    {_required(_real("rate", "> 0"))}) STRICT;
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION}
""".split(";")
)

_JOINED = "JOIN environments ON environments.id = environment_id JOIN problems ON problems.id = problem_id"
# What SQLite and its binding raise for values that a table does not take
_REFUSALS = (sqlite3.IntegrityError, sqlite3.InterfaceError, sqlite3.ProgrammingError, OverflowError, UnicodeError)
_ROW = ("kind, measured_at", ENVIRONMENT, PROBLEM, KEYS["measurements"], *COSTS, "reason")
_ADDED = ("load", "passed_over", "needed_bytes", "fingerprint", "versions", "findings")
SAMPLE_COLUMNS = tuple(chain.from_iterable(SAMPLES.values()))
_TIMES = ("configuration", "baseline_s", "time_s")
ROW_COLUMNS = (*", ".join(_ROW).split(", "), *_TIMES, *_ADDED, *SAMPLE_COLUMNS, *PROCESSOR)
EXPORT_COLUMNS = (*ROW_COLUMNS, "schema")  # ``VERSION`` of the file that the row is from
_FIRST = len(OWNER_IDS) + 1
_MEASURED_AT = _FIRST + ROW_COLUMNS.index("measured_at")
_ORDER = (_MEASURED_AT, *range(_FIRST, _FIRST + len(ROW_COLUMNS)))  # the same rows always come in the same order
# A confirmation has no problem, and no more in common with the others than their circumstances
_NOTHING = ", ".join(["NULL"] * (ROW_COLUMNS.index("load") - ROW_COLUMNS.index("operation")))
_CONFIRMATIONS = "(SELECT NULL AS problem_id, * FROM confirmations)"

_EPILOGUES = {
    str(one): one
    for one in (WithEpilogue(*of) for of in product((None, *ACTIVATIONS), (False, True)) if of != (None, False))
}


def every_row(condition: str = "TRUE") -> str:
    """Return SQL for ``OWNER_IDS`` and ``ROW_COLUMNS`` of all rows of which a condition is true."""
    return f"""
SELECT environment_id, problem_id, iif(reason IS NULL, 'measurement', 'failure'), measured_at, {ENVIRONMENT}, {PROBLEM},
    {KEYS["measurements"]}, {", ".join(COSTS)}, reason, NULL, NULL, NULL, load, passed_over, needed_bytes,
    NULL, NULL, NULL, {", ".join(SAMPLES["measurements"])}, NULL, NULL, stolen, clock_hz
FROM measurements {_JOINED} WHERE {condition}
UNION ALL
SELECT environment_id, problem_id, 'verification', measured_at, {ENVIRONMENT}, {PROBLEM},
    NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, noise, NULL, NULL, configuration, baseline_s, time_s, load,
    NULL, NULL, NULL, NULL, NULL, NULL, NULL, {", ".join(RAW["verifications"])}
FROM verifications {_JOINED} WHERE {condition}
UNION ALL
SELECT environment_id, NULL, 'confirmation', measured_at, {ENVIRONMENT}, {_NOTHING},
    load, NULL, NULL, fingerprint, versions, findings, NULL, NULL, NULL, NULL, NULL, NULL
FROM {_CONFIRMATIONS} JOIN environments ON environments.id = environment_id WHERE {condition}
ORDER BY {", ".join(map(str, _ORDER))}
"""


def of_owners(environment_ids: Iterable[int], problem_ids: Iterable[int]) -> str:
    """Return the condition that a row is of one of these environments and one of these problems."""
    of_environments, of_problems = (", ".join(map(str, ids)) for ids in (environment_ids, problem_ids))
    return f"environment_id IN ({of_environments}) AND problem_id IN ({of_problems})"


# The row of a key that counts is the newest that was not disturbed; of those that were, if there is no other. In SQL as
# text, whose maximum it has.
RANK = f"iif(load > {BUSY}, '0', '1') || measured_at"

# Of environments: whether anything was measured there
HAS_ROWS = " OR ".join(f"EXISTS (SELECT 1 FROM {table} WHERE environment_id = environments.id)" for table in KEYS)

# Rows of algorithm versions other than those in a JSON object, ``:versions`` (algorithm: version). Not of what a source
# offers (``source:67 k2=5``): no list of names tells which there are, and their version is that of their library, which
# is in the environment. Nor of packages that are missing here (``own/pointwise``): nobody knows whether theirs is
# another version.
_IS_OTHER = """instr({algorithm}, ':') = 0
    AND ({algorithm}, {version}) NOT IN (SELECT key, value FROM json_each(:versions))
    AND (instr({algorithm}, '/') = 0 OR {algorithm} IN (SELECT key FROM json_each(:versions)))"""
OTHER_VERSIONS = {
    "measurements": _IS_OTHER.format(algorithm="algorithm", version="version"),
    "verifications": "EXISTS (SELECT 1 FROM json_each(configuration) AS part WHERE "
    + _IS_OTHER.format(
        algorithm="json_extract(part.value, '$[0]')",
        version="json_extract(part.value, '$[1]')",
    )
    + ")",
    "confirmations": "EXISTS (SELECT 1 FROM json_each(versions) AS part WHERE "
    + _IS_OTHER.format(algorithm="part.key", version="part.value")
    + ")",
}


def identify(connection: sqlite3.Connection, key: Environment | ConvProblem) -> int:
    """Return the id of the key's row, which is added if there is none."""
    select, values = find(key)
    insert(connection, key_table(key), (None, *values))
    if (row := connection.execute(select, values).fetchone()) is None:
        raise sqlite3.DatabaseError(f"the index of {key_table(key)} disagrees with the table")
    return int(row[0])


def find(key: Environment | ConvProblem) -> tuple[str, list[str | int]]:
    """Return SQL that selects the id of the key's row, and its parameters."""
    columns = ENVIRONMENT if isinstance(key, Environment) else PROBLEM
    values = flat(key)
    return f"SELECT id FROM {key_table(key)} WHERE ({columns}) = ({_marks(values)})", values


def table_of(kind: str) -> str:
    return {"verification": "verifications", "confirmation": "confirmations"}.get(kind, "measurements")


def key_table(key: Environment | ConvProblem) -> str:
    return "environments" if isinstance(key, Environment) else "problems"


def insert(connection: sqlite3.Connection, table: str, values: Sequence[Any], *, replaces: bool = False) -> bool:
    """Add a row. Returns whether it was added; replaces: an equal key, which else stays as it is.

    Raises ``InvalidInputError`` for values that the table refuses.
    """
    verb, otherwise = ("REPLACE", "") if replaces else ("INSERT", " ON CONFLICT DO NOTHING")
    try:
        cursor = connection.execute(f"{verb} INTO {table} VALUES ({_marks(values)}){otherwise}", values)
    except _REFUSALS as error:
        raise InvalidInputError(str(error).removeprefix("CHECK constraint failed: ")) from None
    return cursor.rowcount > 0


def _marks(values: Sequence[Any]) -> str:
    return ", ".join("?" * len(values))


def flat(key: Environment | ConvProblem) -> list[str | int]:
    """Return values in the order of the columns ``ENVIRONMENT`` or ``PROBLEM``: pairs become two."""
    values: list[str | int] = []
    for field in fields(key):
        value = getattr(key, field.name)
        values.extend(value if isinstance(value, tuple) else (value,))
    return values


def named(key: Environment | ConvProblem) -> dict[str, str | int]:
    """Column -> value."""
    columns = ENVIRONMENT if isinstance(key, Environment) else PROBLEM
    return dict(zip(columns.split(", "), flat(key), strict=True))


def problem_from(values: Sequence[Any]) -> ConvProblem:
    """Invert ``flat``. Raises ``ValueError`` or ``TypeError`` where that is not a problem."""
    operation, c, h, w, k, r, s, *pairs, groups, dtype, memory_format = values
    stride, padding, dilation = zip(pairs[::2], pairs[1::2], strict=True)
    return ConvProblem(
        *(Operation(operation), c, h, w, k, r, s),
        *(stride, padding, dilation),
        *(groups, dtype, MemoryFormat(memory_format)),
    )


def configuration_key(micro_configs: Sequence[MicroConfig], versions: Mapping[str, int], how: How = None) -> str:
    """Return JSON: for each run of equal micro-configs ``[algorithm, version, micro-batch size, how often]``.

    With a kept filter, those of its algorithm end with ``"kept"``, and what was run instead follows, each of its parts
    ending with ``"instead"``. With a fresh workspace all end with ``"fresh"``. With an epilogue the text of it, such
    as ``"with ReLU"``, is at the end of all.
    """
    parts = _parts(micro_configs, versions)
    match how:
        case WithCachedFilter():
            parts = [[*part, "kept"] if part[0] == how.algorithm else part for part in parts]
            parts += [[*part, "instead"] for part in _parts(how.instead_of, versions)]
        case WithFreshWorkspace():
            parts = [[*part, "fresh"] for part in parts]
    if (epilogue := epilogue_of(how)) is not None:
        parts = [[*part, str(epilogue)] for part in parts]
    return json.dumps(parts)


def micro_configs_from(key: str, versions: Mapping[str, int], how: How = None) -> tuple[MicroConfig, ...] | None:
    """Invert ``configuration_key``; None for a key of other versions, of other runs, or that is none."""
    try:
        parts = [(MicroConfig(part[0], part[2]), part[3]) for part in json.loads(key)]
        micro_configs = tuple(micro_config for micro_config, count in parts for _ in range(count))
        return micro_configs if configuration_key(micro_configs, versions, how) == key else None
    except (ValueError, TypeError, LookupError):
        return None


def whole_run_from(key: str) -> tuple[tuple[MicroConfig, ...], dict[str, int], How]:
    """Invert ``configuration_key``: return micro-configs, versions, and what is special.

    Raises ``InvalidInputError`` for any other text.
    """
    with suppress(ValueError, TypeError, LookupError):
        every = json.loads(key)
        versions = {part[0]: part[1] for part in every}
        own, instead = ([part for part in every if ("instead" in part[4:]) is is_other] for is_other in (False, True))
        kept = [part[0] for part in own if "kept" in part[4:]]
        epilogue = next((_EPILOGUES[ending] for ending in own[0][4:] if ending in _EPILOGUES), None)
        how: How = WithFreshWorkspace() if own[0][4:] == ["fresh"] else epilogue
        if instead:
            how = WithCachedFilter(kept[0] if kept else "", _expanded(instead), epilogue)
        micro_configs = _expanded(own)
        if configuration_key(micro_configs, versions, how) == key:
            return micro_configs, versions, how
    raise InvalidInputError(
        f"configuration is {shown(key)}; it must be as mucudnn writes it: [algorithm, version, micro-batch size, how "
        "often] for each run of equal micro-batches"
    )


def _expanded(parts: Sequence[Sequence[Any]]) -> tuple[MicroConfig, ...]:
    if sum(size * count for _, _, size, count, *_ in parts) > MOST_SAMPLES:
        raise ValueError
    return tuple(MicroConfig(name, size) for name, _, size, count, *_ in parts for _ in range(count))


def _parts(micro_configs: Sequence[MicroConfig], versions: Mapping[str, int]) -> list[list[str | int]]:
    runs = [(micro_config, len(list(equal))) for micro_config, equal in groupby(micro_configs)]
    return [[m.algorithm, versions[m.algorithm], m.micro_batch_size, count] for m, count in runs]


def now() -> str:
    """Return a time stamp, which sorts like the time."""
    return datetime.now(UTC).isoformat(timespec="microseconds")
