"""The contract suite: checks of every promise, over operations, geometries, memory formats, dtypes and splits.

Small convolution problems with the edge cases of all algorithms: some by name, and random ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice, product
from random import Random
from typing import Any

import torch

from mucudnn.core.config import DEFAULT_MAX_RELATIVE_ERROR
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import ITEM_BYTES, ConvProblem, MemoryFormat, Operation, Sizes
from mucudnn.kernels.algorithm import ACTIVATIONS, Algorithm, fuses, fuses_moments, fuses_normalization, why_unsupported
from mucudnn.kernels.registry import algorithms, require_algorithm
from mucudnn.testing.checks import (
    IMAGE,
    check_added,
    check_determinism,
    check_epilogue,
    check_float32_sums,
    check_locality,
    check_moments,
    check_normalization,
    check_nothing_is_hidden,
    check_result,
    check_splits,
    check_workspace,
    split,
    threads,
)

# Problems

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
    "patches": ({"c": 6, "h": 9, "w": 8, "k": 8, "r": 4, "s": 2, "stride": (4, 2), "groups": 2}, 3, 2),
}
_VOLUMES: dict[str, dict[str, object]] = {
    "volume": {"c": 3, "d": 4, "h": 9, "w": 7, "k": 5, "t": 3, "r": 3, "s": 3, "padding": 1},
    "volume-of-vectors": {"c": 16, "d": 3, "h": 12, "w": 12, "k": 16, "t": 3, "r": 3, "s": 3, "padding": 1},
    "volume-stride": {"c": 4, "d": 5, "h": 8, "w": 7, "k": 6, "t": 3, "r": 3, "s": 3, "stride": 2, "padding": 1},
    "volume-dilation": {"c": 2, "d": 7, "h": 6, "w": 5, "k": 3, "t": 2, "r": 3, "s": 3, "dilation": (3, 1, 1)},
    "volume-groups": {"c": 4, "d": 3, "h": 6, "w": 5, "k": 6, "t": 2, "r": 3, "s": 3, "padding": 1, "groups": 2},
    "volume-5x5": {"c": 3, "d": 3, "h": 8, "w": 9, "k": 4, "t": 2, "r": 5, "s": 5, "padding": (1, 2, 2)},
    "volume-5x5-stride": {"c": 3, "d": 2, "h": 9, "w": 8, "k": 4, "t": 2, "r": 5, "s": 5, "stride": (1, 2, 2)},
    "long-volume": {"c": 2, "d": 20, "h": 4, "w": 5, "k": 3, "t": 3, "r": 3, "s": 3, "padding": 1},
    "rows-of-frames": {"c": 4, "d": 11, "h": 3, "w": 9, "k": 5, "t": 3, "r": 2, "s": 3, "padding": 1},
    "one-frame": {"c": 5, "d": 1, "h": 8, "w": 9, "k": 4, "t": 3, "r": 3, "s": 3, "padding": 1},
    "rows-of-frames-stride": {"c": 3, "d": 9, "h": 2, "w": 8, "k": 4, "t": 3, "r": 2, "s": 3, "stride": (2, 1, 2)},
    "only-padding": {"c": 2, "d": 2, "h": 5, "w": 6, "k": 3, "t": 2, "r": 3, "s": 3, "padding": (3, 0, 1)},
    "rows-of-frames-5x5": {"c": 3, "d": 8, "h": 3, "w": 9, "k": 4, "t": 5, "r": 2, "s": 5, "padding": (2, 1, 2)},
    "pointwise-volume": {"c": 6, "d": 3, "h": 4, "w": 5, "k": 9, "t": 1, "r": 1, "s": 1},
    "rows-of-frames-5x5-stride": {"c": 2, "d": 9, "h": 3, "w": 8, "k": 4, "t": 5, "r": 1, "s": 5, "stride": (2, 1, 2)},
    "patches-of-volume": {"c": 3, "d": 4, "h": 6, "w": 9, "k": 5, "t": 2, "r": 3, "s": 4, "stride": (2, 3, 4)},
    "one-patch": {"c": 4, "d": 2, "h": 3, "w": 3, "k": 6, "t": 2, "r": 3, "s": 3, "stride": (2, 3, 3), "groups": 2},
}
GEOMETRIES, VOLUMES = tuple(_GEOMETRIES), tuple(_VOLUMES)
ONE_OF_EACH_KIND = ("same-3x3", "pointwise", "groups", "stride")
_GEOMETRIES |= {name: (arguments, 3, 2) for name, arguments in _VOLUMES.items()}


def geometry(name: str, operation: Operation, **changes: object) -> tuple[ConvProblem, int, int]:
    """Return a problem of this name with its mini-batch and micro-batch sizes.

    changes: other arguments of ``ConvProblem``, such as ``dtype``.
    """
    arguments, batch_size, micro_batch_size = _GEOMETRIES[name]
    return ConvProblem(operation, **(arguments | changes)), batch_size, micro_batch_size  # type: ignore[arg-type]


# Random problems have sizes of one, primes, and sizes near those of vectors and tiles.
_CHANNELS = (1, 1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 23, 31, 32, 33, 37)
_FRAMES = (1, 2, 3, 3, 4, 5, 7)
_PIXELS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 14, 15, 16, 17, 19, 23, 29, 33)
_FILTERS = (1, 1, 2, 3, 3, 3, 3, 4, 5, 5, 7)
_STEPS = (1, 1, 1, 1, 2, 2, 3, 5)
_PADDINGS = (0, 0, 1, 1, 2, 2, 3, 5, 9)
_MOST_MULTIPLICATIONS = 250_000  # of one problem, so that thousands of problems take minutes


def random_problem(random: Random, *, volumes: bool = False) -> ConvProblem | None:
    """Draw a random problem. Returns None if the draw is not a valid convolution or too large.

    volumes: whether to draw volumes and patches, too.
    """

    def pair(values: tuple[int, ...]) -> Sizes:
        first = random.choice(values)
        return (first, first) if random.random() < 0.5 else (first, random.choice(values))

    groups = random.choice((1, 1, 1, 2, 3, 5))
    c, k = random.choice(_CHANNELS), random.choice(_CHANNELS)
    if random.random() < 0.1:  # depthwise
        groups, c, k = c, 1, random.choice((1, 2))
    r, s = pair(_FILTERS)
    plain = r == s and random.random() < 0.6  # so that Winograd supports enough of them
    steps = (1,) if plain else _STEPS
    operation, extent = random.choice(list(Operation)), pair(_PIXELS)
    stride, padding, dilation = pair(steps), pair(_PADDINGS), pair(steps)
    dtype, memory_format = random.choice(("float32", "float32", "float32", *ITEM_BYTES)), random.choice([*MemoryFormat])
    d = t = 0
    if volumes and random.random() < 0.5:
        d, t = random.choice(_FRAMES), random.choice(_FRAMES[:4])
        stride = (random.choice(_STEPS), *stride)
        padding = (random.choice(_PADDINGS), *padding)
        dilation = (random.choice(_STEPS), *dilation)
        if random.random() < 0.4:  # rows before frames
            (d, t), r, extent = (extent[0], r), t, (d, extent[1])
            stride, padding, dilation = ((height, depth, width) for depth, height, width in (stride, padding, dilation))
    if volumes and random.random() < 0.2:  # patches
        stride, padding, dilation = (t, r, s)[-len(stride) :], (0,) * len(stride), (1,) * len(stride)
    steps_and_kind: Any = stride, padding, dilation, groups, dtype, memory_format, d, t
    try:
        problem = ConvProblem(operation, c * groups, extent[0], extent[1], k * groups, r, s, *steps_and_kind)
    except InvalidInputError:  # the filter is larger than the padded map
        return None
    return problem if problem.flops(1) <= 2 * _MOST_MULTIPLICATIONS else None


def random_micro_batches(random: Random, algorithm: Algorithm, problem: ConvProblem) -> tuple[int, ...]:
    """Draw a random division of a mini-batch into micro-batches that the algorithm supports, and return their sizes.

    If no draw is supported, return one size: the undivided batch, or the smallest size that the algorithm supports. If
    there is none, such as where torch's backends cannot be called by name, return an empty tuple.
    """
    sizes = tuple(random.randint(1, 3) for _ in range(random.randint(1, 3)))
    supported = tuple(n for n in sizes if algorithm.supports_micro_batch(problem, n) is None)
    if supported:
        return supported
    if algorithm.can_run_undivided(problem):
        return sizes[:1]
    return tuple(islice((n for n in range(1, 64) if algorithm.supports_micro_batch(problem, n) is None), 1))


# The suite

_OWN_SIZES = (3, 2)  # mini-batch and micro-batch of the caller's problems
_UNEVEN_THREADS = 3  # divides no size of the suite
_MOST_DRAWS = 300  # attempts to draw a random problem that the algorithm supports

_Check = Callable[[], None]
_Call = tuple[_Check, ConvProblem, Sequence[int], int]  # a check, its problem and micro-batches, and the seed


def check_algorithm(
    algorithm: Algorithm,
    *,
    problems: Iterable[ConvProblem] = (),
    max_relative_error: Mapping[str, float] | None = None,
    random_problems: int = 100,
    seed: int = 0,
    report: Callable[[str], object] | None = None,
) -> int:
    """Check that an algorithm keeps the contract of ``mucudnn.Algorithm``; return the number of checks passed.

    Each call runs on the CPU between guard zones, in exactly the bytes that ``workspace`` declares, and is compared
    with a result in float64. The checks are: results with and without a bias, for every split; bytes allocated inside;
    sums in float32; reasons of ``supports``, each a sentence of more than three words; bitwise identical runs if
    ``deterministic`` is true; the spread of NaN if ``is_local`` is true; and random calls.

    problems: additional problems, each checked on 3 samples, for an algorithm made for a certain size.
    max_relative_error: largest relative L2 error by dtype, such as ``{"float32": 1e-4}``; for other dtypes that of
    ``Config``.
    random_problems: number of random calls.
    seed: seed of the operands and the random calls.
    report: called at the end with one line that counts the problems, memory formats, dtypes and splits checked, such as
    ``print``.

    Raises ``AssertionError`` for the first broken promise, with the problem, the micro-batches, the seed, and the
    actual and allowed values; and if the algorithm supports no problem of the suite.
    """
    if algorithm not in algorithms():
        try:
            require_algorithm(algorithm)
        except InvalidInputError as error:
            raise AssertionError(str(error)) from None
    bounds = DEFAULT_MAX_RELATIVE_ERROR | dict(max_relative_error or {})
    passed: list[tuple[ConvProblem, tuple[int, ...]]] = []  # problem and micro-batches of each check
    calls = _suite(algorithm, problems, bounds, seed), _random_calls(algorithm, bounds, seed, random_problems)
    with torch.random.fork_rng(devices=[]), threads(1):  # the tensors are too small for more
        for check, problem, micro_batches, call_seed in chain(*calls):
            sizes = " + ".join(map(str, micro_batches))
            with _told_of(f"{algorithm.name}: {problem}, micro-batches {sizes}, seed {call_seed}"):
                torch.default_generator.manual_seed(call_seed)  # torch.manual_seed formats a stack for other backends
                check()
            passed.append((problem, tuple(micro_batches)))
    if report is not None:
        cuts = set(passed)
        checked = {problem for problem, _ in cuts}
        formats, dtypes = ({getattr(problem, name) for problem in checked} for name in ("memory_format", "dtype"))
        report(
            f"{algorithm.name}: {len(passed)} checks passed: {len(checked)} problems ({len(formats)} memory format(s), "
            f"{len(dtypes)} dtype(s)), each against float64 between guard zones, in {len(cuts)} cuts into micro-batches"
        )
    return len(passed)


def _suite(
    algorithm: Algorithm, problems: Iterable[ConvProblem], bounds: Mapping[str, float], seed: int
) -> Iterator[_Call]:
    """Yield the checks of all problems that the algorithm supports; check that its reasons not to are sentences.

    Raises ``AssertionError`` if it supports none.
    """
    is_supported = False
    for problem, batch_size, n, is_thorough in _cases(problems):
        with _told_of(f"{algorithm.name}: {problem}, slices of {n}"):
            reason = why_unsupported(algorithm, problem)
            refusal = algorithm.supports_micro_batch(problem, n) if reason is None else reason
            if refusal is not None and len(refusal.split()) <= 3:
                raise AssertionError(
                    f"the reason why not is {refusal!r}; it must be a sentence of more than three words"
                )
        if reason is None:
            is_supported = True
            micro_batches = split(algorithm, problem, batch_size, n)
            for check in _checks(algorithm, problem, micro_batches, bounds[problem.dtype], is_thorough=is_thorough):
                yield check, problem, micro_batches, seed
    if not is_supported:
        raise AssertionError(f"{algorithm.name}: it supports no problem of the suite; give some in problems")


def _random_calls(algorithm: Algorithm, bounds: Mapping[str, float], seed: int, number: int) -> Iterator[_Call]:
    """Yield checks of the results of random calls, as many as there are seeds whose draws the algorithm supports."""
    for call_seed in range(seed, seed + number):
        random = Random(call_seed)
        draws = (random_problem(random, volumes=algorithm.takes_volumes) for _ in range(_MOST_DRAWS))
        supported = (draw for draw in draws if draw is not None and why_unsupported(algorithm, draw) is None)
        problem = next(supported, None)
        if problem is not None and (sizes := random_micro_batches(random, algorithm, problem)):
            has_bias = problem.operation is Operation.FORWARD and random.random() < 0.5
            check = partial(check_result, algorithm, problem, sizes, bounds[problem.dtype], has_bias=has_bias)
            yield check, problem, sizes, call_seed


def _cases(problems: Iterable[ConvProblem]) -> Iterator[tuple[ConvProblem, int, int, bool]]:
    """Yield problems with mini-batch and micro-batch size, and whether to check them thoroughly.

    Every geometry comes in float32, then one of each kind in every dtype, and the caller's own.
    """
    for operation, name, memory_format in product(Operation, (*GEOMETRIES, *VOLUMES), MemoryFormat):
        yield *geometry(name, operation, memory_format=memory_format), False
    names = (*ONE_OF_EACH_KIND, "patches", "volume", "patches-of-volume")
    for operation, name, memory_format, dtype in product(Operation, names, MemoryFormat, DEFAULT_MAX_RELATIVE_ERROR):
        yield *geometry(name, operation, memory_format=memory_format, dtype=dtype), True
    for problem in problems:
        yield problem, *_OWN_SIZES, True


def _checks(
    algorithm: Algorithm, problem: ConvProblem, micro_batches: list[int], bound: float, *, is_thorough: bool
) -> Iterator[_Check]:
    """Yield checks of the result and of how NaN and Inf spread; thorough ones also of cuts, threads, sums and bias."""
    call, operation = (algorithm, problem, micro_batches), problem.operation
    yield partial(check_workspace, algorithm, problem, micro_batches[0])
    yield partial(check_result, *call, bound)
    if fuses(algorithm, problem):
        yield partial(check_epilogue, *call, bound, "ReLU6")
    if fuses_moments(algorithm, problem):
        yield partial(check_moments, *call)
    if fuses_normalization(algorithm, problem):
        yield partial(check_normalization, *call, bound, "ReLU6")
    yield partial(check_nothing_is_hidden, algorithm, problem)
    if algorithm.is_local(problem):
        yield partial(check_locality, algorithm, problem, IMAGE[operation])
        if operation is Operation.BACKWARD_FILTER and problem.dtype == "float32":
            yield partial(check_locality, algorithm, problem, "y")
    if not is_thorough:
        return
    yield partial(_in_uneven_threads, partial(check_result, *call, bound))
    yield partial(check_splits, algorithm, problem, sum(micro_batches), bound)
    if algorithm.deterministic:
        yield partial(_in_uneven_threads, partial(check_determinism, *call))
    if operation is Operation.FORWARD:
        yield partial(check_result, *call, bound, has_bias=True)
    if fuses(algorithm, problem):
        yield partial(check_epilogue, *call, bound, None)
        for activation, adds in product(ACTIVATIONS, (False, True)):
            yield partial(_in_uneven_threads, partial(check_epilogue, *call, bound, activation, adds=adds))
    if fuses_moments(algorithm, problem):
        yield partial(_in_uneven_threads, partial(check_moments, *call, offset=1000))
    if fuses_normalization(algorithm, problem):
        yield partial(_in_uneven_threads, partial(check_normalization, *call, bound, None))
    if operation is Operation.BACKWARD_FILTER:
        yield partial(check_added, *call, bound)
        if problem.item_bytes < 4 and algorithm.supports_micro_batch(problem, 1) is None:
            yield partial(check_float32_sums, algorithm, problem)


def _in_uneven_threads(check: _Check) -> None:
    with threads(_UNEVEN_THREADS):
        check()


@contextmanager
def _told_of(call: str) -> Iterator[None]:
    """Prefix the message of every error raised in the block with ``call``, a description of the failed call."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{call}: {error}") from error
    except Exception as error:
        raise AssertionError(f"{call}: it raised {type(error).__name__}: {error}") from error
