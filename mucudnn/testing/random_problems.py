"""Random small problems with everything that can go wrong at an edge."""

from __future__ import annotations

from random import Random

from mucudnn.kernels.contract.algorithm import Algorithm
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import ITEM_BYTES, ConvProblem, MemoryFormat, Operation, Pair

# Sizes of one, primes, and neighbours of the vectors and tiles.
_CHANNELS = (1, 1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 23, 31, 32, 33, 37)
_PIXELS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 14, 15, 16, 17, 19, 23, 29, 33)
_FILTERS = (1, 1, 2, 3, 3, 3, 3, 4, 5, 5, 7)
_STEPS = (1, 1, 1, 1, 2, 2, 3, 5)
_PADDINGS = (0, 0, 1, 1, 2, 2, 3, 5, 9)
_MOST_MULTIPLICATIONS = 250_000  # of one problem: thousands of them take minutes


def random_problem(random: Random) -> ConvProblem | None:
    """Draw a problem; ``None`` where the draw is no convolution, or too large to try thousands like it."""
    try:
        problem = _any_problem(random)
    except InvalidInputError:  # the filter is larger than the padded map
        return None
    return problem if problem.flops(1) <= 2 * _MOST_MULTIPLICATIONS else None


def random_micro_batches(random: Random, algorithm: Algorithm, problem: ConvProblem) -> tuple[int, ...]:
    """Draw a split into slices that the algorithm supports.

    Where it supports none of those drawn, there is one: undivided, or the smallest slice that it supports.
    """
    sizes = tuple(random.randint(1, 3) for _ in range(random.randint(1, 3)))
    supported = tuple(n for n in sizes if algorithm.supports_micro_batch(problem, n) is None)
    if supported:
        return supported
    if algorithm.can_run_undivided(problem):
        return sizes[:1]
    return (next(n for n in range(1, 64) if algorithm.supports_micro_batch(problem, n) is None),)


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
