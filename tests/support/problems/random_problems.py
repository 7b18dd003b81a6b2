"""Random calls of random algorithms, each from a seed of its own."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from mucudnn.kernels.compiled.library import why_not
from mucudnn.kernels.compiled.stages import Entries
from mucudnn.kernels.contract.algorithm import Algorithm, fuses
from mucudnn.kernels.contract.epilogue import ACTIVATIONS
from mucudnn.kernels.registry import algorithms
from mucudnn.kernels.torch_ops.native import sees_only_padding
from mucudnn.testing.checks import check_epilogue, check_result, threads
from mucudnn.testing.geometries import random_micro_batches, random_problem
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation


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
    problem = _problem(random, algorithm)
    return Case(
        algorithm,
        problem,
        random_micro_batches(random, algorithm, problem),
        threads=random.choice((1, 1, 1, 2, 3)),
        has_bias=problem.operation is Operation.FORWARD and random.random() < 0.5,
        activation=random.choice((None, *ACTIVATIONS)),
        adds=random.random() < 0.5,
    )


def _is_built(algorithm: Algorithm) -> bool:
    anything = ConvProblem(Operation.FORWARD, 8, 9, 9, 8, 3, 3)
    return not isinstance(algorithm, Entries) or why_not(anything, algorithm.entry) is None


def _problem(random: Random, algorithm: Algorithm) -> ConvProblem:
    while True:
        problem = random_problem(random)
        if problem is None:
            continue
        in_onednn = algorithm.name == "native" and problem.memory_format is MemoryFormat.CHANNELS_LAST
        if in_onednn and sees_only_padding(problem):  # torch's own, which crashes: nothing of ours would be tried
            continue
        if algorithm.supports(problem) is None:
            return problem
