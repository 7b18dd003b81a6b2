"""Steps measured with a clock that layers move: what takes how long is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.clock.machine import FakeClock
from torch import Tensor, nn

from mucudnn.bench.suites.scaling.steps import Convolutions, measure_steps
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.terminal import Progress


class _Slow(torch.autograd.Function):
    """Moves the clock by a second for each sample forward, by two backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: FakeClock) -> Tensor:
        ctx.clock = clock
        clock.advance(len(x))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.clock.advance(2 * len(dy))
        return dy, None


class TwoLayers(nn.Module):
    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock = clock
        self.first, self.second = nn.Linear(2, 3, bias=False), nn.Linear(3, 4, bias=False)
        self.frozen = nn.Parameter(torch.zeros(9), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = _Slow.apply(self.first(x), self.clock)  # type: ignore[no-untyped-call]
        return _Slow.apply(self.second(x), self.clock)  # type: ignore[no-untyped-call, no-any-return]


def arguments_of(n: int) -> tuple[Tensor, ...]:
    return (torch.ones(n, 2),)


def test_steps_and_the_moments_of_their_gradients_are_measured() -> None:
    """Ours takes as long but a second less in the first layer."""
    clock = FakeClock()
    model = TwoLayers(clock)
    before = [parameter.clone() for parameter in model.parameters()]
    asked = []

    def tuned(one: nn.Module, arguments: tuple[Tensor, ...], progress: Progress) -> nn.Module:
        asked.append(len(arguments[0]))
        assert one is not model
        one.clock = clock
        one.first.register_forward_hook(lambda *_: clock.advance(-1))  # type: ignore[operator, union-attr]
        return one

    measured = measure_steps(model, arguments_of, (1, 4), tuned, clock, rounds=2)
    assert asked == [4, 1]
    assert measured.gradients == (48, 24)
    for which, more in ((Convolutions.TORCH, 0), (Convolutions.MUCUDNN, -1)):
        steps = measured.steps[which]
        assert [(step.local_batch, step.step_s) for step in steps] == [(1, 6.0 + more), (4, 24.0 + more)]
        for step in steps:  # 2 n forward, 2 n until the second layer, 2 n until the first
            assert step.ready == pytest.approx(((4 * step.local_batch + more) / step.step_s, 1.0))
            assert step.backward_end == 1.0
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new)
        assert new.grad is None or new.requires_grad


def test_where_ours_is_slower_torchs_counts() -> None:
    clock = FakeClock()
    model = TwoLayers(clock)

    def tuned(one: nn.Module, *_: object) -> nn.Module:
        one.clock = clock
        one.first.register_forward_hook(lambda *_: clock.advance(1))  # type: ignore[operator, union-attr]
        return one

    torchs, ours = measure_steps(model, arguments_of, (1, 4), tuned, clock).steps.values()
    assert ours == torchs


def test_nothing_to_reduce_is_refused() -> None:
    clock = FakeClock()
    model = TwoLayers(clock).requires_grad_(False)
    x = nn.Parameter(torch.ones(1, 2))  # is what makes the step run
    with pytest.raises(InvalidInputError, match="no parameter"):
        measure_steps(model, lambda n: (x,), (1,), lambda *_: model, clock)
