"""One convolution on a GPU: every engine that cuDNN offers, every algorithm, their results and their memory.

``pytest -m gpu`` runs what needs a GPU; the same tests run on the CPU, where a stand-in executes cuDNN's plans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import pytest
import torch
from support.configured import run
from support.cuda.either_device import Guarded, run_in_slices, wait_for_all

from mucudnn.core.errors import UnsoundError, first_line
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.core.records import Configuration, MicroConfig
from mucudnn.kernels import registry
from mucudnn.kernels.algorithm import Algorithm, why_unsupported
from mucudnn.kernels.cudnn.algorithms import CudnnEngine, CudnnEngines
from mucudnn.kernels.cudnn.library import CudnnError
from mucudnn.kernels.memory import peak_allocated_bytes
from mucudnn.kernels.registry import algorithms
from mucudnn.kernels.torch_convolution import reference, relative_l2_error
from mucudnn.measuring.candidates import Candidate
from mucudnn.measuring.operands import random_operands
from mucudnn.measuring.workbench import Workbench


def offered_engines(problem: ConvProblem, sizes: Sequence[int]) -> list[CudnnEngine]:
    """What cuDNN, or what stands in for it, offers for micro-batches of these sizes, as torch's settings allow."""
    return CudnnEngines(registry.cudnn_backend()).offered(problem, sizes)


def buildable_engines(problem: ConvProblem, sizes: Sequence[int], refused: list[str]) -> list[CudnnEngine]:
    """Those whose plans cuDNN builds for every size that they support; the names of the others are added to `refused`.

    cuDNN's heuristics propose engines of which it then refuses to finalize a plan, or one that adds in place. Raises
    ``CudnnError`` where a plan cannot be built for another reason than that it is not supported.
    """
    offered = offered_engines(problem, sizes)
    unsupported = [
        engine
        for engine in offered
        if all(engine.supports_micro_batch(problem, n) is not None for n in sizes)
        or not all(_builds(engine, problem, n) for n in sizes)
    ]
    refused += [engine.name for engine in unsupported]
    return [engine for engine in offered if engine not in unsupported]


def _builds(engine: CudnnEngine, problem: ConvProblem, n: int) -> bool:
    if engine.supports_micro_batch(problem, n) is not None:
        return True
    try:
        engine.build(problem, n)
    except CudnnError as error:
        if error.is_unsupported:
            return False
        raise
    return True


pytestmark = pytest.mark.filterwarnings("default")  # what a driver or library warns of is no failure of a convolution

BATCH_SIZE = 7
SPLIT = (4, 2, 1)
# Far beyond what any of cuDNN's engines rounds to: what is only imprecise, the tuner bars.
WRONG = {"float64": 1e-9, "float32": 1e-2, "bfloat16": 5e-2, "float16": 2e-2}
# Of cuDNN 9.19 on an H200: wrong for "5x5", contiguous, with 1 or 7 samples, and right with 8. Tuning bars them.
FAULTY_ENGINES = {"cudnn:70", "cudnn:78"}
ENGINES_SECONDS = 60.0  # for the engines one by one: some are compiled when they are first used
PROBLEMS = {
    "3x3": ConvProblem(Operation.FORWARD, 16, 14, 14, 32, 3, 3, padding=(1, 1)),
    "1x1": ConvProblem(Operation.FORWARD, 32, 14, 14, 64, 1, 1),
    "5x5": ConvProblem(Operation.FORWARD, 16, 13, 13, 24, 5, 5, padding=(2, 2)),
    "stride": ConvProblem(Operation.FORWARD, 16, 15, 15, 32, 3, 3, stride=(2, 2), padding=(1, 1)),
    "first layer": ConvProblem(Operation.FORWARD, 3, 35, 35, 16, 7, 7, stride=(2, 2), padding=(3, 3)),
    "depthwise": ConvProblem(Operation.FORWARD, 16, 14, 14, 16, 3, 3, padding=(1, 1), groups=16),
    "dilation": ConvProblem(Operation.FORWARD, 16, 14, 14, 16, 3, 3, padding=(2, 2), dilation=(2, 2)),
    "odd": ConvProblem(Operation.FORWARD, 5, 11, 9, 7, 3, 1, padding=(1, 0)),
}
VOLUMES = {  # cuDNN's engines are not asked for them
    "volume": ConvProblem(Operation.FORWARD, 8, 9, 8, 12, 3, 3, padding=(1, 1, 1), d=5, t=3),
    "volume in patches": ConvProblem(Operation.FORWARD, 3, 28, 14, 16, 14, 14, stride=(2, 14, 14), d=4, t=2),
}
DTYPES = {
    "float32": (*PROBLEMS, *VOLUMES),
    "bfloat16": ("3x3", "1x1", *VOLUMES),
    "float16": ("3x3", "odd"),
    "float64": ("3x3",),
}


def cases(dtypes: Sequence[str] = tuple(DTYPES), names: Sequence[str] = tuple(PROBLEMS)) -> list[object]:
    return [
        pytest.param(
            replace((PROBLEMS | VOLUMES)[name], operation=operation, memory_format=memory_format, dtype=dtype),
            id=f"{name}-{operation}-{memory_format}-{dtype}",
        )
        for dtype in dtypes
        for name, operation, memory_format in product(DTYPES[dtype], Operation, MemoryFormat)
        if name in names
    ]


def why_wrong(algorithm: Algorithm, problem: ConvProblem, sizes: Sequence[int], device: str, before: float = 0) -> str:
    """Why the algorithm is wrong on slices of these sizes, in words; empty: it is not. before: what dw is added to."""
    memory = Guarded(device)
    operands = memory.operands(problem, sum(sizes))
    if problem.operation is Operation.BACKWARD_FILTER:
        operands.w.fill_(before)
    expected = reference(problem, operands.x, operands.w, operands.y) + before
    try:
        run_in_slices(algorithm, problem, operands, sizes, memory)
        wait_for_all(device)
    except (RuntimeError, CudnnError) as error:
        return first_line(error)
    if memory.trespass() is not None:
        return "wrote outside its result and workspace"
    error = relative_l2_error(operands.written(problem.operation), expected)
    return "" if error <= WRONG[problem.dtype] else f"relative error {error:.1e}"


def faulty_engines(problem: ConvProblem) -> set[str]:
    is_known = problem.r == 5 and problem.memory_format is MemoryFormat.CONTIGUOUS
    return FAULTY_ENGINES if is_known else set()


def all_wrong(candidates: Sequence[Algorithm], wrong: Callable[[Algorithm], str]) -> dict[str, str]:
    """By name; one that fails does not hide the others."""
    return {candidate.name: reason for candidate in candidates if (reason := wrong(candidate))}


Engines = Callable[[ConvProblem, Sequence[int]], list[CudnnEngine]]


@pytest.fixture
def engines_of(record_property: Callable[[str, object], None]) -> Iterator[Engines]:
    """The engines that cuDNN offers and builds; those that it offers and then refuses are recorded."""
    refused: list[str] = []
    yield lambda problem, sizes: buildable_engines(problem, sizes, refused)
    record_property("refuses to build", refused)


@pytest.fixture(scope="module")
def engines_end_s() -> float:
    return time.monotonic() + ENGINES_SECONDS


@pytest.mark.parametrize("problem", cases())
def test_every_engine_is_the_convolution(
    problem: ConvProblem, device: str, engines_of: Engines, engines_end_s: float
) -> None:
    if device == "cuda" and time.monotonic() > engines_end_s:
        pytest.skip(f"the {ENGINES_SECONDS:g} s for all engines one by one are over")
    engines = engines_of(problem, [BATCH_SIZE])
    assert engines
    wrong = all_wrong(engines, lambda engine: why_wrong(engine, problem, [BATCH_SIZE], device))
    assert wrong.keys() <= faulty_engines(problem), wrong
    for engine in engines:
        if engine.name in wrong:
            with pytest.raises(UnsoundError):
                Workbench(problem, BATCH_SIZE, device).relative_error(Candidate(problem, engine, BATCH_SIZE))


@pytest.mark.parametrize("problem", [p for p in cases(("float32", "float64"), ("3x3", "1x1")) if "filter" in p.id])
def test_cudnn_adds_dw_in_place(
    problem: ConvProblem, device: str, record_property: Callable[[str, object], None]
) -> None:
    """By beta = 1. Whether each engine does is recorded; none may say that it does and be wrong."""
    refused, wrong, right = [], {}, []
    for engine in offered_engines(problem, [4]):
        adding = replace(engine, adds_in_place=True)
        try:
            adding.build(problem, 4)
        except CudnnError:
            refused.append(engine.name)
            continue
        if reason := why_wrong(adding, problem, (4, 4), device, before=3.0):
            wrong[engine.name] = reason
        else:
            right.append(engine.name)
    record_property("adds in place", right)
    record_property("cannot add in place", refused)
    assert right
    assert wrong == {}


@pytest.mark.parametrize("problem", cases(("float32", "float16"), ("3x3", "odd")))
def test_a_configuration_of_several_engines_is_the_convolution(
    problem: ConvProblem, device: str, engines_of: Engines
) -> None:
    """Another engine for each size, as far as there are several, through the executor."""
    offered = [engines_of(problem, [n]) for n in SPLIT]
    engines = [of_size[index % len(of_size)] for index, of_size in enumerate(offered)]
    parts = tuple(MicroConfig(engine.name, n) for engine, n in zip(engines, SPLIT, strict=True))
    operands = random_operands(problem, BATCH_SIZE, device)
    expected = reference(problem, operands.x, operands.w, operands.y)
    run(problem, Configuration(parts, 0.0, 0), operands.x, operands.w, operands.y)
    assert relative_l2_error(operands.written(problem.operation), expected) <= WRONG[problem.dtype]


@pytest.mark.parametrize("problem", cases(("float32", "bfloat16"), ("3x3", "stride", "depthwise", *VOLUMES)))
@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=["undivided", "divided"])
def test_every_algorithm_is_the_convolution(problem: ConvProblem, sizes: tuple[int, ...], device: str) -> None:
    assert all_wrong(able(problem, sizes, device), lambda a: why_wrong(a, problem, sizes, device)) == {}


@pytest.mark.parametrize("problem", cases(("float32", "bfloat16"), ("3x3",)))
def test_no_algorithm_allocates_more_than_it_declares(problem: ConvProblem, device: str, engines_of: Engines) -> None:
    def excess(algorithm: Algorithm) -> str:
        memory, declared = Guarded(device), algorithm.internal_bytes(problem, 4)
        operands = random_operands(problem, 4, device)
        needed = algorithm.workspace(problem, 4)
        prepared, scratch = memory.buffer(needed.prepared_bytes), memory.buffer(needed.scratch_bytes)

        def once() -> None:
            algorithm.open(problem, operands.w, prepared)
            algorithm.step(problem, operands.x, operands.w, operands.y, None, prepared, scratch)
            algorithm.close(problem, operands.w, prepared)

        once()  # libraries create what they keep
        allocated = peak_allocated_bytes(once, device, in_blocks=False)
        return f"{allocated} bytes allocated, {declared} declared" if allocated > declared else ""

    candidates = [*able(problem, (4,), device), *engines_of(problem, [4])]
    if device == "cpu":  # there torch converts halves as a whole before it adds them
        candidates = [c for c in candidates if not isinstance(c, CudnnEngine) or problem.dtype == "float32"]
    assert all_wrong(candidates, excess) == {}


def able(problem: ConvProblem, sizes: Sequence[int], device: str) -> list[Algorithm]:
    """The algorithms of the device that compute slices of these sizes."""
    return [
        candidate
        for candidate in algorithms(device)
        if why_unsupported(candidate, problem) is None
        and all(candidate.supports_micro_batch(problem, n) is None for n in sizes)
    ]


# Torch's settings


@contextmanager
def cudnn_settings(**settings: bool) -> Iterator[None]:
    """Of ``torch.backends.cudnn``; afterwards they are as before."""
    before = {name: getattr(torch.backends.cudnn, name) for name in settings}
    try:
        for name, value in settings.items():
            setattr(torch.backends.cudnn, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(torch.backends.cudnn, name, value)


@pytest.mark.parametrize("problem", cases(("float32",), ("3x3", "1x1")))
def test_engines_are_exact_without_tf32(problem: ConvProblem, device: str, engines_of: Engines) -> None:
    """1x1 too, for which there may be engines on cuBLASLt: those are listed on a GPU only."""
    with cudnn_settings(allow_tf32=False):
        exact = engines_of(problem, [BATCH_SIZE])
    with cudnn_settings(allow_tf32=True):
        every = offered_engines(problem, [BATCH_SIZE])
    assert {engine.name for engine in exact} < {engine.name for engine in every}
    operands = random_operands(problem, BATCH_SIZE, device)
    expected = reference(problem, operands.x, operands.w, operands.y)
    errors = {}
    for engine in exact:
        run(problem, Configuration((MicroConfig(engine.name, BATCH_SIZE),), 0.0, 0), operands.x, operands.w, operands.y)
        errors[engine.name] = relative_l2_error(operands.written(problem.operation), expected)
    assert min(errors.values()) <= 1e-5
    assert {name: error for name, error in errors.items() if error > 1e-4} == {}  # TF32 is off by 2e-4 and more


# Large tensors
