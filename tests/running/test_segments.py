"""Segments in micro-batches: results and gradients are those of the whole batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from mucudnn.core.errors import InvalidInputError
from mucudnn.running.modules import make_tunable
from mucudnn.running.segments import Segment, set_segments
from mucudnn.running.tape import Tape


class Block(nn.Module):
    """A block of two inputs, one of them of more channels, in channels_last if they are."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(8, 12, 3, padding=1)
        self.other = nn.Conv2d(4, 12, 1)
        self.norm = nn.GroupNorm(3, 12)
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return torch.relu_(self.norm(self.one(x) + self.other(skip)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.layers = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1))
        self.block = Block()
        self.last = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first(x)
        y: Tensor = self.last(self.block(self.layers(skip), skip).mean((2, 3)))
        return y


def gradients(model: nn.Module, x: Tensor, *, is_recorded: bool) -> list[Tensor]:
    """Return the results of a step: y, dx and the gradients of the parameters."""
    x = x.detach().requires_grad_()
    if is_recorded:
        with Tape():
            y = model(x)
    else:
        y = model(x)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


SEGMENTS = (
    [Segment("layers", 0, 2, 2)],
    [Segment("layers", 2, 2, 1), Segment("block", None, None, 3)],
    [Segment("layers", 0, 1, 4), Segment("layers", 2, 2, 1)],
    [Segment("block", None, None, 7)],  # as many as there are: whole
)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_gradients_are_those_of_the_whole_batch(memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    net = Net().double().to(memory_format=memory_format)
    x = torch.randn(7, 3, 10, 9, dtype=torch.float64).to(memory_format=memory_format)
    for freeze in (False, True):
        net.first.weight.requires_grad_(not freeze)
        net.block.one.weight.requires_grad_(not freeze)
        expected = gradients(copy.deepcopy(net), x, is_recorded=False)
        for segments in SEGMENTS:
            model = copy.deepcopy(net)
            set_segments(model, segments)
            for result, other in zip(gradients(model, x, is_recorded=True), expected, strict=True):
                torch.testing.assert_close(result, other, rtol=1e-10, atol=1e-12)
                assert result.stride() == other.stride()


class Embedding(nn.Module):
    """Adds a position and a shift to each sample: their gradients are the same, and those of a single sample are dy."""

    def __init__(self) -> None:
        super().__init__()
        self.position, self.shift = (nn.Parameter(torch.randn(1, 4, 8, 8, dtype=torch.float64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.position + self.shift)


def test_gradients_that_are_dy_are_added_elsewhere() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(Embedding()), torch.randn(4, 4, 8, 8, dtype=torch.float64)
    expected = gradients(copy.deepcopy(net), x, is_recorded=False)
    set_segments(net, [Segment("", 0, 0, 1)])
    for result, other in zip(gradients(net, x, is_recorded=True), expected, strict=True):
        torch.testing.assert_close(result, other)


def test_autocast_counts_in_the_backward_pass_too() -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(4, 3, 8, 8)
    model = copy.deepcopy(net)
    set_segments(model, SEGMENTS[1])
    with torch.autocast("cpu", torch.bfloat16), Tape():
        result = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        expected = net(x)
    for y in (result, expected):
        y.float().square().sum().backward()
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)
    for one, other in zip(model.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=5e-2, atol=5e-2)


def test_without_a_tape_and_after_they_are_taken_back_modules_run_whole() -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(4, 3, 8, 8)
    calls: list[int] = []
    net.layers[0].register_forward_hook(lambda module, inputs, y: calls.append(len(y)))
    set_segments(net, SEGMENTS[0])
    net(x)
    with Tape():
        net(x)
    set_segments(net, ())
    with Tape():
        net(x)
    assert calls == [4, 2, 2, 4]


def test_a_single_tuned_layer_is_no_segment() -> None:
    net = Net()
    make_tunable(net.first)
    with pytest.raises(InvalidInputError, match="first is a single layer"):
        set_segments(net, [Segment("first", None, None, 1)])
