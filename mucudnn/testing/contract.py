"""The contract suite: checks of every promise, over operations, geometries, memory formats, dtypes and splits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from random import Random

import torch

from mucudnn.core.config import DEFAULT_MAX_RELATIVE_ERROR
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.kernels.contract.algorithm import Algorithm, fuses
from mucudnn.kernels.contract.epilogue import ACTIVATIONS
from mucudnn.kernels.plug_ins import require_algorithm
from mucudnn.testing.checks import (
    UNEVEN_THREADS,
    check_added,
    check_determinism,
    check_epilogue,
    check_float32_sums,
    check_locality,
    check_locality_of_padding,
    check_nothing_is_hidden,
    check_reason,
    check_result,
    check_splits,
    check_workspace,
    split,
    threads,
)
from mucudnn.testing.geometries import GEOMETRIES, ONE_OF_EACH_KIND, geometry, random_micro_batches, random_problem

_OWN_SIZES = (3, 2)  # mini-batch and micro-batch of the caller's problems
_MOST_DRAWS = 300  # attempts to draw a random problem that the algorithm supports

_Cut = tuple[ConvProblem, tuple[int, ...]]  # problem and micro-batches
_Check = Callable[[], None]


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
    sums in float32; reasons of ``supports``; bitwise identical runs if ``deterministic`` is true; the spread of NaN if
    ``is_local`` is true; and random calls.

    problems: additional problems, each checked on 3 samples, for an algorithm made for a certain size.
    max_relative_error: largest relative L2 error by dtype, such as ``{"float32": 1e-4}``; for other dtypes that of
    ``Config``. random_problems: number of random calls. seed: seed of the operands and the random calls. report: called
    at the end with one line that counts the problems, memory formats, dtypes and splits checked, such as ``print``. A
    reason of ``supports`` must be a sentence of more than three words.

    Raises ``AssertionError`` for the first broken promise, with the problem, the micro-batches, the seed, and the
    actual and allowed values; and if the algorithm supports no problem of the suite.
    """
    try:
        require_algorithm(algorithm)
    except InvalidInputError as error:
        raise AssertionError(str(error)) from None
    bounds = DEFAULT_MAX_RELATIVE_ERROR | dict(max_relative_error or {})
    passed = check_contract(algorithm, bounds, problems=problems, random_problems=random_problems, seed=seed)
    if report is not None:
        cuts = set(passed)
        checked = {problem for problem, _ in cuts}
        formats, dtypes = ({getattr(problem, name) for problem in checked} for name in ("memory_format", "dtype"))
        report(
            f"{algorithm.name}: {len(passed)} checks passed: {len(checked)} problems ({len(formats)} memory format(s), "
            f"{len(dtypes)} dtype(s)), each against float64 between guard zones, in {len(cuts)} cuts into micro-batches"
        )
    return len(passed)


def check_contract(
    algorithm: Algorithm,
    bounds: Mapping[str, float],
    *,
    problems: Iterable[ConvProblem] = (),
    random_problems: int = 100,
    seed: int = 0,
) -> list[_Cut]:
    """Check an algorithm, even a built-in one, as ``check_algorithm``; return what each check passed was of.

    bounds: largest relative error by dtype.
    """
    passed: list[_Cut] = []

    def run(check: _Check, problem: ConvProblem, micro_batches: Sequence[int], seed: int) -> None:
        sizes = " + ".join(map(str, micro_batches))
        with _told_of(f"{algorithm.name}: {problem}, micro-batches {sizes}, seed {seed}"):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed formats a stack for each other backend
            check()
        passed.append((problem, tuple(micro_batches)))

    with torch.random.fork_rng(devices=[]), threads(1):  # the tensors are too small for more
        for problem, batch_size, n, is_thorough in _cases(problems):
            with _told_of(f"{algorithm.name}: {problem}, slices of {n}"):
                reason = algorithm.supports(problem)
                check_reason(reason)
                check_reason(algorithm.supports_micro_batch(problem, n))
            if reason is None:
                micro_batches = split(algorithm, problem, batch_size, n)
                for checks in (_checks, _more_checks) if is_thorough else (_checks,):
                    for check in checks(algorithm, problem, micro_batches, bounds[problem.dtype]):
                        run(check, problem, micro_batches, seed)
        if not passed:
            raise AssertionError(f"{algorithm.name}: it supports no problem of the suite; give some in problems")
        for number in range(seed, seed + random_problems):
            random = Random(number)
            drawn = (random_problem(random) for _ in range(_MOST_DRAWS))
            found = next((p for p in drawn if p is not None and algorithm.supports(p) is None), None)
            if found is not None:
                sizes = random_micro_batches(random, algorithm, found)
                has_bias = found.operation is Operation.FORWARD and random.random() < 0.5
                check = partial(check_result, algorithm, found, sizes, bounds[found.dtype], has_bias=has_bias)
                run(check, found, sizes, number)
    return passed


def _cases(own: Iterable[ConvProblem]) -> Iterator[tuple[ConvProblem, int, int, bool]]:
    """Yield problems with mini-batch and micro-batch size, and whether to check them thoroughly.

    Every geometry comes in float32, then one of each kind in every dtype, and the caller's own.
    """
    for operation, name, memory_format in product(Operation, GEOMETRIES, MemoryFormat):
        yield *geometry(name, operation, memory_format=memory_format), False
    kinds = product(Operation, ONE_OF_EACH_KIND, MemoryFormat, DEFAULT_MAX_RELATIVE_ERROR)
    for operation, name, memory_format, dtype in kinds:
        yield *geometry(name, operation, memory_format=memory_format, dtype=dtype), True
    for problem in own:
        yield problem, *_OWN_SIZES, True


def _checks(algorithm: Algorithm, problem: ConvProblem, micro_batches: list[int], bound: float) -> Iterator[_Check]:
    """Yield checks of the result, and of how NaN and Inf spread."""
    call = (algorithm, problem, micro_batches)
    yield partial(check_workspace, algorithm, problem, micro_batches[0])
    yield partial(check_result, *call, bound)
    if fuses(algorithm, problem):
        yield partial(check_epilogue, *call, bound, "ReLU6")
    yield partial(check_nothing_is_hidden, algorithm, problem)
    if algorithm.is_local(problem):
        yield partial(check_locality, algorithm, problem)
        if problem.operation is Operation.BACKWARD_FILTER and problem.dtype == "float32":
            yield partial(check_locality_of_padding, algorithm, problem)


def _more_checks(
    algorithm: Algorithm, problem: ConvProblem, micro_batches: list[int], bound: float
) -> Iterator[_Check]:
    """Yield checks of divisions into micro-batches, threads, sums and the bias."""
    call = (algorithm, problem, micro_batches)
    yield partial(_in_uneven_threads, partial(check_result, *call, bound))
    yield partial(check_splits, algorithm, problem, sum(micro_batches), bound)
    if algorithm.deterministic:
        yield partial(check_determinism, *call)
    if problem.operation is Operation.FORWARD:
        yield partial(check_result, *call, bound, has_bias=True)
    if fuses(algorithm, problem):
        yield partial(check_epilogue, *call, bound, None)
        for activation, adds in product(ACTIVATIONS, (False, True)):
            yield partial(_in_uneven_threads, partial(check_epilogue, *call, bound, activation, adds=adds))
    if problem.operation is Operation.BACKWARD_FILTER:
        yield partial(check_added, *call, bound)
        if problem.item_bytes < 4 and algorithm.supports_micro_batch(problem, 1) is None:
            yield partial(check_float32_sums, algorithm, problem)


def _in_uneven_threads(check: _Check) -> None:
    with threads(UNEVEN_THREADS):
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
