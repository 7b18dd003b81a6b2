"""Headroom: workspaces of the size of their limits leave the peak of a training step what it is.

Nothing is tuned here: our operators run with an algorithm that asks for a workspace of any size and computes nothing,
and torch's allocator counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from geometries import GEOMETRIES, geometry
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mucudnn
from mucudnn import operators, recipes
from mucudnn.bench.memory_step import trace_step, training_step
from mucudnn.bench.memory_timeline import ConvolutionCall, Event, MemoryTimeline
from mucudnn.bench.networks import Branches, Residual
from mucudnn.headroom import MOST_LOST_BYTES, headroom_limits, reference_peak_bytes, torch_inner_bytes
from mucudnn.kernels.allocation import peak_allocated_bytes
from mucudnn.kernels.torch_convolution import torch_convolution
from mucudnn.problem import ConvProblem, MemoryFormat, Operation

Limits = Mapping[tuple[str, Operation], int]


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False, preserve_rng_state=False)


def body(channels: int, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False, groups=groups)
    return [conv, nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]


def plain() -> nn.Module:
    pooled = nn.Conv2d(3, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*pooled, nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 6 * 6, 5))


def residual() -> nn.Module:
    stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
    return nn.Sequential(stem, Residual(nn.Sequential(*body(8)), nn.Identity()), *body(8), nn.Conv2d(8, 4, 1))


def grouped() -> nn.Module:
    depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
    return nn.Sequential(nn.Conv2d(3, 8, 1), *body(8, groups=2), depthwise, nn.Dropout(), nn.Conv2d(8, 8, 3, stride=2))


def branched() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3), Branches(nn.Sequential(*body(6)), nn.Conv2d(6, 4, 1)), nn.Conv2d(10, 2, 3))


def checkpointed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), Checkpointed(*body(8), *body(8)), Checkpointed(*body(8)), nn.Conv2d(8, 2, 3)
    )


def shared() -> nn.Module:
    conv = nn.Conv2d(3, 3, 3, padding=1)
    return nn.Sequential(conv, nn.ReLU(), conv, nn.MaxPool2d(2), conv, nn.Flatten())


NETS: tuple[Callable[[], nn.Module], ...] = (plain, residual, grouped, branched, checkpointed, shared)
FORMATS = (torch.contiguous_format, torch.channels_last)


@dataclass(frozen=True, slots=True)
class Hungry:
    """A recipe that allocates a workspace and computes zeros."""

    problem: ConvProblem
    workspace_bytes: int

    def execute(self, x: Tensor, w: Tensor, y: Tensor, *_: object) -> None:
        workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8)
        written = {Operation.FORWARD: y, Operation.BACKWARD_DATA: x, Operation.BACKWARD_FILTER: w}
        written[self.problem.operation].zero_()
        del workspace


def make_hungry(model: nn.Module, workspaces: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every convolution becomes ours, with these bytes of workspace; 0 for operations that have none."""
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    for handle, (_, module) in enumerate(modules):
        module.__class__ = mucudnn.Conv2d
        module.choices = SimpleNamespace(handle=handle, x_shapes=Everything())  # type: ignore[assignment]

    def recipe(operation: Operation, x: Tensor, w: Tensor, third: Any, *rest: Any) -> Any:
        *geometry, handle = rest
        problem = recipes._problem(operation, x, w, tuple(geometry))  # type: ignore[arg-type]
        return Hungry(problem, workspaces.get((modules[handle][0], operation), 0))

    monkeypatch.setattr(operators, "_recipe", recipe)


class Everything:
    def __contains__(self, shape: object) -> bool:
        return True


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
        peak_bytes = peak_allocated_bytes(lambda: torch_convolution(operation, x, w, dy, None, *pieces))
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
