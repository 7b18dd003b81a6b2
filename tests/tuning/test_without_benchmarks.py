"""Installed tuning needs no benchmark, no report and no command: it works in a copy of the package without them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from shutil import copytree, ignore_patterns, rmtree

import pytest

import mucudnn

NOT_NEEDED = ("bench", "cli", "terminal")
TUNING = """
import torch, mucudnn

torch.set_num_threads(1)
config = mucudnn.Config(database="measurements.sqlite", algorithms="gemm")
problem = mucudnn.ConvProblem("forward", c=2, h=4, w=4, k=2, r=3, s=3, padding=(1, 1))
print(mucudnn.__file__)
print(len(mucudnn.tune(problem, 2, config).problems))
model = mucudnn.optimize(torch.nn.Conv2d(2, 2, 3, padding=1), torch.randn(2, 2, 4, 4), config)
model(torch.randn(2, 2, 4, 4)).sum().backward()
print(type(model).__module__)
"""


def tuned_without(folders: Iterable[str], place: Path) -> subprocess.CompletedProcess[str]:
    """Tune in a new process, with a copy of the package that lacks these folders."""
    package = copytree(Path(mucudnn.__file__).parent, place / "mucudnn", ignore=ignore_patterns("__pycache__"))
    for folder in folders:
        rmtree(package / folder)
    return subprocess.run([sys.executable, "-c", TUNING], cwd=place, capture_output=True, text=True, check=False)


def test_tuning_needs_no_benchmark_and_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    done = tuned_without(NOT_NEEDED, tmp_path)
    assert done.returncode == 0, done.stderr
    file, problems, module = done.stdout.split()
    assert Path(file).is_relative_to(tmp_path), "another copy was tuned with"
    assert (problems, module) == ("1", "mucudnn.modules.conv2d")


def test_what_tuning_needs_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above would see a folder that tuning came to need."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    done = tuned_without([*NOT_NEEDED, "measuring"], tmp_path)
    assert done.returncode == 1
    assert "No module named 'mucudnn.measuring" in done.stderr
