"""Values that a backward pass computes again: the same bits of gradients and states as if all had been kept."""

from __future__ import annotations

import copy
import gc
import itertools
import random
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mucudnn.kernels.memory import peak_allocated_bytes
from mucudnn.running import tape
from mucudnn.running.norms import TunedNorm, make_groups
from mucudnn.running.tape import ChangedOperandError, Tape
from mucudnn.solver.keeping import Choice

X = torch.randn(2, 3, 40, 40)


class Net(nn.Module):
    """Norms, activations in place, additions, concatenations, views, dropout, and a part under a checkpoint."""

    def __init__(self, kind: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(kind(16) for _ in range(4))
        self.last = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            z = F.relu(norm(conv(y)), inplace=number % 2 == 0)
            if number == 1:
                z = F.dropout(z, 0.3)
            if number == 2:
                z = checkpoint(torch.sin, z, use_reentrant=False)
            y = z + y if number < 3 else torch.cat((z, y.transpose(2, 3)), 1)
        y = F.max_pool2d(y, 2).mul_(1.5)
        chunks = y.chunk(2, 1)
        y = torch.cat((chunks[0] * chunks[1].sigmoid(), F.silu(chunks[1])), 1)
        return self.last(y.flatten(2).mean(2))


def trained(model: nn.Module, choices: Iterable[Choice] | None = None) -> list[Tensor]:
    """Return output, gradients and buffers of a step; choices are for the values of the forward pass in turn."""
    torch.manual_seed(1)
    if choices is None:
        y = model(X)
    else:
        with told_tape(choices):
            y = model(X)
    y.square().sum().backward()
    states = [y, torch.get_rng_state(), *model.buffers()]
    return [*states, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def told_tape(choices: Iterable[Choice]) -> Tape:
    """Return a tape with these choices, whatever the operators are."""

    class Told(Tape):
        def _choice(self, name: str) -> Choice:
            return next(drawn)

    drawn = iter(choices)
    return Told()


def random_choices(seed: int) -> Iterable[Choice]:
    drawn = random.Random(seed)
    while True:
        yield drawn.choice([*Choice])


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, lambda channels: nn.GroupNorm(4, channels)])
def test_steps_have_the_same_bits_whatever_is_computed_again(kind: Callable[[int], nn.Module]) -> None:
    torch.manual_seed(0)
    model = Net(kind)
    expected = trained(copy.deepcopy(model))
    for seed in range(12):
        for got, wanted in zip(trained(copy.deepcopy(model), random_choices(seed)), expected, strict=True):
            assert torch.equal(got, wanted), seed
    assert tape.recording() is None


def test_groups_are_values_too() -> None:
    torch.manual_seed(0)
    model = Net()
    make_groups(model, lambda module: module(X))
    assert any(isinstance(module, TunedNorm) and module.choices is not None for module in model.modules())
    expected = trained(copy.deepcopy(model))
    for seed in range(8):
        for got, wanted in zip(trained(copy.deepcopy(model), random_choices(seed)), expected, strict=True):
            assert torch.equal(got, wanted), seed


def test_dropped_values_are_freed_and_nothing_is_left_behind() -> None:
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.Sigmoid())))
    x = torch.randn(1, 8, 64, 64)

    def step(choice: Choice | None) -> None:
        with torch.enable_grad():
            if choice is None:
                y = model(x)
            else:
                with told_tape(iter([choice] * 100)):
                    y = model(x)
        forward_bytes.append(len(y))
        y.sum().backward()

    forward_bytes: list[int] = []
    for choice in (None, *Choice):
        step(choice)  # libraries keep buffers
    gc.disable()
    try:
        kept, each = (peak_allocated_bytes(lambda c=c: step(c)) for c in (None, Choice.EACH_TIME))  # type: ignore[misc]
        again = peak_allocated_bytes(lambda: step(Choice.EACH_TIME))
    finally:
        gc.enable()
    assert each < 0.8 * kept
    assert again < 0.8 * kept


def test_an_operand_that_was_changed_in_place_is_an_error() -> None:
    weight = torch.randn(8, 8, 3, 3, requires_grad=True)
    x = torch.randn(2, 8, 40, 40)
    with told_tape(iter([Choice.ONCE] * 10)):
        y = torch.sigmoid(F.conv2d(x, weight))
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(ChangedOperandError, match="changed in place"):
        y.sum().backward()


def test_what_is_overwritten_is_as_it_was_or_an_error() -> None:
    x = torch.randn(2, 8, 40, 40, requires_grad=True)
    for choice in Choice:
        with told_tape(iter([choice] * 10)):
            y = x * 2
            z = y * y
            y.add_(1)
        x.grad = None
        z.sum().backward()
        torch.testing.assert_close(x.grad, 8 * x.detach())
    other = torch.randn(2, 8, 40, 40)
    with told_tape(iter([Choice.ONCE] * 10)):
        y = x * other  # which existed before
    other.add_(1)
    with pytest.raises(ChangedOperandError, match="changed in place"):
        y.sum().backward()


def test_what_operations_in_place_have_computed_may_be_read_and_is_not_taken_for_changed() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.LeakyReLU(0.2, inplace=True))
    expected = trained(copy.deepcopy(model))
    for choice in Choice:
        for got, wanted in zip(trained(copy.deepcopy(model), itertools.repeat(choice)), expected, strict=True):
            assert torch.equal(got, wanted)


def test_norms_in_half_precision_have_the_same_bits_without_updating_statistics_again() -> None:
    x = torch.randn(4, 8, 40, 40).bfloat16().requires_grad_()
    for affine in (True, False):
        results = []
        for choice in (None, *Choice):
            norm, x.grad = nn.BatchNorm2d(8, affine=affine), None
            with nullcontext() if choice is None else told_tape(itertools.repeat(choice)):
                y = norm(x).square().sum()
            y.backward()
            results.append([x.grad, *norm.buffers()])
        for others in results[1:]:
            assert all(map(torch.equal, results[0], others))


def test_other_forward_passes_than_the_one_that_was_chosen_for() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sigmoid(), nn.Conv2d(8, 8, 3), nn.Tanh())
    expected = trained(copy.deepcopy(model))
    for names in ([], ["aten::relu"] * 4, ["aten::convolution"] * 4):
        other = copy.deepcopy(model)
        torch.manual_seed(1)
        with Tape([(name, Choice.EACH_TIME) for name in names]):
            y = other(X)
        y.square().sum().backward()
        for got, wanted in zip([p.grad for p in other.parameters()], expected[2:], strict=True):
            assert got is not None
            assert torch.equal(got, wanted)


def test_gradients_of_gradients() -> None:
    def penalty(model: nn.Module, recorded: Any) -> list[Tensor]:
        x = X.clone().requires_grad_()
        with recorded:
            y = model(x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sigmoid(), nn.Conv2d(8, 8, 3), nn.Tanh())
    expected = penalty(copy.deepcopy(model), torch.enable_grad())
    for seed in range(4):
        got = penalty(copy.deepcopy(model), told_tape(random_choices(seed)))
        assert all(map(torch.equal, got, expected))
