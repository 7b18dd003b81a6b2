"""Tuning needs no benchmark, no report and no command: it works where these cannot be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TUNING = """
import sys

class Refusing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if any(name == refused or name.startswith(refused + ".") for refused in sys.argv[1:]):
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Refusing)
import torch, mucudnn

torch.set_num_threads(1)
config = mucudnn.Config(database="measurements.sqlite", algorithms="gemm")
problem = mucudnn.ConvProblem("forward", c=2, h=4, w=4, k=2, r=3, s=3, padding=(1, 1))
print(len(mucudnn.tune(problem, 2, config).problems))
model = mucudnn.optimize(torch.nn.Conv2d(2, 2, 3, padding=1), torch.randn(2, 2, 4, 4), config)
model(torch.randn(2, 2, 4, 4)).sum().backward()
print(type(model).__module__)
"""


def tuned_without(place: Path, *packages: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", TUNING, *packages]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)


def test_tuning_needs_no_benchmark_and_no_command(tmp_path: Path) -> None:
    done = tuned_without(tmp_path, "mucudnn.bench", "mucudnn.cli", "mucudnn.terminal")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "mucudnn.modules.conv2d"]


def test_what_tuning_needs_is_missed(tmp_path: Path) -> None:
    """So the test above would see a package that tuning came to need."""
    done = tuned_without(tmp_path, "mucudnn.measuring")
    assert done.returncode == 1
    assert "No module named 'mucudnn.measuring" in done.stderr
