"""The example of learners: with data-parallel training beside them, they begin to learn synthetic images."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.places import EXAMPLES
from support.ranks.launching import torchrun

pytestmark = pytest.mark.slow


def test_two_learners_learn_as_data_parallel_training_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUCUDNN_DATABASE", str(tmp_path / "all.sqlite"))
    monkeypatch.setenv("MUCUDNN_ALGORITHMS", "gemm")
    done = torchrun(EXAMPLES / "learners.py", "--data", "synthetic", "--epochs", 1, ranks=2)
    assert done.returncode == 0, done.stderr
    assert "synthetic, 2 ranks of 16 samples" in done.stdout
    epochs = re.findall(r"^ +(\d) +([\d.]+) +([\d.]+)$", done.stdout, re.MULTILINE)
    assert [number for number, *_ in epochs] == ["1"]
    assert all(float(accuracy) > 20 for accuracy in epochs[0][1:]), "ten classes"
