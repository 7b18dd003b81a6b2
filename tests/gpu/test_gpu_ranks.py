"""Data-parallel training on GPUs: NCCL between two of them where there are two, else one rank alone.

Not run on a GPU yet.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.command_line import invoke

from mucudnn.words.communication import Communication

TRAINED = ("bench", "data-parallel", "support.models_by_name:trained", "--input", "3x9x9", "--device", "cuda")
QUICK = ("--batch", "2", "--rounds", "2", "--time-limit", "200ms")


@pytest.mark.gpu
@pytest.mark.parametrize("communication", list(Communication))
def test_ranks_are_equal_and_steps_are_split(communication: Communication, tmp_path: Path) -> None:
    ranks, out = min(2, torch.cuda.device_count()), tmp_path / "out.json"
    result = invoke(*TRAINED, *QUICK, "--ranks", ranks, "--communication", communication.value, "--json", out)
    assert result.exit_code == 0, (result.output, result.exception)
    for step in json.loads(out.read_text())["steps"]:
        assert (step["ranks"], step["equal"]) == (ranks, step["compared"])
        assert min(step[name] for name in ("forward_convolutions_s", "backward_convolutions_s", "other_s")) > 0
