"""Profiles: what was exported comes back as it was, and a wrong row is refused with its line and what is allowed."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.database_rows import FAST, HERE, PROBLEM, VERSIONS, fill

from mucudnn.core.errors import DatabaseError
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.core.records import Comparison, Failure, FailureKind, Measurement, MicroConfig
from mucudnn.store.database import Database
from mucudnn.store.exports import export_json_lines, open_stored, read_profile

TWO_BYTES = st.integers(0, 2**16)
NOT_NEGATIVE = st.floats(min_value=0, allow_infinity=False)
COSTS = NOT_NEGATIVE | st.integers(0, 2**63 - 1)
MICRO_CONFIGS = st.builds(MicroConfig, st.sampled_from(sorted(VERSIONS)), st.integers(1, 64))
SAMPLES = st.lists(NOT_NEGATIVE, max_size=5).map(tuple)
SHARES = st.none() | st.floats(0, 1)
MEASUREMENTS = st.builds(
    Measurement,
    *(MICRO_CONFIGS, COSTS, COSTS, TWO_BYTES, TWO_BYTES, COSTS, COSTS, st.integers(1, 2**63 - 1)),
    load=SHARES,
    setup_samples_s=SAMPLES,
    step_samples_s=SAMPLES,
)
KINDS = st.sampled_from([FailureKind.FAILED, FailureKind.HOPELESS, FailureKind.TOO_MANY_FLOPS])
FAILURES = st.builds(Failure, MICRO_CONFIGS, st.text(), KINDS) | st.builds(
    *(Failure, MICRO_CONFIGS, st.text(), st.just(FailureKind.SLOW)), least_s=st.floats(1e-9, 1e9)
)
POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
VERIFICATIONS = st.builds(
    Comparison,
    POSITIVE,
    POSITIVE,
    COSTS,
    SHARES,
    baseline_samples_s=SAMPLES,
    time_samples_s=SAMPLES,
)
OTHER = ConvProblem(
    Operation.BACKWARD_DATA, 3, 8, 9, 4, 1, 2, memory_format=MemoryFormat.CHANNELS_LAST, dtype="float16"
)
ENVIRONMENTS = st.sampled_from([HERE, replace(HERE, threads=1, device='a "device", or two\r\nlines;', numerics="TF32")])
ROWS = st.tuples(ENVIRONMENTS, st.sampled_from([PROBLEM, OTHER]), MEASUREMENTS | FAILURES | VERIFICATIONS)


def exported(database: Database) -> str:
    stream = io.StringIO(newline="")
    export_json_lines(database, stream)
    return stream.getvalue()


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", newline="")
    return path


def add(database: Database, row: tuple[Any, ...]) -> None:
    environment, problem, value = row
    match value:
        case Measurement():
            database.add(environment, problem, 1, value)
        case Failure():
            database.add_failure(environment, problem, 1, value)
        case Comparison():
            database.add_whole_run(environment, problem, [MicroConfig("gemm", 2)] * 3, VERSIONS, value)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """One measurement, one failure and one verification, as JSON lines."""
    with Database(fill(tmp_path / "full.sqlite")) as database:
        return write(tmp_path / "profile", exported(database))


@settings(max_examples=20)
@given(rows=st.lists(ROWS, max_size=8), same_time=st.booleans())
def test_what_is_exported_comes_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[Any, ...]], same_time: bool
) -> None:
    times = iter(datetime(2026, 1, 31, 12, tzinfo=UTC) + timedelta(seconds=not same_time) * i for i in range(12))
    with pytest.MonkeyPatch.context() as patch, Database(":memory:") as database:
        patch.setattr("mucudnn.store.database.now", lambda: next(times).isoformat(timespec="microseconds"))
        for row in rows:
            add(database, row)
        text = exported(database)
        if not text:
            return  # an empty file is not a profile
        path = write(tmp_path_factory.mktemp("profiles") / "profile", text)
        with read_profile(path) as read:
            assert exported(read) == text
            assert read.environments() == database.environments()
            for environment in database.environments():
                for problem in (PROBLEM, OTHER):
                    key = (environment, problem, VERSIONS)
                    assert read.measurements(*key) == database.measurements(*key)
                    assert read.failures(*key) == database.failures(*key)
                    assert read.whole_runs(*key) == database.whole_runs(*key)


# Bad rows


BAD_VALUES = [  # of which row, the column and the value
    *((0, "step_s", value) for value in (-1e-9, math.inf, "fast")),
    *((0, "setup_s", value) for value in (math.nan, 10**400)),
    *((0, "prepared_bytes", -1), (0, "scratch_bytes", 0.5), (0, "scratch_bytes", 2**63), (0, "noise", -1)),
    *((0, "samples", 0), (0, "samples", None), (0, "micro_batch_size", 0), (0, "algorithm", ""), (0, "version", "1a")),
    *((0, "operation", "sideways"), (0, "dtype", "float4"), (0, "memory_format", "NCHW"), (0, "stride_h", 0)),
    *((0, "padding_w", -1), (0, "groups", 5), (0, "r", 99), (0, "threads", "two"), (0, "device", None)),
    *((0, "measured_at", value) for value in ("yesterday", "2026-01-31T12:00:00+02:00", None)),
    *((0, "kind", "guess"), (0, "kind", None), (0, "schema", None), (0, "schema", 1)),
    *((0, "reason", "none"), (1, "step_s", 1.0), (1, "reason", None), (1, "step_samples_s", [1e-3])),
    *((2, "baseline_s", 0), (2, "time_s", math.nan), (2, "configuration", "gemm"), (2, "configuration", None)),
    *((2, "configuration", key) for key in ("[]", "[1]", "[[1]]", '[["gemm", 1, 0, 1]]', '[["gemm", 1, 8, -1]]')),
    *((2, "configuration", key) for key in ('[["gemm", 1, 8, 1000000000]]', '[["gemm", 1, 8, 1, "often"]]')),
    *((0, "step_samples_s", value) for value in ([1e-3, math.nan], [1e-3, -1e-3], [1e-3, None], [10**400], [], [[1]])),
    *((0, "setup_samples_s", 1e-3), (0, "setup_samples_s", "[0.001"), (2, "time_samples_s", [-1.0])),
]


def test_values_that_there_cannot_be_are_refused_with_their_line(profile: Path) -> None:
    text = profile.read_text()
    for index, column, value in BAD_VALUES:
        rows = [json.loads(line) for line in text.splitlines()]
        rows[index][column] = value
        write(profile, "".join(json.dumps(row) + "\n" for row in rows))
        with pytest.raises(
            DatabaseError, match=rf"profile {profile}, line {index + 1}: .*; fix that, or export it again"
        ):
            read_profile(profile)


def test_what_is_wrong_is_said(profile: Path) -> None:
    text = profile.read_text()
    for index, column, value, expected in (
        (0, "step_s", -1e-9, "step_s must be finite and at least 0"),
        (0, "step_s", "fast", "cannot store TEXT value in REAL column measurements.step_s"),
        (0, "operation", "sideways", "'sideways' is not a valid Operation"),
        (0, "groups", 5, "not a convolution: groups is 5; it must divide C=64 and K=192"),
        (0, "reason", "none", "a measurement has all costs, and a failure none"),
        (0, "kind", "guess", "kind is 'guess'; it must be one of measurement, failure, verification"),
        (0, "schema", 1, "schema is 1; it must be 10"),
        (2, "configuration", "gemm", "configuration must be JSON, an array"),
        (2, "configuration", "[]", "configuration is '[]'; it must be as mucudnn writes it: [algorithm, version, "),
    ):
        rows = [json.loads(line) for line in text.splitlines()]
        rows[index][column] = value
        write(profile, "".join(json.dumps(row) + "\n" for row in rows))
        with pytest.raises(DatabaseError, match=re.escape(f"line {index + 1}: {expected}") + ".*; fix that"):
            read_profile(profile)
    lines = text.splitlines()
    for bad, expected in (("{", "broken JSON: "), ("[]", "not a JSON object")):
        write(profile, "\n".join((lines[0], "", bad)))
        with pytest.raises(DatabaseError, match=f"line 3: {expected}"):
            read_profile(profile)
    write(profile, lines[0].replace("AMD EPYC", "\\ud800"))
    with pytest.raises(DatabaseError, match=r"line 1: .*surrogates not allowed"):
        read_profile(profile)


# What is opened


def test_databases_are_opened_to_read_only_and_other_files_are_refused(tmp_path: Path) -> None:
    with open_stored(fill(tmp_path / "full.sqlite")) as stored, pytest.raises(DatabaseError, match="can only be read"):
        stored.add(HERE, PROBLEM, 1, FAST)
    path = tmp_path / "file"
    for content, expected in (
        (b"", "is neither a database nor a profile: it is empty; name an SQLite file of mucudnn, or an export of muc"),
        (b" \n\n", "is neither a database nor a profile: it is empty"),
        (b"no database", "is neither a database nor a profile: its first line is not a JSON object"),
        (b"\x89PNG\xff", "is neither a database nor a profile: byte 0 is not text in UTF-8"),
        (b"SQLite format 3\0 and then no more", "is not an SQLite database"),
    ):
        path.write_bytes(content)
        with pytest.raises(DatabaseError, match=f"{path} {expected}"):
            open_stored(path)
