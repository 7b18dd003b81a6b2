"""``mucudnn tune --memory-budget``: the curve of a training step, and the largest batch within the budget."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.command_line import TUNE, fail, invoke, one_layer

MODEL = """
from torch import nn

def net():
    blocks = (nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Sigmoid(), nn.Tanh(), nn.Dropout()) for _ in range(3))
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model_of_steps.py"
    path.write_text(MODEL)
    return path


def test_the_curve_of_a_step_and_the_largest_batch_are_shown_written_and_drawn(model: Path, tmp_path: Path) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "curve.svg"
    result = invoke(
        *("tune", f"{model}:net", "--input", "3x48x48", *TUNE, "--database", tmp_path / "m.sqlite"),
        *("--memory-budget", "4MiB", "--curve", "--json", out, "--picture", picture),
    )
    assert result.exit_code == 0, result.output
    steps = json.loads(out.read_text())["steps"]
    budgets = [point["budget_bytes"] for point in steps["curve"]]
    assert len(budgets) > 1
    assert budgets == sorted(budgets)
    largest = steps["largest_batch"]
    assert largest["batch_size"] > 0
    assert largest["peak_bytes"] <= largest["budget_bytes"] == 2**22
    assert "training step by memory budget" in result.stdout
    assert f"largest batch within 4 MiB: {largest['batch_size']}, peak" in result.stdout
    text = ElementTree.tostring(ElementTree.parse(picture).getroot(), encoding="unicode")
    assert "training step" in text
    assert "convolutions, by workspace" in text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--picture", "curve.svg"), "--picture draws curves: give --curve, too"),
        (("--memory-budget", "1MiB", "--stored"), "--memory-budget runs training steps in one process: leave out"),
        (("--memory-budget", "1MiB"), "has no model to run"),
    ],
)
def test_what_has_no_steps_says_so(tmp_path: Path, options: tuple[str, ...], expected: str) -> None:
    assert expected in fail("tune", one_layer(tmp_path), *TUNE, "--database", tmp_path / "m.sqlite", *options)
