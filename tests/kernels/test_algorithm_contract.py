"""What every algorithm promises: see ``mucudnn.kernels.contract.algorithm``. A new algorithm needs no new test here."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import pytest
import torch

from mucudnn.kernels.contract.algorithm import Algorithm, Fusing, Workspace, fuses
from mucudnn.kernels.contract.allocation import peak_allocated_bytes
from mucudnn.kernels.contract.epilogue import ACTIVATIONS
from mucudnn.kernels.registry import algorithm, algorithms
from mucudnn.testing.checks import (
    UNEVEN_THREADS,
    check_added,
    check_determinism,
    check_epilogue,
    check_float32_sums,
    check_reason,
    check_result,
    check_splits,
    check_workspace,
    split,
    threads,
)
from mucudnn.testing.geometries import GEOMETRIES, ONE_OF_EACH_KIND, geometry
from mucudnn.testing.guarded_call import Call
from mucudnn.words.config import DEFAULT_MAX_RELATIVE_ERROR
from mucudnn.words.errors import InvalidInputError, UnavailableError
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation

NAMES = [a.name for a in algorithms()]
LOOSER = {"winograd-6x6": 10.0}  # interpolation points up to 2 cost a digit; the default error bound bars it


def tolerance(name: str, dtype: str) -> float:
    return LOOSER.get(name, 1.0) * DEFAULT_MAX_RELATIVE_ERROR[dtype]


def cases(
    geometries: Iterable[str],
    dtypes: Iterable[str] = ("float32",),
    operations: Iterable[Operation] = Operation,
    names: Iterable[str] = NAMES,
) -> list[object]:
    """Everything that is supported, as test parameters (name, problem, mini-batch, micro-batch)."""
    parameters: list[object] = []
    for name, operation, key, memory_format, dtype in product(names, operations, geometries, MemoryFormat, dtypes):
        problem, batch_size, micro_batch_size = geometry(key, operation, memory_format=memory_format, dtype=dtype)
        if algorithm(name).supports(problem) is None:
            label = f"{name}-{operation}-{key}-{memory_format}-{dtype}"
            parameters.append(pytest.param(name, problem, batch_size, micro_batch_size, id=label))
    return parameters


CASE = ("name", "problem", "batch_size", "micro_batch_size")
ALL_GEOMETRIES = cases(GEOMETRIES)
OTHER_DTYPES = cases(ONE_OF_EACH_KIND, ("float64", "bfloat16", "float16"))


@pytest.mark.parametrize(CASE, ALL_GEOMETRIES + OTHER_DTYPES)
def test_result_is_the_convolution_in_the_declared_bytes(
    name: str, problem: ConvProblem, batch_size: int, micro_batch_size: int
) -> None:
    a = algorithm(name)
    check_result(a, problem, split(a, problem, batch_size, micro_batch_size), tolerance(name, problem.dtype))


@pytest.mark.parametrize(CASE, cases(ONE_OF_EACH_KIND))
def test_every_split_gives_the_same(name: str, problem: ConvProblem, batch_size: int, micro_batch_size: int) -> None:
    check_splits(algorithm(name), problem, batch_size, tolerance(name, problem.dtype))


@pytest.mark.parametrize(CASE, cases(("same-3x3", "tiles")))
def test_threads_change_neither_result_nor_bounds(
    name: str, problem: ConvProblem, batch_size: int, micro_batch_size: int
) -> None:
    with threads(UNEVEN_THREADS):
        test_result_is_the_convolution_in_the_declared_bytes(name, problem, batch_size, micro_batch_size)


@pytest.mark.parametrize(CASE, cases(("same-3x3", "groups")))
def test_every_run_of_a_deterministic_algorithm_gives_the_same_bits(
    name: str, problem: ConvProblem, batch_size: int, micro_batch_size: int
) -> None:
    a = algorithm(name)
    if not a.deterministic:
        pytest.skip(f"{name} does not promise it")
    check_determinism(a, problem, split(a, problem, batch_size, micro_batch_size))


@pytest.mark.parametrize("name", NAMES)
def test_workspace_is_known_without_running(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("run to find out a workspace")

    a = algorithm(name)
    for part in ("open", "step", "close"):
        monkeypatch.setattr(type(a), part, refuse)
    for parameters in cases(("same-3x3", "groups"), ("float32", "bfloat16"), names=[name]):
        _, problem, batch_size, _ = parameters.values  # type: ignore[attr-defined]
        check_workspace(a, problem, batch_size)


@pytest.mark.parametrize(CASE, cases(ONE_OF_EACH_KIND, operations=[Operation.FORWARD]))
def test_bias_is_added_in_forward(name: str, problem: ConvProblem, batch_size: int, micro_batch_size: int) -> None:
    a = algorithm(name)
    micro_batches = split(a, problem, batch_size, micro_batch_size)
    check_result(a, problem, micro_batches, tolerance(name, problem.dtype), has_bias=True)


FUSING = [name for name in NAMES if isinstance(algorithm(name), Fusing)]


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(CASE, cases(GEOMETRIES, operations=[Operation.FORWARD], names=FUSING))
def test_epilogue_is_computed_by_those_that_say_so(
    name: str, problem: ConvProblem, batch_size: int, micro_batch_size: int, adds: bool
) -> None:
    a = algorithm(name)
    micro_batches = split(a, problem, batch_size, micro_batch_size)
    for activation in (None, *ACTIVATIONS) if fuses(a, problem) else ():
        check_epilogue(a, problem, micro_batches, tolerance(name, problem.dtype), activation, adds=adds)


@pytest.mark.parametrize(CASE, cases(ONE_OF_EACH_KIND, operations=[Operation.BACKWARD_FILTER]))
def test_filter_gradient_is_added_to_what_is_there(
    name: str, problem: ConvProblem, batch_size: int, micro_batch_size: int
) -> None:
    """One configuration may use several algorithms one after the other."""
    a = algorithm(name)
    check_added(a, problem, split(a, problem, batch_size, micro_batch_size), tolerance(name, problem.dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_are_summed_in_float32(name: str, dtype: str) -> None:
    problem = ConvProblem(Operation.BACKWARD_FILTER, 3, 6, 6, 4, 3, 3, padding=(1, 1), dtype=dtype)
    a = algorithm(name)
    if a.supports(problem) is not None or a.supports_micro_batch(problem, 1) is not None:
        pytest.skip(f"{name} does not compute slices of one sample in {dtype}")
    check_float32_sums(a, problem)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_supported_has_a_reason_in_words(name: str) -> None:
    a = algorithm(name)
    for operation, key, memory_format, dtype in product(
        Operation, GEOMETRIES, MemoryFormat, DEFAULT_MAX_RELATIVE_ERROR
    ):
        problem, _, micro_batch_size = geometry(key, operation, memory_format=memory_format, dtype=dtype)
        check_reason(a.supports(problem))
        check_reason(a.supports_micro_batch(problem, micro_batch_size))


@pytest.mark.parametrize("name", NAMES)
def test_identity_is_stable(name: str) -> None:
    a = algorithm(name)
    assert isinstance(a, Algorithm)
    assert a.version >= 1
    assert a == algorithm(name)
    assert hash(a) == hash(algorithm(name))


@pytest.mark.parametrize("operation", [Operation.BACKWARD_DATA, Operation.BACKWARD_FILTER])
def test_native_refuses_a_slice_for_which_torch_changes_the_backend(operation: Operation) -> None:
    native = algorithm("native")
    small = ConvProblem(operation, 16, 8, 8, 16, 3, 3, padding=(1, 1))
    large = ConvProblem(operation, 64, 28, 28, 64, 3, 3, padding=(1, 1))
    assert "Slow2d instead of Mkldnn" in str(native.supports_micro_batch(small, 1))
    assert native.supports_micro_batch(small, 2) is None
    assert native.supports_micro_batch(large, 1) is None
    assert native.supports_micro_batch(small.with_operation(Operation.FORWARD), 1) is None


@pytest.mark.parametrize("memory_format", MemoryFormat)
def test_native_declares_the_bytes_of_any_call_not_those_of_a_first_one(memory_format: MemoryFormat) -> None:
    """What is found out once in a process must not be counted, nor be missing."""
    problem = ConvProblem(Operation.FORWARD, 19, 23, 11, 32, 3, 3, memory_format=memory_format)  # only in this test
    handed, internal = algorithm("native").workspace(problem, 2), algorithm("native").internal_bytes(problem, 2)
    for _ in range(2):
        call = Call(problem, 2)
        call.run(algorithm("native"), [2], torch.randn(problem.k))
        assert call.undeclared_bytes == 0
    assert handed == Workspace()
    assert internal < 3 * call.y.nbytes + call.x.nbytes + 2 * call.w.nbytes


def test_the_allocation_counter_counts_live_bytes() -> None:
    def one_after_the_other() -> None:
        for _ in range(3):
            torch.empty(1000)

    assert peak_allocated_bytes(one_after_the_other) == 4000
    assert peak_allocated_bytes(lambda: [torch.empty(1000) for _ in range(3)]) == 12000
    assert peak_allocated_bytes(lambda: None) == 0


def test_unknown_names_say_what_there_is() -> None:
    assert NAMES[0] == "native"
    assert len(set(NAMES)) == len(NAMES)
    with pytest.raises(InvalidInputError, match=r"algorithm is 'magic'; allowed are native, .*gemm"):
        algorithm("magic")
    with pytest.raises(UnavailableError, match=r"'abacus'; there are some for: cpu"):
        algorithms("abacus")
