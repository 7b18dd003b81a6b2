"""The database: what is stored comes back, whatever happens to processes and files meanwhile."""

from __future__ import annotations

import io
import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.database_rows import FAILED, FAST, FULL, HERE, PROBLEM, VERSIONS, change, fill, rows_of

from mucudnn.core import errors
from mucudnn.core.errors import DatabaseError
from mucudnn.core.problem import MemoryFormat, Operation
from mucudnn.core.records import Comparison, Failure, FailureKind, Measurement, MicroConfig
from mucudnn.store import database as module
from mucudnn.store import schema
from mucudnn.store.database import Database, EnvironmentRows, default_path
from mucudnn.store.exports import export_json_lines

NUMBERS = st.floats(min_value=0, allow_infinity=False)
COUNTS = st.integers(0, 2**48)  # bytes
SAMPLES = st.integers(1, 2**62)
MICRO_CONFIGS = st.builds(MicroConfig, st.sampled_from(sorted(VERSIONS)), st.integers(1, 64))
MEASUREMENTS = st.builds(Measurement, MICRO_CONFIGS, NUMBERS, NUMBERS, COUNTS, COUNTS, NUMBERS, NUMBERS, SAMPLES)
KINDS = st.sampled_from([FailureKind.FAILED, FailureKind.HOPELESS, FailureKind.TOO_MANY_FLOPS])
FAILURES = st.builds(Failure, MICRO_CONFIGS, st.text(), KINDS) | st.builds(
    *(Failure, MICRO_CONFIGS, st.text(), st.just(FailureKind.SLOW)), least_s=st.floats(1e-9, 1e9)
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return fill(tmp_path / "full.sqlite")


@settings(max_examples=25)
@given(st.lists(MEASUREMENTS | FAILURES, max_size=8))
def test_newest_of_each_micro_config_comes_back(added: list[Measurement | Failure]) -> None:
    expected: dict[MicroConfig, Measurement | Failure] = {}
    with Database(":memory:") as database:
        for item in added:
            add = database.add if isinstance(item, Measurement) else database.add_failure
            add(HERE, PROBLEM, 1, item)  # type: ignore[arg-type]
            expected[item.micro_config] = item
        newest = [expected[micro_config] for micro_config in sorted(expected)]
        assert database.measurements(HERE, PROBLEM, VERSIONS) == tuple(m for m in newest if isinstance(m, Measurement))
        assert database.failures(HERE, PROBLEM, VERSIONS) == tuple(f for f in newest if isinstance(f, Failure))


OTHER_ENVIRONMENTS = [
    *(replace(HERE, device="x"), replace(HERE, capability="AVX2"), replace(HERE, threads=1)),
    *(replace(HERE, torch="2.14.0"), replace(HERE, library="oneDNN 4.0.0"), replace(HERE, compiled="torch")),
    replace(HERE, numerics="TF32"),
]
OTHER_PROBLEMS = [
    *(replace(PROBLEM, **{name: getattr(PROBLEM, name) + 2}) for name in ("c", "h", "w", "k", "r", "s")),
    *(replace(PROBLEM, stride=(2, 1)), replace(PROBLEM, padding=(1, 2)), replace(PROBLEM, dilation=(3, 1))),
    *(replace(PROBLEM, groups=1), replace(PROBLEM, dtype="float64")),
    replace(PROBLEM, memory_format=MemoryFormat.CHANNELS_LAST),
    PROBLEM.with_operation(Operation.BACKWARD_DATA),
]


def test_other_keys_have_nothing(path: Path) -> None:
    others = [
        *((environment, PROBLEM, VERSIONS) for environment in OTHER_ENVIRONMENTS),
        *((HERE, problem, VERSIONS) for problem in OTHER_PROBLEMS),
        *((HERE, PROBLEM, {"gemm": version, "fft": version}) for version in (0, 2)),
    ]
    for key in others:
        assert rows_of(path, *key) == ((), (), None)


def test_only_algorithms_and_configurations_asked_for_come_back(path: Path) -> None:
    eight, four = MicroConfig("gemm", 8), MicroConfig("gemm", 4)
    with Database(path) as database:
        assert database.measurements(HERE, PROBLEM, {"fft": 1}) == ()
        assert database.failures(HERE, PROBLEM, {"fft": 1}) == (FAILED,)
        for baseline_s in (3.0, 4.0):
            database.add_whole_run(HERE, PROBLEM, [eight, four, four], VERSIONS, Comparison(baseline_s, 2.0, 0.1))
        assert database.whole_run(HERE, PROBLEM, [eight, four, four], VERSIONS) == Comparison(4.0, 2.0, 0.1)
        assert database.whole_run(HERE, PROBLEM, [eight], VERSIONS) == FULL[2]
        for other in ([eight, four], [four, four, eight], [eight, four, four, four]):
            assert database.whole_run(HERE, PROBLEM, other, VERSIONS) is None


def test_where_the_default_file_cannot_be_made_measurements_are_kept_in_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.delenv("MUCUDNN_DATABASE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(errors, "_said", set())
    monkeypatch.setattr(module, "_kept", threading.local())
    with pytest.warns(RuntimeWarning, match=r"cannot be created: .* this process ends; name a file with Config\("):
        database = Database()
    with database:
        database.add(HERE, PROBLEM, 1, FAST)
    with Database() as later:
        assert later.measurements(HERE, PROBLEM, VERSIONS) == (FAST,)
    for named in (tmp_path / "file" / "named.sqlite", default_path()):
        with pytest.raises(DatabaseError, match=r"name another file with Config\(database=\.\.\.\)"):
            Database(named)
    for options in ({"create": False}, {"read_only": True}):
        with pytest.raises(DatabaseError, match="does not exist"):
            Database(**options)


def test_default_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MUCUDNN_DATABASE", "named.sqlite")
    assert default_path() == Path("named.sqlite")
    monkeypatch.delenv("MUCUDNN_DATABASE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "mucudnn"
    assert default_path() == folder / f"measurements-{schema.VERSION}.sqlite"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path() == tmp_path / ".cache" / "mucudnn" / f"measurements-{schema.VERSION}.sqlite"


def test_default_file_of_another_schema_version_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MUCUDNN_DATABASE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with monkeypatch.context() as earlier:
        earlier.setattr(schema, "VERSION", 9)
        of_earlier = default_path()
        of_earlier.parent.mkdir()
        fill(of_earlier)
        change(of_earlier, "PRAGMA user_version = 9")
    before = of_earlier.read_bytes()
    with Database() as database:
        assert database.path != of_earlier
        assert database.every_row() == []
    assert of_earlier.read_bytes() == before
    with pytest.raises(DatabaseError, match="has schema"):
        Database(of_earlier)


# Upkeep


def test_exports_have_every_row_and_value(path: Path) -> None:
    as_json = io.StringIO()
    with Database(path) as database:
        export_json_lines(database, as_json)
    records = [json.loads(line) for line in as_json.getvalue().splitlines()]
    assert [record["kind"] for record in records] == ["measurement", "failure", "verification"]
    assert records[0]["step_s"] == FAST.step_s
    assert records[1]["reason"] == "out of memory"
    assert (records[2]["baseline_s"], json.loads(records[2]["configuration"])) == (2.0, [["gemm", 1, 8, 1]])
    assert all((r["device"], r["stride_w"], r["memory_format"]) == ("AMD EPYC", 2, "contiguous") for r in records)


def test_merge_is_the_union(path: Path, tmp_path: Path) -> None:
    newer, elsewhere = replace(FAST, step_s=9.0), replace(HERE, threads=1)
    with Database(tmp_path / "other.sqlite") as other:
        other.add(elsewhere, PROBLEM, 1, FAST)
        other.add(HERE, PROBLEM, 1, newer)
    with Database(tmp_path / "a" / "b%20?c" / "union.sqlite") as union:  # in a folder that is made
        with Database(other.path, read_only=True) as second, Database(path, read_only=True) as third:
            assert union.merge(second) == {"added": 2, "known": 0}
            assert union.merge(third) == {"added": 2, "known": 1}
            assert union.merge(third) == {"added": 0, "known": 3}
        assert union.measurements(HERE, PROBLEM, VERSIONS) == (newer,)  # by its time, although it was merged first
        assert union.measurements(elsewhere, PROBLEM, VERSIONS) == (FAST,)
        assert union.info() == (EnvironmentRows(elsewhere, 1, 0, 0, 0, 0), EnvironmentRows(HERE, 1, 1, 1, 0, 0))
    assert rows_of(path, HERE, PROBLEM) == FULL


def test_a_file_of_an_earlier_build_keeps_its_results_and_what_else_it_has_is_ignored(path: Path) -> None:
    """It has all rows that were superseded, two more columns, and a table of rates."""
    for table in schema.KEYS:
        change(path, f"ALTER TABLE {table} ADD COLUMN stolen REAL")
        change(path, f"ALTER TABLE {table} ADD COLUMN clock_hz REAL")
    key = ", ".join(schema.KEYS["measurements"])
    earlier = f"{key}, '2020-01-01T00:00:00.000000+00:00', 1, 9, 1, 1, 1, 1, 1 FROM measurements WHERE reason IS NULL"
    names = f"{key}, measured_at, {', '.join(schema.COSTS)}"
    change(path, f"INSERT INTO measurements ({names}) SELECT {earlier}")
    change(path, "CREATE TABLE rates (environment_id INTEGER PRIMARY KEY, rate REAL)")
    with Database(path) as database:
        assert len(database.every_row()) == 4
    assert rows_of(path, HERE, PROBLEM) == FULL
    newer = replace(FAST, step_s=1.0)
    with Database(path) as database:
        database.add(HERE, PROBLEM, 1, newer)
        assert database.measurements(HERE, PROBLEM, VERSIONS) == (newer,)
        assert len(database.every_row()) == 3
