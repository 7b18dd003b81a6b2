"""Older files: statements that make a database into one of the next version, and the same for exported rows."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from mucudnn.words.torch_settings import TORCHS_OWN

# 1: the first one; 2: environments have numerics; 3: whole runs go through torch's operators; 4: what was measured has
# the load of the machine, and environments have the best rate of the known kernel; 5: what was measured has the way of
# measuring, of what was not measured the columns say whether it was passed over, and for how many bytes, and there is
# what steps of models have shown; 6: measurements and whole runs have their samples, what a hypervisor took meanwhile,
# and the processor's clock
VERSION = 6
BEFORE_EXPORTS_SAID = 2  # the version of exported rows that do not name theirs

_ENVIRONMENT_1 = "device, capability, threads, torch, library, compiled"

# Whole runs left out what a call through torch's dispatcher and autograd costs. Torch's own, undivided, has
# no such part; a call with a cached filter ("instead" of another) goes past the operator.
# Rows that are bad stay as they are.
_OPERATOR_S = 30e-6
_TIME_S_2 = f"""CASE
    WHEN typeof(configuration) <> 'text' OR typeof(time_s) NOT IN ('integer', 'real') OR time_s <= 0 THEN time_s
    WHEN NOT json_valid(configuration) THEN time_s
    WHEN json_extract(configuration, '$[#-1][4]') = 'instead' THEN time_s
    WHEN json_array_length(configuration) = 1 AND json_extract(configuration, '$[0][0]') = '{TORCHS_OWN}'
        AND json_extract(configuration, '$[0][3]') = 1 THEN time_s
    ELSE time_s + {_OPERATOR_S} END"""

_FIRST_METHOD = 1  # all that was measured before rows said how: see ``METHOD`` in ``mucudnn/words/results.py``

_METHOD_4 = f"iif(load IS NULL, {_FIRST_METHOD}, {_FIRST_METHOD + 1})"


def _with_method(table: str) -> tuple[str, str]:
    """The second way came with version 4, as did the load: what was measured before has none."""
    return f"ALTER TABLE {table} ADD COLUMN method", f"UPDATE {table} SET method = {_METHOD_4}"


# Reasons of version 4 said in their first words what columns say since.
_PASSED_OVER_4, _NEEDS_4 = "passed over: ", "needs "
_REASON_4 = f"substr(reason, {len(_PASSED_OVER_4) + 1})"
_NEEDED_BYTES_4 = (
    f"CASE WHEN reason LIKE '{_PASSED_OVER_4}{_NEEDS_4}% bytes of workspace' "
    f"THEN CAST(substr(reason, {len(_PASSED_OVER_4 + _NEEDS_4) + 1}) AS INTEGER) END"  # casts what comes before a space
)

# findings: what steps of a model have shown. versions: of the algorithms that it ran.
CONFIRMATIONS = """CREATE TABLE IF NOT EXISTS confirmations (
    environment_id NOT NULL REFERENCES environments, fingerprint, measured_at, versions, findings, load, method,
    PRIMARY KEY (environment_id, fingerprint, measured_at)) WITHOUT ROWID"""

# What makes a file of that version into one of the next, with columns as they were then. Keys need a new table.
MIGRATIONS = {
    1: (
        f"CREATE TABLE wider (id INTEGER PRIMARY KEY, {_ENVIRONMENT_1}, numerics, UNIQUE ({_ENVIRONMENT_1}, numerics))",
        "ALTER TABLE environments ADD COLUMN numerics DEFAULT ''",  # fails where there is one: no version 1
        f"INSERT INTO wider SELECT id, {_ENVIRONMENT_1}, numerics FROM environments",
        "DROP TABLE environments",
        "ALTER TABLE wider RENAME TO environments",
    ),
    2: (f"UPDATE verifications SET time_s = {_TIME_S_2}",),
    3: (
        "ALTER TABLE measurements ADD COLUMN load",
        "ALTER TABLE verifications ADD COLUMN load",
        "CREATE TABLE rates (environment_id PRIMARY KEY NOT NULL REFERENCES environments, rate) WITHOUT ROWID",
    ),
    4: (
        *_with_method("measurements"),
        *_with_method("verifications"),
        "ALTER TABLE measurements ADD COLUMN passed_over",
        "ALTER TABLE measurements ADD COLUMN needed_bytes",
        f"UPDATE measurements SET passed_over = 1, needed_bytes = {_NEEDED_BYTES_4}, reason = {_REASON_4} "
        f"WHERE reason LIKE '{_PASSED_OVER_4}%'",
        CONFIRMATIONS,
    ),
    5: tuple(
        f"ALTER TABLE {table} ADD COLUMN {column}"
        for table, columns in (
            ("measurements", ("setup_samples_s", "step_samples_s", "stolen", "clock_hz")),
            ("verifications", ("baseline_samples_s", "time_samples_s", "stolen", "clock_hz")),
        )
        for column in columns
    ),
}
_WITH_OPERATOR = 3  # the first version whose whole runs have what the operator costs
_WITH_LOAD = 4
# Columns that were added, with what they are in exports that lack them
SINCE_VERSION_1: Mapping[str, str | int | None] = {
    **{"numerics": "", "method": _FIRST_METHOD},
    **dict.fromkeys(("load", "passed_over", "needed_bytes", "fingerprint", "versions", "findings")),
    **dict.fromkeys(("setup_samples_s", "step_samples_s", "baseline_samples_s", "time_samples_s")),
    **dict.fromkeys(("stolen", "clock_hz")),
}


def migrated_row(row: Mapping[str, Any], version: int) -> dict[str, Any]:
    """An exported row without faults, which a mucudnn of this schema version wrote, as it would be written now."""
    if row["kind"] == "verification" and version < _WITH_OPERATOR:
        row = {**row, **_computed({"time_s": _TIME_S_2}, row)}
    if version == _WITH_LOAD:
        row = {**row, **_computed({"method": _METHOD_4}, row)}
        if (row.get("reason") or "").startswith(_PASSED_OVER_4):
            row = {**row, **_computed({"needed_bytes": _NEEDED_BYTES_4, "reason": _REASON_4}, row), "passed_over": 1}
    return dict(row)


def _computed(expressions: Mapping[str, str], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of SQL expressions, for the row of an export as for that of a file."""
    columns = ("configuration", "time_s", "load", "reason")
    with closing(sqlite3.connect(":memory:")) as connection:
        given = ", ".join(f":{name} AS {name}" for name in columns)
        query = f"SELECT {', '.join(expressions.values())} FROM (SELECT {given})"
        return dict(
            zip(expressions, connection.execute(query, {n: row.get(n) for n in columns}).fetchone(), strict=True)
        )
