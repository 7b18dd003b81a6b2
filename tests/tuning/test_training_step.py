"""Tracing a training step: its bytes against torch's allocator, and that it finds every convolution."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.problems.nets import conv_net
from support.problems.tuned_by_hand import tune_by_hand
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import MemoryFormat, Operation
from mucudnn.kernels.memory import peak_allocated_bytes
from mucudnn.tuning.trace import trace
from mucudnn.tuning.training_step import trace_step, training_step

ALL = set(Operation)


class Checkpointed(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.body, x, use_reentrant=False)


def allocated_bytes(model: nn.Module, x: Tensor) -> int:
    """Peak of a real step, by torch's allocator."""
    training_step(model, (x,))
    model.zero_grad(set_to_none=True)
    peak_bytes = peak_allocated_bytes(lambda: training_step(model, (x,)))
    model.zero_grad(set_to_none=True)
    return peak_bytes


def linear_net() -> nn.Module:
    features = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(), nn.Flatten())
    return nn.Sequential(features, nn.Linear(3 * 8 * 8, 20), nn.ReLU(), nn.Linear(20, 5))


def test_peak_is_what_torchs_allocator_counts() -> None:
    model, x = linear_net(), torch.randn(6, 3, 16, 16)
    timeline = trace_step(model, x)
    assert timeline.peak_bytes - timeline.base_bytes == allocated_bytes(model, x)
    parameters = sum(p.nbytes for p in model.parameters())
    assert timeline.base_bytes == parameters + x.nbytes


def test_fake_and_real_tensors_give_the_same_timeline() -> None:
    model, x = conv_net(), torch.randn(4, 3, 12, 12)
    fake = trace_step(model, x)

    class Unfakeable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Any:
            x.sum().item()
            return self.model(x)

    real = trace_step(Unfakeable(), x)
    assert replace(real, calls=()) == replace(fake, calls=())
    assert [call.in_use_bytes for call in real.calls] == [call.in_use_bytes for call in fake.calls]


def test_calls_are_those_of_the_modules() -> None:
    """Problems as ``bench.tracing`` finds them; forward in order, backward in the opposite order."""
    model, x = conv_net(), torch.randn(4, 3, 12, 12)
    calls = trace_step(model, x).calls
    forward = [(call.name, call.problem, call.batch_size) for call in calls if call.operation is Operation.FORWARD]
    assert forward == [(call.name, call.problem, call.batch_size) for call in trace(model, x)]
    names = [name for name, _, _ in forward]
    assert [c.name for c in calls if c.operation is Operation.BACKWARD_FILTER] == names[::-1]
    assert [c.name for c in calls if c.operation is Operation.BACKWARD_DATA] == names[:0:-1]  # x needs no gradient
    of_name = {name: problem for name, problem, _ in forward}
    assert all(call.problem == of_name[call.name].with_operation(call.operation) for call in calls)


def test_bytes_in_use_at_a_convolution() -> None:
    conv = nn.Conv2d(3, 8, 3, padding=1)
    x = torch.randn(4, 3, 6, 6, requires_grad=True)
    timeline = trace_step(conv, x)
    in_use = {call.operation: call.in_use_bytes - timeline.base_bytes for call in timeline.calls}
    y, dx, dw, scalar = 4 * 8 * 6 * 6 * 4, x.nbytes, conv.weight.nbytes, 4
    dy = y  # torch expands the gradient of the sum: what reads it makes a copy
    assert in_use[Operation.FORWARD] == y
    assert in_use[Operation.BACKWARD_DATA] == y + 2 * scalar + dy + dx
    assert in_use[Operation.BACKWARD_FILTER] == y + 2 * scalar + dy + dx + dw


def test_copies_of_operands_in_another_memory_format_are_in_use() -> None:
    conv = nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
    x = torch.randn(2, 8, 9, 9)
    timeline = trace_step(conv, x)
    forward = timeline.calls[0]
    assert forward.problem.memory_format is MemoryFormat.CHANNELS_LAST
    y = 2 * 8 * 7 * 7 * 4
    assert forward.in_use_bytes == timeline.base_bytes + y + x.nbytes
    assert timeline.peak_bytes >= forward.in_use_bytes


def test_a_module_that_runs_twice_gives_two_calls() -> None:
    conv = nn.Conv2d(4, 4, 3, padding=1)
    model = nn.Sequential(conv, nn.ReLU(), conv, nn.MaxPool2d(2), conv)
    calls = trace_step(model, torch.randn(2, 4, 8, 8)).calls
    assert Counter(call.operation for call in calls) == {
        Operation.FORWARD: 3,
        Operation.BACKWARD_FILTER: 3,
        Operation.BACKWARD_DATA: 2,
    }
    assert [call.problem.h for call in calls if call.operation is Operation.BACKWARD_FILTER] == [4, 8, 8]


def test_recomputed_convolutions_are_calls_too() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Checkpointed(conv_body()), nn.Conv2d(4, 4, 1))
    calls = Counter((call.name, call.operation) for call in trace_step(model, torch.randn(2, 3, 8, 8)).calls)
    # Torch stops recomputing at the last tensor that was saved, the input of 1.body.3
    expected = {"0": [1, 0, 1], "1.body.0": [2, 1, 1], "1.body.3": [1, 1, 1], "2": [1, 1, 1]}
    assert {name: [calls[name, operation] for operation in Operation] for name in expected} == expected


def conv_body() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))


def test_other_convolutions_are_no_calls() -> None:
    class Others(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Any:
            w = torch.ones(4, 4, 3, 3, requires_grad=True)
            y = nn.functional.conv_transpose2d(self.conv(x), w, padding=1)
            return nn.functional.conv_transpose3d(nn.functional.conv2d(y, w, padding=1).unsqueeze(2), w[..., :1, None])

    class Scaled(nn.Conv2d):
        def forward(self, x: Tensor) -> Any:
            return nn.functional.conv2d(super().forward(x), torch.ones(4, 4, 1, 1))

    for model, name in ((Others(), "conv"), (Scaled(4, 4, 3), "")):
        calls = trace_step(model, torch.randn(2, 4, 8, 8)).calls
        both = [(name, Operation.FORWARD), (name, Operation.BACKWARD_FILTER)]
        assert [(call.name, call.operation) for call in calls] == both
        assert {call.problem.r for call in calls} == {3}


class EveryKind(nn.Module):
    """Convolutions in one and two dimensions, and transposed ones, of which the first is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.along, self.image = nn.Conv1d(3, 4, 3, padding="same"), nn.Conv2d(4, 4, 3, padding=1)
        self.up = nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1)
        self.out = nn.ConvTranspose2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        y = torch.relu(self.along(x)).unflatten(2, (6, 6))
        return self.out(checkpoint(lambda y: torch.relu(self.up(y)), self.image(y), use_reentrant=False))


def test_modules_of_every_kind_are_traced_and_optimized_alike() -> None:
    model, x = EveryKind(), torch.randn(4, 3, 36)
    torchs = trace_step(model, x)
    operations: dict[str, list[Operation]] = {}
    for call in torchs.calls:
        operations.setdefault(call.name, []).append(call.operation)
    y, dx, dw = Operation
    assert operations == {"along": [y, dw], "image": [y, dx, dw], "up": [dx, dx, y, dw], "out": [dx, y, dw]}
    of_model = {call.name: call for call in trace(model, x)}
    for call in torchs.calls:
        assert call.problem == of_model[call.name].problem.with_operation(call.operation)
    ours = tune_by_hand(model, x)
    choices = ours.image.choices
    assert trace_step(ours, x) == torchs, "of a step of torch's own"
    assert choices is not None
    assert ours.image.choices is choices


def test_errors_of_the_model_are_its_own_and_an_output_must_be_floating() -> None:
    class Labels(nn.Conv2d):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x).argmax(1)

    with pytest.raises(InvalidInputError, match="without a floating-point tensor"):
        trace_step(Labels(3, 4, 1), torch.randn(2, 3, 4, 4))
    with pytest.raises(RuntimeError, match="channels"):
        trace_step(nn.Conv2d(3, 4, 1), torch.randn(2, 5, 4, 4))
    frozen = conv_net().requires_grad_(False)
    assert {call.operation for call in trace_step(frozen, torch.randn(2, 3, 12, 12)).calls} == {Operation.FORWARD}
