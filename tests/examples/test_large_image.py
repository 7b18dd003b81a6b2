"""The example of a large picture: small here, it stays within the budget, and gives the values of the whole model."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "large_image.py"


def test_the_picture_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec = importlib.util.spec_from_file_location("large_image", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main(pixels=64, budget="8MiB", steps=2)
    told = capsys.readouterr().out
    assert " within a budget of 8 MiB" in told
    difference = re.search(r"largest difference from the whole model: (\S+)", told)
    assert difference is not None
    assert float(difference[1]) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("example", ["first_steps", "large_image", "digits_ddp", "train_within", "raster"])
def test_every_example_has_help(example: str) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE.with_name(f"{example}.py"), "--help"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
