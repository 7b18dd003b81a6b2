"""Steps' samples in a result folder: what is kept, and what the next run passes over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.clock.machine import ENVIRONMENT

from mucudnn.bench.contests.variants import Variant
from mucudnn.bench.folders.reading import read_folder
from mucudnn.bench.folders.writing import open_folder
from mucudnn.bench.suites.training.benchmark import TrainingOptions
from mucudnn.bench.suites.training.result import Precision, Setting, StepCost, VariantResult
from mucudnn.bench.suites.training.stored import add_group, header_of, is_known
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import MemoryFormat

SETTING = Setting("net", 8, "cpu", Precision.FLOAT32, MemoryFormat.CONTIGUOUS)
SIZES = (Precision.FLOAT32,), tuple(MemoryFormat), TrainingOptions(rounds=2), ENVIRONMENT
GROUP = (
    VariantResult(SETTING, Variant.TORCH, StepCost(0.2, 0.0, 100, samples_s=(0.1, 0.3))),
    VariantResult(SETTING, Variant.MUCUDNN, None, "no memory"),
)


def test_steps_are_kept_and_passed_over_by_the_next_run(tmp_path: Path) -> None:
    with open_folder(tmp_path, header_of(["net"], [8], *SIZES)) as folder:
        assert not is_known(folder, SETTING)
        add_group(folder, GROUP)
        folder.write_summary()
    read = read_folder(tmp_path)
    assert read.header.wanted == 2
    rows = read.rows.set_index("contestant")
    assert (rows.loc["torch", "samples_s"], rows.loc["torch", "peak_bytes"]) == ([0.1, 0.3], 100)
    assert rows.loc["mucudnn", "failure"] == "no memory"
    with open_folder(tmp_path, header_of(["net"], [8], *SIZES)) as folder:
        assert is_known(folder, SETTING)
        assert not is_known(folder, replace(SETTING, memory_format=MemoryFormat.CHANNELS_LAST))


def test_other_batch_sizes_are_refused(tmp_path: Path) -> None:
    with open_folder(tmp_path, header_of(["net"], [8], *SIZES)):
        pass
    with (
        pytest.raises(InvalidInputError, match=r"batch_sizes was \[8\] and is \[16\]"),
        open_folder(tmp_path, header_of(["net"], [16], *SIZES)),
    ):
        pass
