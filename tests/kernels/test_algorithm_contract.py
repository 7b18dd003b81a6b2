"""What every algorithm promises: see ``mucudnn.kernels.contract.algorithm``. A new algorithm needs no new test here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mucudnn.kernels.contract.algorithm import Workspace
from mucudnn.kernels.contract.allocation import peak_allocated_bytes
from mucudnn.kernels.contract.reference import reference
from mucudnn.kernels.registry import algorithm, algorithms
from mucudnn.kernels.torch_ops.native import NATIVE_ALGORITHM, NATIVE_OTHER_FORMAT
from mucudnn.testing.contract import check_contract
from mucudnn.testing.guarded_call import Call
from mucudnn.words.config import DEFAULT_MAX_RELATIVE_ERROR
from mucudnn.words.errors import InvalidInputError, UnavailableError
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation

NAMES = [a.name for a in algorithms()]
LOOSER = {"winograd-6x6": 10.0}  # interpolation points up to 2 cost a digit; the default error bound bars it


@pytest.mark.parametrize("name", NAMES)
def test_every_promise_is_kept(name: str) -> None:
    bounds = {dtype: LOOSER.get(name, 1.0) * bound for dtype, bound in DEFAULT_MAX_RELATIVE_ERROR.items()}
    strided = [ConvProblem(operation, 4, 13, 11, 3, 5, 5, (2, 2), (2, 2)) for operation in Operation]
    assert check_contract(algorithm(name), bounds, problems=strided, random_problems=10) >= 20  # test_fuzz has more


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
    with pytest.raises(UnavailableError, match=r"'abacus'; there are algorithms for: cpu"):
        algorithms("abacus")


# Torch's own convolution where oneDNN would end the process: never by our doing.


# channels-last and with a bias oneDNN 3.12 crashes; torch computes one sample of it with im2col
CRASHING = ConvProblem(
    Operation.FORWARD, 16, 13, 1, 13, 3, 3, (2, 2), (3, 9), (1, 2), memory_format=MemoryFormat.CHANNELS_LAST
)


def test_one_sample_is_computed_by_what_torch_picks_for_it() -> None:
    call, bias = Call(CRASHING, 1), torch.randn(CRASHING.k)
    y = call.run(NATIVE_ALGORITHM, [1], bias)
    torch.testing.assert_close(y.double(), reference(CRASHING, call.x, call.w, call.y, bias), rtol=1e-5, atol=1e-5)


def test_it_is_neither_cut_into_such_samples_nor_converted_into_that_format() -> None:
    contiguous = replace(CRASHING, memory_format=MemoryFormat.CONTIGUOUS)
    assert "cannot be called by name" in (NATIVE_ALGORITHM.supports_micro_batch(CRASHING, 1) or "")
    assert "oneDNN may crash on it" in (NATIVE_OTHER_FORMAT.supports(contiguous) or "")


def test_less_padding_bars_neither() -> None:
    usual = replace(CRASHING, padding=(2, 4))
    assert NATIVE_ALGORITHM.supports_micro_batch(usual, 1) is None
    assert NATIVE_OTHER_FORMAT.supports(usual) is None


def test_compiled_algorithms_say_which_dilations_they_count() -> None:
    far = ConvProblem(Operation.FORWARD, 4, 3, 3, 4, 1, 1, dilation=2**31 - 1)
    assert (
        algorithm("implicit-gemm").supports(far)
        == "a size is 2147483647; the compiled algorithms take up to 1073741824"
    )
