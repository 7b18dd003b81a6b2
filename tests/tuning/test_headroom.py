"""Headroom: workspaces of the size of their limits leave the peak of a training step what it is.

Nothing is tuned here: our operators run with an algorithm that asks for a workspace of any size and computes nothing,
and torch's allocator counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from support.cuda.placeholders import MODE, module_on_cuda, on_cuda
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mucudnn
from mucudnn.bench.sources.networks.blocks import Branches, Residual
from mucudnn.core.errors import InvalidInputError, UnavailableError
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Configuration
from mucudnn.kernels.memory import block_bytes, peak_allocated_bytes
from mucudnn.running import choices as choices_module
from mucudnn.running import operators
from mucudnn.running.choices import Choices
from mucudnn.running.executable import Executable, Result
from mucudnn.running.problems import problem_of_call
from mucudnn.testing.contract import GEOMETRIES, geometry
from mucudnn.tuning import training_step as tracing
from mucudnn.tuning.headroom import (
    MOST_LOST_BYTES,
    find_headroom,
    headroom_limits,
    reference_peak_bytes,
    torch_inner_bytes,
)
from mucudnn.tuning.training_step import ConvolutionCall, TracedStep, trace_step, training_step

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


class Hungry(Executable):
    """An executable that allocates a workspace and computes zeros."""

    @classmethod
    def with_workspace(cls, problem: ConvProblem, x: Tensor, workspace_bytes: int) -> Hungry:
        result = Result.of(problem, len(x), x.device.type)
        return cls(problem, Configuration((), 0.0, 0), (), slice(0, workspace_bytes), result)

    def execute(self, x: Tensor, w: Tensor, y: Tensor, *_: object, **named: object) -> None:
        workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8)
        written = {Operation.FORWARD: y, Operation.BACKWARD_DATA: x, Operation.BACKWARD_FILTER: w}
        written[self.problem.operation].zero_()
        del workspace


def make_hungry(model: nn.Module, workspaces: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every convolution becomes ours, with these bytes of workspace; 0 for operations that have none."""
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    for handle, (_, module) in enumerate(modules):
        module.__class__ = mucudnn.Conv2d
        module.choices = Choices({}, "cpu")
        module.choices.handle, module.choices.x_shapes = handle, Everything()  # type: ignore[assignment]

    def executable(choices: Any, operation: Operation, x: Tensor, w: Tensor, third: Any, geometry: Any) -> Any:
        problem = problem_of_call(x, w, *geometry)
        assert problem is not None
        problem = problem.with_operation(operation)
        return Hungry.with_workspace(problem, x, workspaces.get((modules[choices.handle][0], operation), 0))

    monkeypatch.setattr(choices_module, "_registered", {module.choices.handle: module.choices for _, module in modules})
    monkeypatch.setattr(operators, "executable_of", executable)


class Everything:
    def __contains__(self, shape: object) -> bool:
        return True


MIB = 2**20
PROBLEM = ConvProblem(Operation.FORWARD, c=5, h=9, w=9, k=7, r=3, s=3)


def peak_of_step(model: nn.Module, x: Tensor) -> int:
    def step() -> None:
        training_step(model, (x,))
        model.zero_grad(set_to_none=True)

    step()
    return peak_allocated_bytes(step)


@pytest.mark.parametrize("torch_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("net", NETS, ids=lambda net: net.__name__)
def test_the_peak_is_not_above_torchs(
    net: Callable[[], nn.Module], torch_format: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every workspace at its limit, at the same time; and what torch needs is known to be no less."""
    model = net().to(memory_format=torch_format)  # type: ignore[call-overload]
    x = torch.randn(4, 3, 16, 16).to(memory_format=torch_format)
    timeline = trace_step(model, x)
    torchs_bytes = peak_of_step(model, x)
    assert reference_peak_bytes(timeline, torch_inner_bytes) - timeline.base_bytes <= torchs_bytes
    limits = headroom_limits(timeline, torch_inner_bytes)
    assert any(limits.values())
    make_hungry(model, limits, monkeypatch)
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


FORWARD = ConvProblem(Operation.FORWARD, 3, 8, 8, 4, 3, 3)
FILTER = FORWARD.with_operation(Operation.BACKWARD_FILTER)
KB = 1000
TRACED = TracedStep(
    100 * KB,
    750 * KB,
    (
        ConvolutionCall("conv", FORWARD, 2, 300 * KB),
        ConvolutionCall("conv", FORWARD, 2, 750 * KB),
        ConvolutionCall("conv", FILTER, 2, 400 * KB),
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

    assert reference_peak_bytes(TRACED, inner) == peak_kb * KB
    assert headroom_limits(TRACED, inner) == {  # the second call of the module has less room than the first
        ("conv", Operation.FORWARD): max((peak_kb - 750) * KB - MOST_LOST_BYTES, 0),
        ("conv", Operation.BACKWARD_FILTER): (peak_kb - 400) * KB - MOST_LOST_BYTES,
    }


# On CUDA: fake tensors, or those of the CPU in the place of the GPU's


def trace_forward(model: nn.Module, x: Tensor) -> TracedStep:
    """Of a step on CUDA the forward pass alone: torch's CPU build has no autograd for it."""
    there, inputs = module_on_cuda(model), (on_cuda(x),)
    with MODE, torch.no_grad():
        return tracing._trace(there, inputs)


def test_a_step_on_cuda_is_counted_in_blocks() -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 3, bias=False), nn.ReLU(), nn.Conv2d(5, 2, 1))
    x = torch.randn(2, 3, 7, 7)
    timeline = trace_forward(model, x)
    tensors = [*model.parameters(), x]
    assert timeline.base_bytes == sum(block_bytes(t.nbytes, "cuda") for t in tensors) > sum(t.nbytes for t in tensors)
    y_bytes = block_bytes(2 * 5 * 5 * 5 * 4, "cuda")
    first, second = timeline.calls
    assert first.in_use_bytes == timeline.base_bytes + y_bytes
    assert second.in_use_bytes == timeline.base_bytes + y_bytes + block_bytes(2 * 2 * 5 * 5 * 4, "cuda")


def test_limits_leave_room_for_what_the_allocator_does_not_cut_off() -> None:
    in_use = [9 * MIB, 8 * MIB, 4 * MIB]
    calls = tuple(ConvolutionCall(str(index), PROBLEM, 1, size) for index, size in enumerate(in_use))
    limits = headroom_limits(TracedStep(0, 10 * MIB, calls), lambda problem, n: 0, "cuda")
    assert list(limits.values()) == [MIB - 1024, MIB, 5 * MIB - 1024]


def test_models_elsewhere_are_refused() -> None:
    with pytest.raises(UnavailableError, match="on meta; the headroom is available on cpu and cuda"):
        find_headroom(nn.Conv2d(3, 5, 3, device="meta"), torch.randn(2, 3, 7, 7))
    model = nn.Sequential(nn.Conv2d(3, 5, 3), module_on_cuda(nn.Linear(5, 5)))
    with pytest.raises(InvalidInputError, match="several devices"):
        find_headroom(model, torch.randn(2, 3, 7, 7))
