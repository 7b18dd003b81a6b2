"""Small convolution problems with the edge cases of all algorithms: some by name, and random ones."""

from __future__ import annotations

from random import Random

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import ITEM_BYTES, ConvProblem, MemoryFormat, Operation, Pair
from mucudnn.kernels.contract.algorithm import Algorithm

# name: (arguments of ConvProblem, mini-batch, micro-batch); 3 into 7 and 2 into 3 leave a smaller last micro-batch
_GEOMETRIES: dict[str, tuple[dict[str, object], int, int]] = {
    "same-3x3": ({"c": 5, "h": 9, "w": 12, "k": 6, "r": 3, "s": 3, "padding": (1, 1)}, 7, 3),
    "valid-3x3": ({"c": 16, "h": 8, "w": 8, "k": 17, "r": 3, "s": 3}, 2, 2),
    "one-sample": ({"c": 3, "h": 7, "w": 11, "k": 4, "r": 3, "s": 3, "padding": (1, 1)}, 1, 1),
    "pointwise": ({"c": 7, "h": 5, "w": 6, "k": 9, "r": 1, "s": 1}, 3, 2),
    "pointwise-stride": ({"c": 4, "h": 7, "w": 7, "k": 5, "r": 1, "s": 1, "stride": (2, 2)}, 3, 2),
    "same-5x5": ({"c": 3, "h": 11, "w": 13, "k": 5, "r": 5, "s": 5, "padding": (2, 2)}, 3, 2),
    "asymmetric": ({"c": 4, "h": 12, "w": 5, "k": 3, "r": 1, "s": 5, "stride": (1, 2), "padding": (0, 3)}, 3, 2),
    "wide-padding": ({"c": 3, "h": 6, "w": 5, "k": 4, "r": 3, "s": 3, "padding": (4, 3)}, 3, 2),
    "stride": ({"c": 3, "h": 12, "w": 11, "k": 4, "r": 3, "s": 3, "stride": (2, 3), "padding": (1, 1)}, 3, 2),
    "square-stride": ({"c": 5, "h": 13, "w": 10, "k": 6, "r": 3, "s": 3, "stride": (2, 2), "padding": (1, 0)}, 3, 2),
    "dilation": ({"c": 3, "h": 12, "w": 11, "k": 4, "r": 3, "s": 3, "dilation": (2, 3), "padding": (2, 0)}, 3, 2),
    "groups": ({"c": 6, "h": 7, "w": 8, "k": 10, "r": 3, "s": 3, "padding": (1, 1), "groups": 2}, 3, 2),
    "depthwise": ({"c": 8, "h": 9, "w": 7, "k": 8, "r": 3, "s": 3, "padding": (1, 1), "groups": 8}, 3, 2),
    "one-channel": ({"c": 1, "h": 8, "w": 10, "k": 1, "r": 3, "s": 3, "padding": (1, 1)}, 3, 2),
    "whole-image": ({"c": 5, "h": 4, "w": 3, "k": 6, "r": 4, "s": 3}, 3, 2),
    "tiles": ({"c": 2, "h": 37, "w": 41, "k": 3, "r": 3, "s": 5, "padding": (1, 2)}, 3, 2),
}
GEOMETRIES = tuple(_GEOMETRIES)
ONE_OF_EACH_KIND = ("same-3x3", "pointwise", "groups", "stride")


def geometry(name: str, operation: Operation, **changes: object) -> tuple[ConvProblem, int, int]:
    """Return a problem of this name with its mini-batch and micro-batch sizes.

    changes: other arguments of ``ConvProblem``, such as ``dtype``.
    """
    arguments, batch_size, micro_batch_size = _GEOMETRIES[name]
    return ConvProblem(operation, **(arguments | changes)), batch_size, micro_batch_size  # type: ignore[arg-type]


# Random problems have sizes of one, primes, and sizes near those of vectors and tiles.
_CHANNELS = (1, 1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 23, 31, 32, 33, 37)
_PIXELS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 14, 15, 16, 17, 19, 23, 29, 33)
_FILTERS = (1, 1, 2, 3, 3, 3, 3, 4, 5, 5, 7)
_STEPS = (1, 1, 1, 1, 2, 2, 3, 5)
_PADDINGS = (0, 0, 1, 1, 2, 2, 3, 5, 9)
_MOST_MULTIPLICATIONS = 250_000  # of one problem, so that thousands of problems take minutes


def random_problem(random: Random) -> ConvProblem | None:
    """Draw a random problem. Returns None if the draw is not a valid convolution or too large."""
    try:
        problem = _any_problem(random)
    except InvalidInputError:  # the filter is larger than the padded map
        return None
    return problem if problem.flops(1) <= 2 * _MOST_MULTIPLICATIONS else None


def random_micro_batches(random: Random, algorithm: Algorithm, problem: ConvProblem) -> tuple[int, ...]:
    """Draw a random division of a mini-batch into micro-batches that the algorithm supports, and return their sizes.

    If no draw is supported, return one size: the undivided batch, or the smallest size that the algorithm supports.
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
    plain = r == s and random.random() < 0.6  # so that Winograd supports enough of them
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
