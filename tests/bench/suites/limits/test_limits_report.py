"""What the comparison under limits says: means, counts and the floor, in the table, in words, in CSV and in JSON."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.clock.machine import ENVIRONMENT, FORWARD
from support.snapshots import assert_as_stored, printed

from mucudnn.bench.contests.timing import MedianTime
from mucudnn.bench.report.export import write_csv
from mucudnn.bench.suites.limits.report import in_words, limits_record, limits_rows, limits_table
from mucudnn.bench.suites.limits.result import (
    ComparedProblem,
    FailedProblem,
    LimitsComparison,
    Run,
    SameTime,
    UnderLimit,
)
from mucudnn.words.config import Config
from mucudnn.words.results import Configuration, MicroConfig
from mucudnn.words.task import Task

MIB = 2**20


def run(time_s: float, workspace_bytes: int = 0, algorithm: str = "cudnn:7") -> Run:
    return Run(Configuration((MicroConfig(algorithm, 8),), time_s, workspace_bytes), MedianTime(time_s, 0.01))


def compared(
    name: str, tight: tuple[float | None, float | None], free: tuple[float, float], theirs: int, ours: int | None
) -> ComparedProblem:
    """Seconds of rival and ours with a limit of 8 MiB and without; bytes for the time of torch, which takes 1 s."""
    runs = [None if time_s is None else run(time_s) for time_s in (*tight, *free)]
    torch = {"torch": MedianTime(2.0, 0.02), "torch-benchmark-10": MedianTime(1.0, 0.03)}
    same = SameTime(theirs, None if ours is None else run(1.0, ours))
    under = (UnderLimit(8 * MIB, *runs[:2]), UnderLimit(None, *runs[2:]))
    return ComparedProblem(Task(FORWARD, 8, count=2, name=f"{name}, {FORWARD}"), torch, under, same)


# Gains of 4 and 1 under the limit, of 2 and 1/2 without; workspaces of 64 MiB for 2, 8 MiB for 0, and 0 for 100 bytes.
KNOWN = LimitsComparison(
    source="layers",
    config=Config(workspace_limit=None),
    environment=ENVIRONMENT,
    limits=(8 * MIB, None),
    reference="torch-benchmark-10",
    rivals="cuDNN's engines",
    wanted=6,
    rounds=7,
    problems=(
        compared("a", (4.0, 1.0), (1.0, 0.5), 64 * MIB, 2 * MIB),
        compared("b, c", (1.0, 1.0), (0.5, 1.0), 8 * MIB, 0),
        compared("d", (None, 1.0), (1.0, 1.0), 0, 100),
        compared("e", (1.0, None), (1.0, 4.0), 5 * MIB, None),
    ),
    failed=(FailedProblem(Task(FORWARD, 8, name="f"), "out of memory"),),
)


def summary(comparison: LimitsComparison = KNOWN) -> dict[str, object]:
    record: dict[str, object] = json.loads(json.dumps(limits_record(comparison)))
    return record


def test_gains_are_a_geometric_mean_of_the_problems_that_have_both() -> None:
    tight, free = summary()["limits"]  # type: ignore[misc]
    assert tight["limit_bytes"] == 8 * MIB
    assert tight["geometric_mean"] == pytest.approx(2.0)
    assert (tight["least"], tight["most"], tight["problems"]) == (1.0, 4.0, 2)
    assert (tight["without_rival"], tight["without_ours"]) == (1, 1)
    assert free["limit_bytes"] is None
    assert free["geometric_mean"] == pytest.approx((2 * 0.5 * 1 * 0.25) ** (1 / 4))
    assert (free["without_rival"], free["without_ours"]) == (0, 0)
    assert summary()["best_limit_bytes"] == 8 * MIB


def test_workspaces_below_the_floor_count_as_the_floor_and_are_told() -> None:
    told = summary()["workspace_for_the_same_time"]
    assert told["geometric_mean"] == pytest.approx((32 * 8 * 1) ** (1 / 3))  # type: ignore[index]
    assert {k: v for k, v in told.items() if k != "geometric_mean"} == {  # type: ignore[attr-defined]
        **{"within": 0.02, "problems": 3, "not_as_fast": 1, "floor_bytes": MIB},
        **{"theirs_below_floor": 1, "theirs_zero": 1, "ours_below_floor": 2, "ours_zero": 1, "both_below_floor": 1},
    }


def test_the_speedup_without_a_limit_is_over_every_variant_of_torch() -> None:
    """2, 1, 1 and 1/4 times as fast as the reference."""
    told = summary()["speedup_without_limit"]
    mean = pytest.approx(0.5 ** (1 / 4))
    assert told["torch-benchmark-10"] == {"geometric_mean": mean, "least": 0.25, "median": 1.0}  # type: ignore[index]
    assert told["torch"]["least"] == 0.5  # type: ignore[index]


def test_the_record_says_where_when_and_how_much() -> None:
    record = summary()
    assert {"environment", "mucudnn", "date", "config", "source", "rounds", "rivals", "reference"} <= record.keys()
    assert (record["wanted"], record["done"], record["complete"]) == (6, 4, False)
    assert record["failed"] == [{"problem": "f", "reason": "out of memory"}]


def test_the_csv_has_a_row_for_each_problem_and_limit(tmp_path: Path) -> None:
    write_csv(tmp_path / "limits.csv", limits_rows(KNOWN))
    rows = list(csv.DictReader(io.StringIO((tmp_path / "limits.csv").read_text())))
    assert [(row["layer"], row["limit_bytes"]) for row in rows] == [
        (layer, limit) for layer in ("a", "b, c", "d", "e") for limit in (str(8 * MIB), "")
    ]
    first, *_, no_rival, _, _, _ = rows
    assert (first["operation"], first["count"], first["batch_size"], first["stride_h"]) == ("forward", "2", "8", "1")
    assert (first["rival_s"], first["mucudnn_s"], first["rival_over_mucudnn"]) == ("4.0", "1.0", "4.0")
    assert (first["torch_s"], first["torch_benchmark_10_s"], first["torch_benchmark_10_noise"]) == (
        "2.0",
        "1.0",
        "0.03",
    )
    assert (first["reference_workspace_bytes"], first["as_fast_workspace_bytes"]) == (str(64 * MIB), str(2 * MIB))
    assert float(first["workspace_ratio"]) == 32.0
    assert (no_rival["layer"], no_rival["rival_s"], no_rival["rival_over_mucudnn"]) == ("d", "", "")


def test_the_table_has_a_row_for_each_limit_and_the_words_say_what_is_missing() -> None:
    assert_as_stored("bench-limits", limits_table(KNOWN), in_words(KNOWN))


@pytest.mark.parametrize("problems", [(), (compared("a", (None, None), (1.0, 1.0), 0, None),)])
def test_nothing_to_compare_is_told_too(problems: tuple[ComparedProblem, ...]) -> None:
    """All failed so far; or no limit leaves anything, and ours is never as fast."""
    nothing = replace(KNOWN, problems=problems)
    assert "no limit" in printed(limits_table(nothing))
    assert f"{len(problems)} of 6 problems" in in_words(nothing)
    assert summary(nothing)["limits"][0]["geometric_mean"] is None  # type: ignore[index]
    assert len(limits_rows(nothing)) == (2 if problems else 0)
