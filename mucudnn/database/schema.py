"""The tables of the database, and the way from keys and values to their rows and back."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from itertools import chain, groupby, product
from typing import Any

from mucudnn.database import migrations
from mucudnn.running.environment import Environment
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.words.results import (
    ACTIVATIONS,
    BUSY,
    How,
    MicroConfig,
    WithCachedFilter,
    WithEpilogue,
    WithFreshWorkspace,
    epilogue_of,
    is_busy,
)

APPLICATION_ID = int.from_bytes(b"mucu", "big")

TIMES = ("baseline_s", "time_s", "noise")  # of a whole run
COSTS = ("setup_s", "step_s", "prepared_bytes", "scratch_bytes", "relative_error", "noise", "samples")
CIRCUMSTANCES = ("load", "method")  # under which both were measured
# Nobody needs these to choose: what the times were computed from, and the processor meanwhile
SAMPLES = {
    "measurements": ("setup_samples_s", "step_samples_s"),
    "verifications": ("baseline_samples_s", "time_samples_s"),
}
PROCESSOR = ("stolen", "clock_hz")
RAW = {table: (*samples, *PROCESSOR) for table, samples in SAMPLES.items()}
OF_FAILURES = ("reason", "passed_over", "needed_bytes")  # passed_over: 1, or nothing for what was tried and failed
ENVIRONMENT = "device, capability, threads, torch, library, compiled, numerics"
PROBLEM = (
    "operation, c, h, w, k, r, s, stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w, groups, "
    "dtype, memory_format"
)
KEYS = {
    "measurements": "algorithm, version, micro_batch_size",
    "verifications": "configuration",
    "confirmations": "fingerprint",
}
OWNER_IDS = ("environment_id", "problem_id")
OWNERS = dict.fromkeys(KEYS, OWNER_IDS) | {"confirmations": OWNER_IDS[:1]}  # a whole model has many problems
_OWNER = "environment_id NOT NULL REFERENCES environments, problem_id NOT NULL REFERENCES problems"

# A failure is a row with a reason and without costs: so the newest row of a candidate says which of the two it is.
TABLES = tuple(
    f"""
CREATE TABLE IF NOT EXISTS environments (id INTEGER PRIMARY KEY, {ENVIRONMENT}, UNIQUE ({ENVIRONMENT}));
CREATE TABLE IF NOT EXISTS problems (id INTEGER PRIMARY KEY, {PROBLEM}, UNIQUE ({PROBLEM}));
CREATE TABLE IF NOT EXISTS measurements ({_OWNER}, {KEYS["measurements"]}, measured_at, {", ".join(COSTS)}, reason,
    load, method, passed_over, needed_bytes, {", ".join(RAW["measurements"])},
    PRIMARY KEY (environment_id, problem_id, {KEYS["measurements"]}, measured_at)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS verifications ({_OWNER}, {KEYS["verifications"]}, measured_at, baseline_s, time_s, noise,
    load, method, {", ".join(RAW["verifications"])},
    PRIMARY KEY (environment_id, problem_id, {KEYS["verifications"]}, measured_at)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rates (environment_id PRIMARY KEY NOT NULL REFERENCES environments, rate) WITHOUT ROWID;
{migrations.CONFIRMATIONS};
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {migrations.VERSION}
""".split(";")
)

# Left joins: rows whose environment or problem is not there are no less bad than others
_JOINED = "LEFT JOIN environments ON environments.id = environment_id LEFT JOIN problems ON problems.id = problem_id"
_ROW = ("kind, measured_at", ENVIRONMENT, PROBLEM, KEYS["measurements"], *COSTS, "reason")
_ADDED = ("load", "method", "passed_over", "needed_bytes", "fingerprint", "versions", "findings")
SAMPLE_COLUMNS = tuple(chain.from_iterable(SAMPLES.values()))
_TIMES = ("configuration", "baseline_s", "time_s")
ROW_COLUMNS = (*", ".join(_ROW).split(", "), *_TIMES, *_ADDED, *SAMPLE_COLUMNS, *PROCESSOR)
EXPORT_COLUMNS = (*ROW_COLUMNS, "schema")  # the version of the mucudnn's tables that wrote the row
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
# What a part of a key may end with: see ``configuration_key``
ENDINGS = (
    ["fresh"],
    *([*ending, *epilogue] for ending in ([], ["kept"], ["instead"]) for epilogue in ([], *([e] for e in _EPILOGUES))),
)


def every_row(condition: str = "TRUE") -> str:
    """Return SQL for ``OWNER_IDS`` and ``ROW_COLUMNS`` of all rows of which a condition is true."""
    return f"""
SELECT environment_id, problem_id, iif(reason IS NULL, 'measurement', 'failure'), measured_at, {ENVIRONMENT}, {PROBLEM},
    {KEYS["measurements"]}, {", ".join(COSTS)}, reason, NULL, NULL, NULL, load, method, passed_over, needed_bytes,
    NULL, NULL, NULL, {", ".join(SAMPLES["measurements"])}, NULL, NULL, stolen, clock_hz
FROM measurements {_JOINED} WHERE {condition}
UNION ALL
SELECT environment_id, problem_id, 'verification', measured_at, {ENVIRONMENT}, {PROBLEM},
    NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, noise, NULL, NULL, configuration, baseline_s, time_s, load, method,
    NULL, NULL, NULL, NULL, NULL, NULL, NULL, {", ".join(RAW["verifications"])}
FROM verifications {_JOINED} WHERE {condition}
UNION ALL
SELECT environment_id, NULL, 'confirmation', measured_at, {ENVIRONMENT}, {_NOTHING},
    load, method, NULL, NULL, fingerprint, versions, findings, NULL, NULL, NULL, NULL, NULL, NULL
FROM {_CONFIRMATIONS} LEFT JOIN environments ON environments.id = environment_id WHERE {condition}
ORDER BY {", ".join(map(str, _ORDER))}
"""


def of_owners(environment_ids: Iterable[int], problem_ids: Iterable[int]) -> str:
    """Return the condition that a row is of one of these environments and one of these problems."""
    of_environments, of_problems = (", ".join(map(str, ids)) for ids in (environment_ids, problem_ids))
    return f"environment_id IN ({of_environments}) AND problem_id IN ({of_problems})"


# The row of a key that counts is of the newest way of measuring; of those the newest that was not disturbed; of those
# that were, if there is no other. In SQL as text, whose maximum it has; see ``rank`` for the same in Python.
RANK = f"method || iif(typeof(load) IN ('integer', 'real') AND load > {BUSY}, '0', '1') || measured_at"

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
    insert(connection, key_table(key), (None, *values), otherwise="IGNORE")
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


def insert(connection: sqlite3.Connection, table: str, values: Sequence[Any], *, otherwise: str) -> bool:
    """Add a row. Returns whether it was added; otherwise: what becomes of an equal key, IGNORE or REPLACE."""
    cursor = connection.execute(f"INSERT OR {otherwise} INTO {table} VALUES ({_marks(values)})", values)
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


def rank(load: float | None, method: int) -> tuple[int, bool]:
    """Return what decides which row of a key counts: the highest, and the newest of those.

    Nothing is replaced by what was measured in an older way, and nothing that was not disturbed by what was.
    """
    return method, not is_busy(load)


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
    """Return what ``configuration_key`` made a sound key of: micro-configs, versions, and what is special."""
    every = json.loads(key)
    versions = {part[0]: part[1] for part in every}
    own, instead = ([part for part in every if ("instead" in part[4:]) is is_other] for is_other in (False, True))
    kept = [part[0] for part in own if "kept" in part[4:]]
    epilogue = next((_EPILOGUES[ending] for ending in own[0][4:] if ending in _EPILOGUES), None)
    if instead:
        return _expanded(own), versions, WithCachedFilter(kept[0] if kept else "", _expanded(instead), epilogue)
    return _expanded(own), versions, WithFreshWorkspace() if own[0][4:] == ["fresh"] else epilogue


def _expanded(parts: Sequence[Sequence[Any]]) -> tuple[MicroConfig, ...]:
    return tuple(MicroConfig(name, size) for name, _, size, count, *_ in parts for _ in range(count))


def _parts(micro_configs: Sequence[MicroConfig], versions: Mapping[str, int]) -> list[list[str | int]]:
    runs = [(micro_config, len(list(equal))) for micro_config, equal in groupby(micro_configs)]
    return [[m.algorithm, versions[m.algorithm], m.micro_batch_size, count] for m, count in runs]


def now() -> str:
    """Return a time stamp, which sorts like the time."""
    return datetime.now(UTC).isoformat(timespec="microseconds")
