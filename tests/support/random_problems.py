"""Random small problems with everything that can go wrong at an edge, each from a seed of its own."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from support.guarded import Call

from mucudnn.kernels.contract.algorithm import Algorithm
from mucudnn.kernels.contract.reference import reference, relative_l2_error
from mucudnn.kernels.registry import algorithms
from mucudnn.kernels.torch_ops.native import sees_only_padding
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import ITEM_BYTES, ConvProblem, MemoryFormat, Operation, Pair

# Sizes of one, primes, and neighbours of the vectors and tiles.
_CHANNELS = (1, 1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 23, 31, 32, 33, 37)
_PIXELS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 14, 15, 16, 17, 19, 23, 29, 33)
_FILTERS = (1, 1, 2, 3, 3, 3, 3, 4, 5, 5, 7)
_STEPS = (1, 1, 1, 1, 2, 2, 3, 5)
_PADDINGS = (0, 0, 1, 1, 2, 2, 3, 5, 9)
_MOST_MULTIPLICATIONS = 250_000  # of one case: thousands of them take minutes


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
        _micro_batches(random, algorithm, problem),
        threads=random.choice((1, 1, 1, 2, 3)),
        has_bias=problem.operation is Operation.FORWARD and random.random() < 0.5,
    )


def _problem(random: Random, algorithm: Algorithm) -> ConvProblem:
    while True:
        try:
            problem = _any_problem(random)
        except InvalidInputError:  # the filter is larger than the padded map
            continue
        in_onednn = algorithm.name == "native" and problem.memory_format is MemoryFormat.CHANNELS_LAST
        if in_onednn and sees_only_padding(problem):  # torch's own, which crashes: nothing of ours would be tried
            continue
        if problem.flops(1) <= 2 * _MOST_MULTIPLICATIONS and algorithm.supports(problem) is None:
            return problem


def _any_problem(random: Random) -> ConvProblem:
    def pair(values: tuple[int, ...]) -> Pair:
        first = random.choice(values)
        return (first, first) if random.random() < 0.5 else (first, random.choice(values))

    groups = random.choice((1, 1, 1, 2, 3, 5))
    c, k = random.choice(_CHANNELS), random.choice(_CHANNELS)
    if random.random() < 0.1:  # depthwise
        groups, c, k = c, 1, random.choice((1, 2))
    r, s = pair(_FILTERS)
    plain = r == s and random.random() < 0.6  # so that Winograd has its share
    steps = (1,) if plain else _STEPS
    return ConvProblem(
        random.choice(list(Operation)),
        c * groups,
        *pair(_PIXELS),
        k * groups,
        r,
        s,
        stride=pair(steps),
        padding=pair(_PADDINGS),
        dilation=pair(steps),
        groups=groups,
        dtype=random.choice(("float32", "float32", "float32", *ITEM_BYTES)),
        memory_format=random.choice(list(MemoryFormat)),
    )


def _micro_batches(random: Random, algorithm: Algorithm, problem: ConvProblem) -> tuple[int, ...]:
    """Any split into slices that the algorithm supports, or one sample where it supports no other."""
    sizes = tuple(random.randint(1, 3) for _ in range(random.randint(1, 3)))
    supported = tuple(n for n in sizes if algorithm.supports_micro_batch(problem, n) is None)
    return supported or (next(n for n in range(1, 64) if algorithm.supports_micro_batch(problem, n) is None),)
