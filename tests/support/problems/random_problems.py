"""Random calls of random algorithms, each from a seed of its own."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch

from mucudnn.kernels.contract.algorithm import Algorithm
from mucudnn.kernels.contract.reference import reference, relative_l2_error
from mucudnn.kernels.registry import algorithms
from mucudnn.kernels.torch_ops.native import sees_only_padding
from mucudnn.testing.guarded_call import Call
from mucudnn.testing.random_problems import random_micro_batches, random_problem
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation


@dataclass(frozen=True)
class Case:
    """One call of one algorithm: a problem, slices of the mini-batch, a thread count, and whether there is a bias."""

    algorithm: Algorithm
    problem: ConvProblem
    micro_batches: tuple[int, ...]
    threads: int
    has_bias: bool

    def error(self) -> float:
        """Of the result against float64; fails where anything is written, or allocated, that is not declared."""
        torch.set_num_threads(self.threads)
        call = Call(self.problem, sum(self.micro_batches))
        bias = call.memory.vector(self.problem, self.problem.k).normal_() if self.has_bias else None
        expected = reference(self.problem, call.x, call.w, call.y, bias)
        actual = call.run(self.algorithm, self.micro_batches, bias)
        assert call.undeclared_bytes <= 0, f"{call.undeclared_bytes} bytes more than declared were allocated"
        return relative_l2_error(actual, expected)


def case(seed: int) -> Case:
    """The same for ever, as long as there are the same algorithms."""
    random = Random(seed)
    algorithm = random.choice(algorithms())
    problem = _problem(random, algorithm)
    return Case(
        algorithm,
        problem,
        random_micro_batches(random, algorithm, problem),
        threads=random.choice((1, 1, 1, 2, 3)),
        has_bias=problem.operation is Operation.FORWARD and random.random() < 0.5,
    )


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
