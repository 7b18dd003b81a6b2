"""The phases of the direct method: which pixels a tap reads, for strides and dilations that share no factor or many."""

from __future__ import annotations

from itertools import product

import pytest

from mucudnn.kernels.contract.reference import reference, relative_l2_error
from mucudnn.kernels.torch_ops.direct import Direct, phases
from mucudnn.testing.guarded_call import Call
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation, Pair

by_operation = pytest.mark.parametrize("operation", list(Operation))


def error_of(problem: ConvProblem) -> float:
    call = Call(problem, 3)
    expected = reference(problem, call.x, call.w, call.y)
    return relative_l2_error(call.run(Direct(), [2, 1]), expected)


@by_operation
@pytest.mark.parametrize("stride", [(1, 2), (3, 1), (2, 4), (5, 7)], ids=str)
@pytest.mark.parametrize("dilation", [(1, 1), (2, 3), (4, 2)], ids=str)
def test_strides_and_dilations(operation: Operation, stride: Pair, dilation: Pair) -> None:
    for padding, memory_format in product([(0, 0), (1, 4), (9, 6)], MemoryFormat):
        problem = ConvProblem(
            operation, 4, 13, 10, 6, 3, 2, stride, padding, dilation, 2, dtype="float64", memory_format=memory_format
        )
        assert error_of(problem) < 1e-14


@by_operation
def test_a_map_that_no_tap_reaches(operation: Operation) -> None:
    """The only output reads padding alone: y is the bias, gradients are zero."""
    problem = ConvProblem(operation, 2, 1, 1, 3, 1, 1, stride=(3, 3), padding=(1, 1))
    assert not Call(problem, 2).run(Direct(), [2]).any()


@pytest.mark.parametrize(
    ("stride", "dilation", "count"),
    [((1, 1), (1, 1), 1), ((2, 2), (1, 1), 4), ((2, 2), (2, 2), 1), ((4, 4), (1, 1), 9)],
)
def test_only_phases_that_are_read_are_stored(stride: Pair, dilation: Pair, count: int) -> None:
    layout = phases(ConvProblem(Operation.FORWARD, 2, 16, 16, 2, 3, 3, stride, (1, 1), dilation))
    assert len(layout.offsets) == count
    assert {tap.phase for tap in layout.taps} == set(range(count))
