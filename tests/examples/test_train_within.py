"""The example of training within a budget: small here, its step stays within what was asked for, and it learns."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from support.places import EXAMPLES


def test_a_step_stays_within_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MUCUDNN_DATABASE", str(tmp_path / "all.sqlite"))
    example = runpy.run_path(str(EXAMPLES / "train_within.py"))
    example["main"](share=0.6, size=8, steps=20, limit="10ms")
    told = capsys.readouterr().out
    budget = re.search(r"steps within (\S+) MiB: peak", told)
    peaks = re.search(r"peak of a step: (\S+) MiB without a budget, (\S+) MiB within", told)
    first, last = re.findall(r"loss of step \d+: (\S+)", told)
    assert budget is not None
    assert peaks is not None
    assert float(peaks[2]) <= float(budget[1]) < float(peaks[1])
    assert float(last) < float(first)
