"""Profiles: what was exported comes back as it was, and every bad row is named with what is allowed."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.database_rows import FAILED, FAST, FULL, HERE, MIGRATED, PROBLEM, VERIFIED, VERSIONS, change, fill
from support.places import DATA

from mucudnn.database import schema
from mucudnn.database.database import Database
from mucudnn.database.profiles import open_stored, read_profile
from mucudnn.words.errors import DatabaseError
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.words.results import Failure, Measurement, MicroConfig, WholeRun, WithCachedFilter
from mucudnn.words.samples import MeasuredSamples, PairedSamples

FORMATS = {"csv": Database.export_csv, "json-lines": Database.export_json_lines}
TWO_BYTES = st.integers(0, 2**16)
NOT_NEGATIVE = st.floats(min_value=0, allow_infinity=False)
COSTS = NOT_NEGATIVE | st.integers(0, 2**63 - 1)
MICRO_CONFIGS = st.builds(MicroConfig, st.sampled_from(sorted(VERSIONS)), st.integers(1, 64))
SAMPLES = st.lists(NOT_NEGATIVE, min_size=1, max_size=5).map(tuple)
SHARES, CLOCKS = st.none() | st.floats(0, 1), st.none() | st.floats(1, 1e10)
MEASUREMENTS = st.builds(
    Measurement,
    *(MICRO_CONFIGS, COSTS, COSTS, TWO_BYTES, TWO_BYTES, COSTS, COSTS, st.integers(1, 2**63 - 1)),
    raw=st.none() | st.builds(MeasuredSamples, SAMPLES, SAMPLES, SHARES, CLOCKS),
)
FAILURES = st.builds(Failure, MICRO_CONFIGS, st.text())
POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
VERIFICATIONS = st.builds(
    WholeRun, POSITIVE, POSITIVE, COSTS, raw=st.none() | st.builds(PairedSamples, SAMPLES, SAMPLES, SHARES, CLOCKS)
)
OTHER = ConvProblem(
    Operation.BACKWARD_DATA, 3, 8, 9, 4, 1, 2, memory_format=MemoryFormat.CHANNELS_LAST, dtype="float16"
)
ENVIRONMENTS = st.sampled_from([HERE, replace(HERE, threads=1, device='a "device", or two\r\nlines;', numerics="TF32")])
ROWS = st.tuples(ENVIRONMENTS, st.sampled_from([PROBLEM, OTHER]), MEASUREMENTS | FAILURES | VERIFICATIONS)


def exported(database: Database, name: str) -> str:
    stream = io.StringIO(newline="")
    FORMATS[name](database, stream)
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
        case WholeRun():
            database.add_whole_run(environment, problem, [MicroConfig("gemm", 2)] * 3, VERSIONS, value)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """One measurement, one failure and one verification, as JSON lines."""
    with Database(fill(tmp_path / "full.sqlite")) as database:
        return write(tmp_path / "profile", exported(database, "json-lines"))


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(ROWS, max_size=12), same_time=st.booleans(), name=st.sampled_from(sorted(FORMATS)))
def test_what_is_exported_comes_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[Any, ...]], same_time: bool, name: str
) -> None:
    times = iter(datetime(2026, 1, 31, 12, tzinfo=UTC) + timedelta(seconds=not same_time) * i for i in range(12))
    with pytest.MonkeyPatch.context() as patch, Database(":memory:") as database:
        patch.setattr(schema, "now", lambda: next(times).isoformat(timespec="microseconds"))
        for row in rows:
            add(database, row)
        text = exported(database, name)
        if not text:
            return  # an empty file is not a profile
        path = write(tmp_path_factory.mktemp("profiles") / "profile", text)
        with read_profile(path) as read:
            assert exported(read, name) == text
            assert read.environments() == database.environments()
            for environment in database.environments():
                for problem in (PROBLEM, OTHER):
                    key = (environment, problem, VERSIONS)
                    assert read.measurements(*key) == database.measurements(*key)
                    assert read.failures(*key) == database.failures(*key)


@pytest.mark.parametrize("name", FORMATS)
def test_all_kinds_of_rows_come_back(tmp_path: Path, name: str) -> None:
    with Database(fill(tmp_path / "full.sqlite")) as database:
        path = write(tmp_path / "profile", exported(database, name))
    with read_profile(path) as read:
        key = (HERE, PROBLEM, VERSIONS)
        found = (read.measurements(*key), read.failures(*key))
        assert (*found, read.whole_run(HERE, PROBLEM, [FAST.micro_config], VERSIONS)) == FULL


def test_runs_with_a_kept_filter_come_back(tmp_path: Path) -> None:
    key = (HERE, PROBLEM, [FAST.micro_config, FAILED.micro_config], VERSIONS)
    keeping = WithCachedFilter("gemm", instead_of=(FAILED.micro_config,))
    with Database(":memory:") as database:
        database.add_whole_run(*key, VERIFIED, keeping)
        path = write(tmp_path / "profile", exported(database, "json-lines"))
    with read_profile(path) as read:
        assert read.whole_run(*key, keeping) == VERIFIED


def test_newest_row_counts_wherever_it_stands(tmp_path: Path) -> None:
    with Database(":memory:") as database:
        for step_s in (3.0, 1.0):
            database.add(HERE, PROBLEM, 1, replace(FAST, step_s=step_s))
        heading, older, newer = exported(database, "csv").splitlines()
    with read_profile(write(tmp_path / "profile", "\n".join((heading, newer, older)))) as read:
        assert [m.step_s for m in read.measurements(HERE, PROBLEM, VERSIONS)] == [1.0]


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_rows_are_exported_in_the_same_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "now", lambda: "2026-01-31T12:00:00.000000+00:00")
    rows = [
        (HERE, PROBLEM, VERIFIED),
        (HERE, OTHER, FAST),
        (replace(HERE, threads=1), OTHER, FAST),
        (HERE, OTHER, FAILED),
    ]
    texts = set()
    for order in (rows, rows[::-1]):
        with Database(":memory:") as database:
            for row in order:
                add(database, row)
            texts.add(exported(database, name))
    assert len(texts) == 1


def test_columns_in_any_order_and_empty_lines_will_do(tmp_path: Path) -> None:
    with Database(fill(tmp_path / "full.sqlite")) as database:
        text = exported(database, "csv")
    turned = io.StringIO(newline="")
    csv.writer(turned, lineterminator="\n\n").writerows(cells[::-1] for cells in csv.reader(io.StringIO(text)))
    path = write(tmp_path / "profile", "\ufeff" + turned.getvalue())
    with read_profile(path) as read:
        assert read.measurements(HERE, PROBLEM, VERSIONS) == (FAST,)
        assert read.failures(HERE, PROBLEM, VERSIONS) == (FAILED,)


@pytest.mark.parametrize("name", ["version-1.csv", "version-1.jsonl"])
def test_profiles_of_version_1_are_read(name: str) -> None:
    with read_profile(DATA / name) as read:
        key = (HERE, PROBLEM, VERSIONS)
        found = (read.measurements(*key), read.failures(*key))
        assert (*found, read.whole_run(HERE, PROBLEM, [FAST.micro_config], VERSIONS)) == MIGRATED


# Bad rows


ONE = "a whole number of at least 1"
LIST = "a list of seconds, each finite and at least 0, or nothing where none were kept"
BAD_VALUES = [
    (0, "step_s", -1e-9, "step_s is -1e-09; it must be seconds, finite and at least 0"),
    (0, "step_s", math.inf, "step_s is inf; it must be seconds, finite"),
    (0, "setup_s", math.nan, "setup_s is nan; it must be seconds, finite"),
    (0, "setup_s", "fast", "setup_s is 'fast'; it must be seconds"),
    (0, "setup_s", True, "setup_s is True; it must be seconds"),
    (0, "setup_s", 10**400, "it must be seconds"),
    (0, "prepared_bytes", -1, "prepared_bytes is -1; it must be a whole number of at least 0"),
    (0, "scratch_bytes", 0.5, "scratch_bytes is 0.5; it must be a whole number of at least 0"),
    (0, "scratch_bytes", 2**63, f"scratch_bytes is {2**63}; it must be"),
    (0, "relative_error", math.nan, "relative_error is nan; it must be a number, finite and at least 0"),
    (0, "noise", -1, "noise is -1; it must be a number"),
    (0, "samples", 0, f"samples is 0; it must be {ONE}"),
    (0, "samples", True, f"samples is True; it must be {ONE}"),
    (0, "samples", None, f"samples is missing; it must be {ONE}"),
    (0, "micro_batch_size", 0, f"micro_batch_size is 0; it must be {ONE}"),
    (0, "algorithm", "", "algorithm is ''; it must be the name of an algorithm"),
    (0, "version", "1a", "version is '1a'; it must be a whole number"),
    (0, "operation", "sideways", "operation is 'sideways'; it must be one of forward, backward_data, backward_filter"),
    (0, "dtype", "float4", "dtype is 'float4'; it must be one of float64, float32, bfloat16, float16"),
    (0, "memory_format", "NCHW", "memory_format is 'NCHW'; it must be one of contiguous, channels_last"),
    (0, "stride_h", 0, f"stride_h is 0; it must be {ONE}"),
    (0, "padding_w", -1, "padding_w is -1; it must be a whole number of at least 0"),
    (0, "groups", 5, "not a convolution: groups is 5; it must divide C=64 and K=192"),
    (0, "r", 99, "not a convolution: the filter covers"),
    (0, "threads", "two", f"threads is 'two'; it must be {ONE}"),
    (0, "measured_at", "yesterday", "measured_at is 'yesterday'; it must be a time in UTC"),
    (0, "measured_at", "2026-01-31T12:00:00+02:00", "it must be a time in UTC to the microsecond"),
    (0, "measured_at", None, "measured_at is missing; it must be a time in UTC"),
    (0, "kind", "guess", "kind is 'guess'; it must be one of measurement, failure, verification"),
    (0, "kind", None, "kind is missing; it must be one of"),
    (0, "reason", "none", "reason is 'none'; a measurement has no such value"),
    (1, "step_s", 1.0, "step_s is 1.0; a failure has no such value"),
    (2, "baseline_s", 0, "baseline_s is 0; it must be seconds, finite and above 0"),
    (2, "time_s", math.nan, "time_s is nan; it must be seconds, finite and above 0"),
    (2, "configuration", "gemm", "configuration is 'gemm'; it must be runs of micro-configs"),
    (2, "configuration", '[["gemm", 1, 0, 1]]', "it must be runs of micro-configs"),
    (2, "configuration", '[["gemm",1,8,1]]', "it must be runs of micro-configs"),
    (2, "configuration", '[["gemm", 1, 8]]', "it must be runs of micro-configs"),
    (2, "configuration", '[["gemm", 1, 8, 0]]', "it must be runs of micro-configs"),
    (2, "configuration", '[["gemm", 1, 8, 1, "lost"]]', "it must be runs of micro-configs"),
    (2, "configuration", "[]", "it must be runs of micro-configs"),
    (2, "algorithm", "gemm", "algorithm is 'gemm'; a verification has no such value"),
    (0, "step_samples_s", [1e-3, math.nan], f"step_samples_s is [0.001, nan]; it must be {LIST}"),
    (0, "step_samples_s", [1e-3, math.inf], f"step_samples_s is [0.001, inf]; it must be {LIST}"),
    (0, "step_samples_s", [1e-3, -1e-3], f"step_samples_s is [0.001, -0.001]; it must be {LIST}"),
    (0, "step_samples_s", [1e-3, None], f"step_samples_s is [0.001, None]; it must be {LIST}"),
    (0, "step_samples_s", [1e-3, True], f"step_samples_s is [0.001, True]; it must be {LIST}"),
    (0, "step_samples_s", [10**400], f"; it must be {LIST}"),
    (0, "step_samples_s", [[1e-3]], f"step_samples_s is [[0.001]]; it must be {LIST}"),
    (0, "step_samples_s", [], f"step_samples_s is []; it must be {LIST}"),
    (0, "step_samples_s", {"first": 1e-3}, f"step_samples_s is {{'first': 0.001}}; it must be {LIST}"),
    (0, "setup_samples_s", 1e-3, f"setup_samples_s is 0.001; it must be {LIST}"),
    (0, "setup_samples_s", "[0.001", f"setup_samples_s is '[0.001'; it must be {LIST}"),
    (0, "stolen", 1.5, "stolen is 1.5; it must be a number from 0 to 1"),
    (0, "clock_hz", 0, "clock_hz is 0; it must be a number, finite and above 0"),
    (1, "step_samples_s", [1e-3], "step_samples_s is [0.001]; a failure has no such value"),
    (2, "time_samples_s", [-1.0], f"time_samples_s is [-1.0]; it must be {LIST}"),
    (2, "step_samples_s", [1e-3], "a verification has no such value"),
]


@pytest.mark.parametrize(("index", "column", "value", "expected"), BAD_VALUES)
def test_bad_values_are_named(profile: Path, index: int, column: str, value: object, expected: str) -> None:
    rows = [json.loads(line) for line in profile.read_text().splitlines()]
    rows[index][column] = value
    write(profile, "".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DatabaseError) as caught:
        read_profile(profile)
    assert f"profile {profile} is not used" in str(caught.value)
    assert f"line {index + 1}: " in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.parametrize(("index", "column", "value"), [bad[:3] for bad in BAD_VALUES])
def test_bad_values_are_named_in_csv(profile: Path, index: int, column: str, value: object) -> None:
    rows = [json.loads(line) for line in profile.read_text().splitlines()]
    rows[index][column] = value
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, schema.EXPORT_COLUMNS)
    writer.writeheader()
    writer.writerows(rows)
    write(profile, stream.getvalue())
    geometry = "|not a convolution" if column in ("groups", "r") else ""
    with pytest.raises(DatabaseError, match=rf"line {index + 2}: ({column} is{geometry})"):
        read_profile(profile)


def test_values_that_no_database_can_keep_are_named(profile: Path) -> None:
    first, *rest = profile.read_text().splitlines()
    write(profile, "\n".join((first.replace("AMD EPYC", "\\ud800"), *rest)))
    with pytest.raises(DatabaseError, match=r"line 1: device is '\\ud800'; it must be text"):
        read_profile(profile)


def test_every_bad_row_and_value_is_named(profile: Path) -> None:
    lines = profile.read_text().splitlines()
    bad = lines[0].replace('"threads": 2', '"threads": 0').replace('"samples": 5', '"samples": -5')
    write(profile, "\n".join((lines[0], bad, "", "{", "[]", lines[1], lines[1], "7")))
    with pytest.raises(DatabaseError) as caught:
        read_profile(profile)
    message = str(caught.value).splitlines()
    assert message[1].startswith("  line 2: threads is 0; it must be a whole number of at least 1; samples is -5; it")
    assert message[2].startswith("  line 4: broken JSON: ")
    assert message[3] == "  line 5: not a JSON object; write one object a line"
    assert message[4] == "  line 7: has the key and measured_at of line 6; keep one of the two"
    assert message[5] == "  line 8: not a JSON object; write one object a line"
    assert len(message) == 6


def test_a_long_list_of_bad_rows_is_cut_and_counted(profile: Path) -> None:
    write(profile, "{}\n" * 50)
    with pytest.raises(DatabaseError, match=r"line 20: kind is missing.*\n  and 30 more$"):
        read_profile(profile)


def without(column: str) -> Callable[[str], str]:
    return lambda text: re.sub(rf"\b{column},?", "", text, count=1)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (without("step_s"), "line 1: no column step_s; the columns are kind, measured_at, device"),
        (
            lambda text: text.replace("step_s", "colour", 1),
            "line 1: no column step_s, unknown column 'colour'; the col",
        ),
        (lambda text: text.replace("step_s", "setup_s", 1), "line 1: no column step_s, column setup_s twice; the"),
        (
            lambda text: text.replace("\r\n", ",1\r\n").replace("schema,1", "schema"),
            "line 2: has 54 values; there must be 53",
        ),
        (lambda text: text + "measurement,now\r\n", "line 5: has 2 values; there must be 53"),
        (lambda text: text + '"cut off', "line 5: broken CSV: unexpected end of data"),
    ],
)
def test_bad_csv_files(tmp_path: Path, damage: Callable[[str], str], expected: str) -> None:
    with Database(fill(tmp_path / "full.sqlite")) as database:
        path = write(tmp_path / "profile", damage(exported(database, "csv")))
    with pytest.raises(DatabaseError) as caught:
        read_profile(path)
    assert f"profile {path}" in str(caught.value)
    assert expected in str(caught.value)


# What is opened


def test_content_says_what_a_file_is(tmp_path: Path) -> None:
    original = fill(tmp_path / "full.csv")
    with Database(original) as database:
        for name in FORMATS:
            write(tmp_path / f"{name}.sqlite", exported(database, name))
    for path in (original, *(tmp_path / f"{name}.sqlite" for name in FORMATS)):
        with open_stored(path) as stored:
            assert stored.measurements(HERE, PROBLEM, VERSIONS) == (FAST,)
            assert stored.whole_run(HERE, PROBLEM, [FAST.micro_config], VERSIONS) == VERIFIED


def test_databases_are_opened_to_read_only(tmp_path: Path) -> None:
    with open_stored(fill(tmp_path / "full.sqlite")) as stored, pytest.raises(DatabaseError, match="can only be read"):
        stored.add(HERE, PROBLEM, 1, FAST)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is neither a database nor a profile: it is empty; name an SQLite file of mucudnn, or what mucudnn data"),
        (b" \n\n", "it is empty"),
        (b"no database", "its first line does not name the columns of an export"),
        (b"name,c,h,w\n1,2,3,4\n", "its first line does not name the columns of an export"),
        (b"\x89PNG\xff", "byte 0 is not text in UTF-8"),
        (b"SQLite format 3\0 and then no more", "is not an SQLite database"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(DatabaseError) as caught:
        open_stored(path)
    assert str(path) in str(caught.value)
    assert expected in str(caught.value)


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    for path, expected in ((tmp_path / "missing", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(DatabaseError, match=f"{path} cannot be read: {expected}.*; name another"):
            open_stored(path)


def test_databases_of_other_programs_are_refused(tmp_path: Path) -> None:
    path = fill(tmp_path / "full.sqlite")
    change(path, "PRAGMA application_id = 7")
    with pytest.raises(DatabaseError, match="belongs to another program"):
        open_stored(path)
