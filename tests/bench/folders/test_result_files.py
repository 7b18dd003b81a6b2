"""Files of ``--json`` are read as folders are: those in the repository, and those that benchmarks write today."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from support.clock.machine import ENVIRONMENT
from support.command_line import fail, invoke
from support.places import DATA

from mucudnn.bench.folders.result_files import read_result_file
from mucudnn.bench.report.records import origin
from mucudnn.bench.suites.numerics.report import numerics_record
from mucudnn.bench.suites.numerics.result import AlgorithmNumerics, NumericsBenchmark
from mucudnn.bench.suites.step_errors.report import step_errors_record
from mucudnn.bench.suites.step_errors.result import StepErrors, StepErrorsBenchmark
from mucudnn.words.config import Config
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import ConvProblem, MemoryFormat

STORED = sorted((DATA / "results").glob("*.json"))
WITH_ROWS = [path for path in STORED if not path.name.startswith("limits")]


def times_in(record: object) -> list[float]:
    """All times of contestants in a file."""
    ends = ("torch_s", "kept_s", "torch_step_s", "mucudnn_step_s", "time_s", "median_s", "contiguous_s", "_last_s")
    if isinstance(record, list):
        return [time for each in record for time in times_in(each)]
    if not isinstance(record, dict):
        return []
    of_sums = ("total", "config", "formats")
    inner = [time for name, each in record.items() if name not in of_sums for time in times_in(each)]
    return [value for name, value in record.items() if name.endswith(ends)] + inner


@pytest.mark.parametrize("path", WITH_ROWS, ids=lambda path: path.stem)
def test_every_time_of_a_file_is_in_a_row(path: Path) -> None:
    record = json.loads(path.read_text())
    folder = read_result_file(path)
    assert sorted(set(folder.rows["time_s"].dropna())) == sorted(set(times_in(record)))
    assert folder.header.environment.device == record["environment"]["device"]
    assert [problem for problem in folder.problems if "without samples" in problem] == list(folder.problems)
    shown = invoke("report", path, "--markdown")
    assert shown.exit_code == 0, shown.output
    assert f"# {folder.header.benchmark}" in shown.output


def test_speedups_are_those_of_the_file() -> None:
    path = next(path for path in WITH_ROWS if path.name == "training-alexnet.json")
    cells = {(c["memory_format"], c["variant"]): c["time_s"] for c in json.loads(path.read_text())["cells"]}
    speedup = cells["contiguous", "torch"] / cells["contiguous", "mucudnn"]
    shown = invoke("report", path, "--markdown").output
    assert f" {speedup:.3f} |" in shown
    assert "spread, %" not in shown  # nothing is known of it


def test_numbers_that_are_no_times_are_rows_too(tmp_path: Path) -> None:
    problem = ConvProblem("forward", 3, 8, 8, 16, 3, 3, padding=1)
    numerics = AlgorithmNumerics("gemm", problem, True, 9, 8, 2.0**127, 0.0, True, 1e-7)
    errors = StepErrors("torch", MemoryFormat.CONTIGUOUS, 1e-7, 2e-7, 3e-7, 4e-7, "conv.weight", 0, 0)
    records = {
        "numerics": numerics_record(NumericsBenchmark((numerics,), ENVIRONMENT, datetime.now(UTC))),
        "errors": step_errors_record(StepErrorsBenchmark("net", 8, Config(), ENVIRONMENT, (errors,))),
    }
    for name, record in records.items():
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(record))
        folder = read_result_file(file)
        assert (folder.header.benchmark, folder.problems, len(folder.rows)) == (name, (), 1)
        assert "no time" not in invoke("report", file).output
    assert "| 4e\\-07 |" in invoke("report", tmp_path / "errors.json", "--markdown").output.replace("4e-07", "4e\\-07")


def cell(**changes: Any) -> dict[str, Any]:
    setting = {"network": "net", "batch_size": 8, "precision": "float32", "memory_format": "contiguous"}
    return {**setting, "variant": "torch", "time_s": 0.5, "peak_bytes": 9, "failure": "", **changes}


def written(tmp_path: Path, **record: Any) -> Path:
    file = tmp_path / "result.json"
    file.write_text(json.dumps({**origin(ENVIRONMENT, datetime.now(UTC)), **record}))
    return file


def test_a_variant_without_a_time_says_why(tmp_path: Path) -> None:
    file = written(tmp_path, cells=[cell(), cell(variant="mucudnn", time_s=None, failure="out of memory")])
    rows = read_result_file(file).rows.set_index("contestant")
    assert (rows.loc["torch", "time_s"], rows.loc["mucudnn", "failure"]) == (0.5, "out of memory")


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"plan": "of mine"}, "has no rows that can be shown: name a JSON file of mucudnn bench network, training"),
        ({"cells": [{"variant": "torch"}]}, "has no 'network'"),
        ({"cells": [cell(time_s="fast")]}, "has a value that is not understood"),
        ({"format_version": 2}, "format version 2"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path: Path, record: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInputError, match=told):
        read_result_file(written(tmp_path, **record))


def test_the_summary_of_limits_has_no_rows() -> None:
    (limits,) = (path for path in STORED if path.name.startswith("limits"))
    assert "has no rows that can be shown" in fail("report", limits)
