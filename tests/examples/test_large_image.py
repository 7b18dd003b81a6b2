"""The example of a large picture: small here, it stays within the budget, and gives the values of the whole model."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from support.places import EXAMPLES


def test_the_picture_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    example = runpy.run_path(str(EXAMPLES / "large_image.py"))
    example["main"](pixels=64, budget="8MiB", steps=2)
    told = capsys.readouterr().out
    assert " within a budget of 8 MiB" in told
    difference = re.search(r"largest difference from the whole model: (\S+)", told)
    assert difference is not None
    assert float(difference[1]) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("example", ["first_steps", "large_image", "digits_ddp", "train_within", "raster"])
def test_every_example_has_help(example: str) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{example}.py", "--help"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
