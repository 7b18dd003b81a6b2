"""``python -m mucudnn.bench.suites.overhead.operator``: times mucudnn where there is nothing to gain.

The calls are those of a tiny convolution, 1x8x8x8 with 8 filters of 3x3: torch's, and those of ``mucudnn.Conv2d``:
untuned, tuned, and made to run one of our algorithms. The start is a new process up to its first tuned convolution,
with all measurements in the database.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

import mucudnn
from mucudnn.bench.contests.timing import Contestant, time_in_turns
from mucudnn.measuring.timing.timer import EVERY_ROUND, WallClock
from mucudnn.running.choices import Choices
from mucudnn.terminal.console import output
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.results import Configuration, MicroConfig

ROUNDS = 51
CALLS = 200
STARTS = 5
_FIRST_CONVOLUTION = """
import torch, mucudnn
x = torch.randn(8, 64, 28, 28)
model = mucudnn.optimize(torch.nn.Conv2d(64, 64, 3, padding=1), x, mucudnn.Config(database={!r}))
model(x)
"""


def call_overheads_s() -> dict[str, float]:
    """Seconds that a call takes beyond ``torch.nn.functional.conv2d``: medians of rounds in turns."""
    x = torch.randn(1, 8, 8, 8)
    untuned = mucudnn.Conv2d(8, 8, 3, padding=1)
    with tempfile.TemporaryDirectory() as folder:
        config = mucudnn.Config(database=Path(folder) / "measurements.sqlite")
        tuned = mucudnn.optimize(torch.nn.Conv2d(8, 8, 3, padding=1), x, config)
    calls: dict[str, Callable[[], Tensor]] = {
        "torch.nn.functional.conv2d": lambda: F.conv2d(x, untuned.weight, untuned.bias, padding=1),
        "torch.nn.Conv2d": _module_call(torch.nn.Conv2d(8, 8, 3, padding=1), x),
        "mucudnn.Conv2d, untuned": _module_call(untuned, x),
        "mucudnn.Conv2d, tuned": _module_call(tuned, x),
        "mucudnn.Conv2d, made to run implicit-gemm": _module_call(_with("implicit-gemm"), x),
    }
    rule = replace(EVERY_ROUND, max_calls=CALLS)
    times = time_in_turns([*map(Contestant, calls.values())], ROUNDS, WallClock(), rule)
    return {name: median(one) - median(times[0]) for name, one in zip(calls, times, strict=True)}


def start_s() -> float:
    """Seconds from starting Python to the first tuned convolution: the median of some processes."""
    with tempfile.TemporaryDirectory() as folder:
        program = _FIRST_CONVOLUTION.format(str(Path(folder) / "measurements.sqlite"))
        times = [_run_s(program) for _ in range(STARTS + 1)]
    return median(times[1:])  # the first one tunes


def _run_s(program: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True)
    return time.perf_counter() - start


def _module_call(module: torch.nn.Module, x: Tensor) -> Callable[[], Tensor]:
    def call() -> Tensor:
        y: Tensor = module(x)
        return y

    return call


def _with(algorithm: str) -> mucudnn.Conv2d:
    """A module that runs this algorithm undivided, tuned or not."""
    module = mucudnn.Conv2d(8, 8, 3, padding=1)
    problem = ConvProblem(Operation.FORWARD, 8, 8, 8, 8, 3, 3, padding=(1, 1))
    configuration = Configuration((MicroConfig(algorithm, 1),), time_s=0.0, workspace_bytes=0)
    module.choices = Choices.of({problem: {1: configuration}})
    return module


def main() -> None:
    console = output()
    for name, seconds in call_overheads_s().items():
        console.print(f"{name}: {seconds * 1e6:+.1f} us over torch.nn.functional.conv2d")
    console.print(f"new process to first tuned convolution: {start_s():.2f} s")


if __name__ == "__main__":
    main()
