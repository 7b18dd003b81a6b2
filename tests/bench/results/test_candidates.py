"""What tuning measured stands in a file of its own: read back as it was, with the desirable set, line by line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from support.clock.machine import ENVIRONMENT, FORWARD
from support.result_folders import made_up_tuning

from mucudnn.bench.results.reading import Header, read_folder
from mucudnn.bench.results.writing import Row, open_folder
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
