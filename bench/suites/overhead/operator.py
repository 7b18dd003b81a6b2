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
from functools import partial
from pathlib import Path
from statistics import median

import torch
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
    """Return the seconds that a call takes beyond ``torch.nn.functional.conv2d``: medians of rounds in turns."""
    x = torch.randn(1, 8, 8, 8)
    untuned = mucudnn.Conv2d(8, 8, 3, padding=1)
    with tempfile.TemporaryDirectory() as folder:
        config = mucudnn.Config(database=Path(folder) / "measurements.sqlite")
        tuned = mucudnn.optimize(torch.nn.Conv2d(8, 8, 3, padding=1), x, config)
    theirs, made = torch.nn.Conv2d(8, 8, 3, padding=1), _made_to_run("implicit-gemm")
    calls: dict[str, Callable[[], object]] = {
        "torch.nn.functional.conv2d": lambda: F.conv2d(x, untuned.weight, untuned.bias, padding=1),
        "torch.nn.Conv2d": partial(theirs, x),
        "mucudnn.Conv2d, untuned": partial(untuned, x),
        "mucudnn.Conv2d, tuned": partial(tuned, x),
        "mucudnn.Conv2d, made to run implicit-gemm": partial(made, x),
    }
    rule = replace(EVERY_ROUND, max_calls=CALLS)
    times = time_in_turns([*map(Contestant, calls.values())], ROUNDS, WallClock(), rule)
    return {name: median(one) - median(times[0]) for name, one in zip(calls, times, strict=True)}


def _made_to_run(algorithm: str) -> mucudnn.Conv2d:
    """Return a module that runs this algorithm undivided."""
    module = mucudnn.Conv2d(8, 8, 3, padding=1)
    problem = ConvProblem(Operation.FORWARD, 8, 8, 8, 8, 3, 3, padding=(1, 1))
    configuration = Configuration((MicroConfig(algorithm, 1),), time_s=0.0, workspace_bytes=0)
    module.choices = Choices.of({problem: {1: configuration}})
    return module


def start_s() -> float:
    """Return the seconds from starting Python to the first tuned convolution: the median of some processes."""
    with tempfile.TemporaryDirectory() as folder:
        program = _FIRST_CONVOLUTION.format(str(Path(folder) / "measurements.sqlite"))
        times = []
        for _ in range(STARTS + 1):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", program], check=True)
            times.append(time.perf_counter() - start)
    return median(times[1:])  # the first one tunes


def main() -> None:
    console = output()
    for name, seconds in call_overheads_s().items():
        console.print(f"{name}: {seconds * 1e6:+.1f} us over torch.nn.functional.conv2d")
    console.print(f"new process to first tuned convolution: {start_s():.2f} s")


if __name__ == "__main__":
    main()
