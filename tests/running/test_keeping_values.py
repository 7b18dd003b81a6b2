"""Values of unusual kinds, and what is written meanwhile: within a budget, the bits of PyTorch, or an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import cast

import pytest
import torch
from support.keeping import X, accumulating, assert_same, keep, two_passes_before_one, within
from torch import Tensor, nn

from mucudnn.running.keeping import make_keeping
from mucudnn.running.norms import TunedNorm, make_groups
from mucudnn.running.tape import ChangedOperandError, Tape
from mucudnn.solver.keeping import Choice


def test_what_is_changed_after_the_forward_pass() -> None:
    """A result that no gradient needs may be changed. Of one that a gradient needs, a kept one may not, as always."""
    x = torch.cat((X, X))
    layers = nn.Sigmoid(), nn.Conv2d(3, 3, 3)
    for first, last in (layers, layers[::-1]):
        for choice in Choice:
            gradients = []
            for is_within in (True, False):
                model = make_keeping(copy.deepcopy(nn.Sequential(first, last, nn.Flatten(2))))
                names = [f"aten::{type(layer).__name__.lower()}" for layer in (first, last)]
                keep(model, [(name.replace("conv2d", "convolution"), choice) for name in names if is_within])
                y = model(x)
                if is_within:
                    with torch.no_grad():
                        y.mul_(2)
                if is_within and isinstance(last, nn.Sigmoid) and choice is Choice.KEPT:
                    with pytest.raises(ChangedOperandError, match="changed in place"):
                        y.sum().backward()
                else:
                    y.sum().backward()
                    gradients.append([parameter.grad for parameter in model.parameters()])
            torch.testing.assert_close(gradients[0], gradients[-1], rtol=0, atol=0)


class Odd(nn.Module):
    """Complex values and their conjugates, a sparse matrix, and memory that PyTorch does not see written."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.sparse = torch.eye(40).to_sparse()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.conv(x))
        waves = torch.fft.fft2(y, norm="ortho") / 20
        y = torch.fft.ifft2(waves * (waves * 1j).conj() * waves.sin()).imag
        filled = torch.zeros_like(y), torch.zeros(y.shape)
        for buffer in filled:
            buffer.numpy()[:] = 2
        columns = torch.sparse.mm(self.sparse, y.permute(3, 0, 1, 2).reshape(40, -1))
        return columns.sin().mean() + (y * filled[0] * filled[1]).mean()


def test_odd_values() -> None:
    torch.manual_seed(0)
    assert_same(accumulating, Odd(), seeds=12)


class Following(nn.Module):
    """Each forward pass changes a buffer, and reads it."""

    def __init__(self, change: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.conv, self.change = nn.Conv2d(3, 16, 3), change
        self.register_buffer("mean", torch.zeros(16, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        with torch.no_grad():
            self.change(self.mean, y.mean((0, 2, 3)).view(16, 1, 1))
        return (y - self.mean).sin()


def test_buffers_that_each_forward_pass_changes() -> None:
    changes: list[Callable[[Tensor, Tensor], object]] = [
        lambda mean, new: mean.lerp_(new, 0.5),
        lambda mean, new: mean.data.copy_(new),  # of which versions do not tell
    ]
    for change in changes:
        torch.manual_seed(0)
        assert_same(two_passes_before_one, Following(change))
    model = within(Following(changes[0]), 0)
    keep(model, [(name, Choice.ONCE) for name, _ in model.keeping.choices])
    y = model(X)
    model.get_buffer("mean").add_(1)  # out of sight of tapes
    model(X)
    with pytest.raises(ChangedOperandError, match="changed in place"):
        y.sum().backward()


class Writing(nn.Module):
    """Writes by lists, by ``out``, and by norms, over what gradients need."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        centered = y - self.norm.running_mean.view(16, 1, 1)  # type: ignore[union-attr]
        z = self.norm(centered.sin())
        with torch.no_grad():
            scale = torch.sigmoid(y * 0 + 1) / 100
            scales = scale * 2, scale * 3
            factor = 10 * (scales[0] + scales[1])
            torch.mul(scale, 5, out=scales[0])
            torch._foreach_mul_(scales[1:], 7)
        return z * factor * scales[0] * scales[1]


def test_all_kinds_of_writes() -> None:
    torch.manual_seed(0)
    assert_same(accumulating, Writing(), seeds=16)
    grouped = Writing()
    make_groups(grouped, lambda model: model(X))
    assert cast(TunedNorm, grouped.norm).choices is not None
    assert_same(accumulating, grouped, seeds=8)


def test_an_activation_in_place_may_be_held() -> None:
    for choice in Choice:
        gradients = []
        for is_within in (False, True):
            x = torch.cat((X, X)).requires_grad_()
            with Tape([(name, choice) for name in ("aten::mul.Tensor", "aten::relu_")]) if is_within else nullcontext():
                y = x * 2
                z = y.relu_()
                loss = (z * z).sum()
            loss.backward()
            gradients.append(x.grad)
        torch.testing.assert_close(*gradients, rtol=0, atol=0)


class Skip(nn.Module):
    """A concatenation of a tensor that waits for the gradient of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.tanh(self.first(x))
        return torch.cat([skip.sigmoid(), torch.tanh(self.last(skip))], 1)


def test_the_gradient_of_a_concatenation_is_freed() -> None:
    """Only the gradient of the tensor that was computed last, which is read next, is a view of it."""
    torch.manual_seed(0)
    model, found = Skip(), []
    for trained in (model, within(model, 0)):
        y = trained(X)
        bytes_of: list[tuple[int, int]] = []

        def note(dx: Tensor, bytes_of: list[tuple[int, int]] = bytes_of) -> None:
            bytes_of.append((dx.nbytes, dx.untyped_storage().nbytes()))

        for node, _ in y.grad_fn.next_functions:  # type: ignore[union-attr]
            node.register_prehook(lambda gradients, note=note: note(*gradients))  # type: ignore[union-attr]
        y.square().sum().backward()
        found.append([parameter.grad for parameter in trained.parameters()])
        last, skip = bytes_of
        assert last == (y.nbytes // 2, y.nbytes)
        assert skip == (y.nbytes // 2, y.nbytes // 2 if trained is not model else y.nbytes)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
