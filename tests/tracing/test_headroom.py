"""Headroom: workspaces of the size of their limits leave the peak of a training step what it is.

Nothing is tuned here: our operators run with an algorithm that asks for a workspace of any size and computes nothing,
and torch's allocator counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from support.hungry import NETS, checkpointed, grouped, make_hungry, residual, shared
from torch import Tensor, nn

from mucudnn.kernels.contract.allocation import peak_allocated_bytes
from mucudnn.kernels.torch_ops.torch_convolution import torch_convolution
from mucudnn.testing.geometries import GEOMETRIES, geometry
from mucudnn.tracing.headroom import MOST_LOST_BYTES, headroom_limits, reference_peak_bytes, torch_inner_bytes
from mucudnn.tracing.training_step import ConvolutionCall, Event, MemoryTimeline, trace_step, training_step
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation

FORMATS = (torch.contiguous_format, torch.channels_last)


def peak_of_step(model: nn.Module, x: Tensor) -> int:
    def step() -> None:
        training_step(model, (x,))
        model.zero_grad(set_to_none=True)

    step()
    return peak_allocated_bytes(step)


@pytest.mark.parametrize("torch_format", FORMATS, ids=str)
@pytest.mark.parametrize("net", NETS, ids=lambda net: net.__name__)
def test_the_peak_is_not_above_torchs(
    net: Callable[[], nn.Module], torch_format: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every workspace at its limit, at the same time; and what torch needs is known to be no less."""
    model = net().to(memory_format=torch_format)
    x = torch.randn(4, 3, 16, 16).to(memory_format=torch_format)
    timeline = trace_step(model, x)
    torchs_bytes = peak_of_step(model, x)
    assert reference_peak_bytes(timeline, torch_inner_bytes) - timeline.base_bytes <= torchs_bytes
    make_hungry(model, headroom_limits(timeline, torch_inner_bytes), monkeypatch)
    assert peak_of_step(model, x) <= torchs_bytes


@pytest.mark.parametrize("net", [residual, grouped, checkpointed, shared], ids=lambda net: net.__name__)
def test_no_limit_can_be_higher(net: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """A workspace above its limit raises the peak by just as much, whichever it is."""
    model, x = net(), torch.randn(4, 3, 16, 16)
    timeline = trace_step(model, x)
    reference_bytes = reference_peak_bytes(timeline, torch_inner_bytes) - timeline.base_bytes
    limits = headroom_limits(timeline, torch_inner_bytes)
    assert limits
    for key, limit in limits.items():
        make_hungry(model, {key: limit + MOST_LOST_BYTES + 4096}, monkeypatch)
        assert peak_of_step(model, x) == reference_bytes + 4096, key


@pytest.mark.parametrize("name", GEOMETRIES)
def test_torchs_backward_operator_peaks_as_its_two_halves(name: str) -> None:
    """It needs at least what is reckoned for dx, then dw beside dx: the reference peak is never too high."""
    problem, n, _ = geometry(name, Operation.BACKWARD_DATA)
    x, w = torch.randn(problem.x_shape(n)), torch.randn(problem.w_shape())
    dy = torch.randn(problem.y_shape(n))
    pieces = problem.stride, problem.padding, problem.dilation, False, (0, 0), problem.groups
    fused_bytes = peak_allocated_bytes(
        lambda: torch.ops.aten.convolution_backward(dy, x, w, None, *pieces, (True, True, False))
    )
    of_data = x.nbytes + torch_inner_bytes(problem, n)
    of_filter = x.nbytes + w.nbytes + torch_inner_bytes(problem.with_operation(Operation.BACKWARD_FILTER), n)
    assert max(of_data, of_filter) <= fused_bytes


@pytest.mark.parametrize("operation", Operation)
def test_torch_copies_operands_in_another_memory_format(operation: Operation) -> None:
    """As the bytes in use of a call assume."""
    problem, n, _ = geometry("same-3x3", operation, c=16, k=8, memory_format=MemoryFormat.CHANNELS_LAST)
    x, dy = torch.randn(problem.x_shape(n)), torch.randn(problem.y_shape(n))
    w = torch.randn(problem.w_shape()).to(memory_format=torch.channels_last)
    pieces = problem.stride, problem.padding, problem.dilation, problem.groups
    copied = {Operation.FORWARD: (x,), Operation.BACKWARD_DATA: (dy,), Operation.BACKWARD_FILTER: (x, dy)}[operation]
    result = {Operation.FORWARD: dy, Operation.BACKWARD_DATA: x, Operation.BACKWARD_FILTER: w}[operation]
    with torch.no_grad():
        third = None if operation is Operation.FORWARD else dy
        peak_bytes = peak_allocated_bytes(lambda: torch_convolution(operation, x, w, third, pieces))
    assert peak_bytes >= result.nbytes + sum(t.nbytes for t in copied) + torch_inner_bytes(problem, n)


FORWARD = ConvProblem(Operation.FORWARD, 3, 8, 8, 4, 3, 3)
FILTER = FORWARD.with_operation(Operation.BACKWARD_FILTER)
KB = 1000
TIMELINE = MemoryTimeline(
    base_bytes=100 * KB,
    events=(
        *(Event("convolution", 300 * KB), Event("relu", 500 * KB)),
        *(Event("convolution", 700 * KB, 50 * KB), Event("backward", 400 * KB)),
    ),
    calls=(
        ConvolutionCall("conv", FORWARD, 2, 300 * KB, 0),
        ConvolutionCall("conv", FORWARD, 2, 750 * KB, 2),
        ConvolutionCall("conv", FILTER, 2, 400 * KB, 3),
    ),
)


@pytest.mark.parametrize(
    ("inner_kb", "peak_kb"),
    [({FORWARD: 0, FILTER: 0}, 750), ({FORWARD: 0, FILTER: 500}, 900), ({FORWARD: 20, FILTER: 370}, 770)],
)
def test_limits_by_hand(inner_kb: Mapping[ConvProblem, int], peak_kb: int) -> None:
    def inner(problem: ConvProblem, batch_size: int) -> int:
        assert batch_size == 2
        return inner_kb[problem] * KB

    assert reference_peak_bytes(TIMELINE, inner) == peak_kb * KB
    assert headroom_limits(TIMELINE, inner) == {  # the second call of the module has less room than the first
        ("conv", Operation.FORWARD): max((peak_kb - 750) * KB - MOST_LOST_BYTES, 0),
        ("conv", Operation.BACKWARD_FILTER): (peak_kb - 400) * KB - MOST_LOST_BYTES,
    }


def test_without_convolutions_there_is_nothing_to_limit() -> None:
    timeline = MemoryTimeline(100, (Event("relu", 500),), ())
    assert reference_peak_bytes(timeline, torch_inner_bytes) == 500
    assert headroom_limits(timeline, torch_inner_bytes) == {}
