"""Random problems x algorithms x splits x thread counts, between guard zones, against float64.

A seed that once failed is kept in ``data/failed_problems.txt``, and always runs first. One alone:
``MUCUDNN_FUZZ_SEED=123 pytest tests/kernels/test_fuzz_problems.py``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from random import Random

import pytest
from support.effort import how_many
from support.places import DATA

from mucudnn.core.config import DEFAULT_MAX_RELATIVE_ERROR
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.kernels.algorithm import ACTIVATIONS, Algorithm, fuses
from mucudnn.kernels.compiled.algorithms import CompiledAlgorithm
from mucudnn.kernels.compiled.library import why_not
from mucudnn.kernels.frames import Frames
from mucudnn.kernels.registry import algorithms
from mucudnn.kernels.torch_ops.native import sees_only_padding
from mucudnn.testing.checks import check_epilogue, check_result, threads
from mucudnn.testing.contract import random_micro_batches, random_problem


@dataclass(frozen=True)
class Case:
    """One call of one algorithm: a problem, slices of the mini-batch, a thread count, and whether there is a bias.

    activation: of the epilogue, where the algorithm computes them; ``adds``: whether it adds, too.
    """

    algorithm: Algorithm
    problem: ConvProblem
    micro_batches: tuple[int, ...]
    threads: int
    has_bias: bool
    activation: str | None
    adds: bool

    def check(self, bound: float) -> None:
        """Require the result, within this relative error, between guard zones and in the declared bytes."""
        with threads(self.threads):
            check_result(self.algorithm, self.problem, self.micro_batches, bound, has_bias=self.has_bias)
            if fuses(self.algorithm, self.problem):
                call = self.algorithm, self.problem, self.micro_batches
                check_epilogue(*call, bound, self.activation, adds=self.adds)


def case(seed: int) -> Case:
    """The same for ever, as long as there are the same algorithms."""
    random = Random(seed)
    algorithm = random.choice([one for one in algorithms() if _is_built(one)])
    while not (sizes := random_micro_batches(random, algorithm, problem := _problem(random, algorithm))):
        pass
    return Case(
        algorithm,
        problem,
        sizes,
        threads=random.choice((1, 1, 1, 2, 3)),
        has_bias=problem.operation is Operation.FORWARD and random.random() < 0.5,
        activation=random.choice((None, *ACTIVATIONS)),
        adds=random.random() < 0.5,
    )


def _is_built(algorithm: Algorithm) -> bool:
    anything = ConvProblem(Operation.FORWARD, 8, 9, 9, 8, 3, 3)
    of_images = algorithm.inner if isinstance(algorithm, Frames) else algorithm
    return not isinstance(of_images, CompiledAlgorithm) or why_not(anything, of_images.entry) is None


def _problem(random: Random, algorithm: Algorithm) -> ConvProblem:
    while True:
        problem = random_problem(random, volumes=algorithm.takes_volumes)
        if problem is None:
            continue
        in_onednn = algorithm.name == "native" and problem.memory_format is MemoryFormat.CHANNELS_LAST
        if in_onednn and sees_only_padding(problem):  # torch's own, which crashes: nothing of ours would be tried
            continue
        if algorithm.supports(problem) is None:
            return problem


KEPT = DATA / "failed_problems.txt"
LOOSER = {"winograd-6x6": 10.0}  # as their points are; the default error bound bars them
CHUNK = 100  # cases of one test: a failing one names its seed


def seeds() -> list[list[int]]:
    """Those that failed once, then as many as are asked for; or the one of ``MUCUDNN_FUZZ_SEED``."""
    if one := os.environ.get("MUCUDNN_FUZZ_SEED"):
        return [[int(one)]]
    first, count = int(os.environ.get("MUCUDNN_FUZZ_FIRST", "0")), how_many(200, 10_000)
    kept = [int(line.split()[0]) for line in KEPT.read_text().splitlines() if line and not line.startswith("#")]
    drawn = range(first, first + count)
    return [kept, *(list(drawn[start : start + CHUNK]) for start in range(0, count, CHUNK))]


def why_wrong(tried: Case) -> str | None:
    """``None`` if the case is right."""
    bound = (
        LOOSER.get(tried.algorithm.name.removeprefix("frames-").removeprefix("rows-"), 1.0)
        * DEFAULT_MAX_RELATIVE_ERROR[tried.problem.dtype]
    )
    try:
        tried.check(bound)
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return None


@pytest.mark.fuzz
@pytest.mark.parametrize("chunk", seeds(), ids=lambda chunk: f"{chunk[0]}-{chunk[-1]}" if chunk else "kept")
def test_every_algorithm_computes_every_problem_within_its_buffers(chunk: list[int]) -> None:
    failed = {}
    for seed in chunk:
        if reason := why_wrong(tried := case(seed)):
            failed[seed] = f"{tried}: {reason}"
    lines = [f"seed {seed}: {what}" for seed, what in failed.items()]
    assert not failed, "\n".join([*lines, f"again: MUCUDNN_FUZZ_SEED={min(failed)} pytest -k test_fuzz_problems"])
