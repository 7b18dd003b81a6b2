"""Steps measured with a clock that layers move: what takes how long is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.clock.machine import FakeClock
from torch import Tensor, nn

from mucudnn.bench.scaling.steps import measure_steps
from mucudnn.words.errors import InvalidInputError


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
    clock = FakeClock()
    model = TwoLayers(clock)
    before = [parameter.clone() for parameter in model.parameters()]
    calls: list[float] = []
    measured = measure_steps(
        model, arguments_of, (4, 1, 4), clock, rounds=2, together=lambda: calls.append(clock.seconds)
    )
    assert measured.gradients == (("second.weight", 48), ("first.weight", 24))
    assert measured.size_bytes == 72
    assert [(step.local_batch, step.step_s) for step in measured.steps] == [(1, 6.0), (4, 24.0)]
    for step in measured.steps:  # 2 n forward, 2 n until the second layer, 2 n until the first
        assert step.ready == pytest.approx((4 / 6, 1.0))
        assert step.backward_end == 1.0
    assert len(calls) == 6  # before each of two sizes, in the round that does not count and in two
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new)
        assert new.grad is None or new.requires_grad


def test_nothing_to_reduce_is_refused() -> None:
    clock = FakeClock()
    model = TwoLayers(clock)
    x = nn.Parameter(torch.ones(1, 2))  # is what makes the step run
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(InvalidInputError, match="no parameter"):
        measure_steps(nn.ModuleList([model, nn.ParameterList([x])])[0], lambda n: (x,), (1,), clock)
