"""What tuning measured stands in a file of its own: read back as it was, with the desirable set, line by line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.clock.machine import ENVIRONMENT, FORWARD
from support.result_folders import made_up_tuning

from mucudnn.bench.folders.candidates import CANDIDATES_FILE
from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.reading import read_folder
from mucudnn.bench.folders.rows import Row
from mucudnn.bench.folders.writing import open_folder
from mucudnn.solver.front import desirable_sets

HEADER = Header("convolutions", "a network", {}, ENVIRONMENT, subject_columns=("layer",), wanted=2)
TUNED = made_up_tuning(FORWARD, 6, Random(0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with open_folder(tmp_path / "results", HEADER) as writer:
        for layer in ("conv1", "conv2"):
            writer.add_candidates({"layer": layer}, [TUNED])
            writer.add([Row({"layer": layer}, "torch", (0.1,))])
        writer.write_summary()
    return tmp_path / "results"


def change_line(folder: Path, number: int, change: Callable[[dict[str, Any]], object]) -> None:
    lines = (folder / CANDIDATES_FILE).read_text().splitlines()
    record = json.loads(lines[number - 1])
    change(record)
    lines[number - 1] = json.dumps(record)
    (folder / CANDIDATES_FILE).write_text("\n".join(lines) + "\n")


def layers(folder: Path) -> list[str]:
    return [line["layer"] for line in read_folder(folder).candidates]


def test_what_was_measured_is_read_back(folder: Path) -> None:
    read = read_folder(folder)
    assert read.problems == ()
    assert layers(folder) == ["conv1", "conv2"]
    line = read.candidates[1]
    found = {(one["algorithm"], one["micro_batch_size"]): one for one in line["candidates"]}
    assert len(found) == len(TUNED.measurements) == 4 * 4
    for one in TUNED.measurements:
        row = found[one.micro_config.algorithm, one.micro_config.micro_batch_size]
        costs = (one.setup_s, one.step_s, one.prepared_bytes, one.scratch_bytes)
        assert tuple(row[name] for name in ("setup_s", "step_s", "prepared_bytes", "scratch_bytes")) == costs
        assert row["is_allowed"] == (one.micro_config.algorithm != "bad")
    expected = desirable_sets([m for m in TUNED.measurements if m.micro_config.algorithm != "bad"], 6).of(6)
    assert [tuple(point.values()) for point in line["desirable"]] == [
        (str(c), c.time_s, c.workspace_bytes) for c in expected
    ]


def test_several_choices_are_one_line(folder: Path) -> None:
    """A second choice measures one size more."""
    first = replace(TUNED, measurements=TUNED.measurements[:-1])
    with open_folder(folder, HEADER) as writer:
        writer.add_candidates({"layer": "conv3"}, [first, TUNED])
        writer.add_candidates({"layer": "conv4"}, [])
    assert layers(folder) == ["conv1", "conv2", "conv3"]
    assert len(read_folder(folder).candidates[2]["candidates"]) == len(TUNED.measurements)


def test_an_invalid_line_is_reported_and_the_others_are_shown(folder: Path) -> None:
    whole = (folder / CANDIDATES_FILE).read_text()
    for change, told in (
        (lambda line: line.pop("layer"), "no column layer"),
        (lambda line: line.update(candidates={}), "candidates is {}, not a list"),
        (lambda line: line["candidates"][0].pop("step_s"), "lacks one of"),
        (lambda line: line["candidates"][0].update(step_s=-1.0), "step_s is -1.0"),
        (lambda line: line["candidates"][0].update(step_s=float("nan")), "NaN is not a finite number"),
        (lambda line: line["candidates"][0].update(algorithm=7), "algorithm is 7"),
        (lambda line: line["candidates"][0].update(micro_batch_size=0), "micro_batch_size is 0"),
        (lambda line: line["desirable"][0].update(time_s="x"), "time_s is 'x'"),
    ):
        (folder / CANDIDATES_FILE).write_text(whole)
        change_line(folder, 1, change)
        read = read_folder(folder)
        assert layers(folder) == ["conv2"]
        assert len(read.rows) == 2
        (problem,) = read.problems
        assert problem.startswith(f"{folder / CANDIDATES_FILE}, line 1: ")
        assert told in problem


def test_a_line_that_was_being_written_is_lost_alone(folder: Path) -> None:
    path = folder / CANDIDATES_FILE
    content = path.read_bytes()
    half = content.index(b"\n") + 1
    for kept in (0.1, 0.5, 0.99):
        path.write_bytes(content[: half + int(kept * (len(content) - half))])
        read = read_folder(folder)
        assert layers(folder) == ["conv1"]
        assert len(read.problems) == 1
        with open_folder(folder, HEADER) as writer:
            writer.add_candidates({"layer": "conv2"}, [TUNED])
        assert layers(folder) == ["conv1", "conv2"]
