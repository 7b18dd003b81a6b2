"""Steps measured with a clock that layers move: what takes how long is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.clock.machine import FakeClock
from support.snapshots import assert_as_stored
from torch import Tensor, nn

from mucudnn.bench.results.variants import Variant
from mucudnn.bench.sources.trainee import mean_square
from mucudnn.bench.suites.scaling import (
    BOTH,
    MeasuredStep,
    MeasuredSteps,
    Point,
    Scaling,
    in_words,
    measure_steps,
    predict,
    scale_table,
)
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.terminal import Progress
from mucudnn.solver.all_reduce import AllReduce, Link, all_reduce_s

UP_TO, BATCH, RANKS = 8, 32, (1, 2, 4, 64)
MIB = 2**20
GRADIENTS = (MIB, 40 * MIB, 3 * MIB)  # bytes, the last layer's first
LINK = Link(1e-5, 1e9)


def made_up_device() -> MeasuredSteps:
    """Steps of 20 + 4 n ms with PyTorch's convolutions, of 10 + 4 n with ours; a tenth of them is the optimizer."""
    steps = {
        which: tuple(MeasuredStep(n, (before_ms + 4 * n) / 1e3, (0.5, 0.6, 0.9), 0.9) for n in (1, 4, UP_TO))
        for which, before_ms in ((Variant.TORCH, 20), (Variant.MUCUDNN, 10))
    }
    return MeasuredSteps(GRADIENTS, steps)


def made_up_points() -> list[Point]:
    return [*predict(made_up_device(), LINK, AllReduce.RING, RANKS, batch=BATCH, local_batch=UP_TO)]


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


def batch_of(n: int) -> tuple[Tensor, Tensor]:
    return torch.ones(n, 2), torch.zeros(n)


def test_steps_and_the_moments_of_their_gradients_are_measured() -> None:
    """Ours takes as long but a second less in the first layer."""
    clock = FakeClock()
    model = TwoLayers(clock)
    before = [parameter.clone() for parameter in model.parameters()]
    asked = []

    def tuned(one: nn.Module, images: Tensor, progress: Progress) -> nn.Module:
        asked.append(len(images))
        assert one is not model
        one.clock = clock
        one.first.register_forward_hook(lambda *_: clock.advance(-1))  # type: ignore[operator, union-attr]
        return one

    measured = measure_steps(model, batch_of, mean_square, (1, 4), tuned, clock, rounds=2)
    assert asked == [4, 1]
    assert measured.gradients == (48, 24)
    for which, more in ((Variant.TORCH, 0), (Variant.MUCUDNN, -1)):
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

    torchs, ours = measure_steps(model, batch_of, mean_square, (1, 4), tuned, clock).steps.values()
    assert ours == torchs


def test_nothing_to_reduce_is_refused() -> None:
    clock = FakeClock()
    model = TwoLayers(clock).requires_grad_(False)
    x = nn.Parameter(torch.ones(1, 2))  # is what makes the step run
    with pytest.raises(InvalidInputError, match="no parameter"):
        measure_steps(model, lambda n: (x, x), mean_square, (1,), lambda *_: model, clock)


TORCH, OURS = BOTH


def points(scaling: Scaling, which: Variant) -> list[Point]:
    return [point for point in made_up_points() if (point.scaling, point.convolutions) == (scaling, which)]


def test_steps_are_met_where_they_were_measured_and_between_and_beyond() -> None:
    device = made_up_device()
    for n in range(1, 33):
        assert device.step_s(TORCH, n) == pytest.approx((20 + 4 * n) / 1e3)
        assert device.step_s(OURS, n) == pytest.approx((10 + 4 * n) / 1e3)
    assert {(point.local_batch, point.is_extrapolated) for point in made_up_points()} >= {(8, False), (16, True)}


def test_a_batch_beyond_all_that_were_measured_takes_no_less_time() -> None:
    """As where the step of the smallest batch was disturbed."""
    steps = made_up_device()
    slow = replace(steps.steps[TORCH][0], step_s=1.0)
    device = replace(steps, steps={TORCH: (slow, *steps.steps[TORCH][1:])})
    assert all(device.step_s(TORCH, n) <= device.step_s(TORCH, n + 1) for n in range(8, 32))


def test_a_device_starves_below_the_batch_from_which_on_it_reaches_most_of_its_throughput() -> None:
    def step(n: int, step_s: float) -> MeasuredStep:
        return MeasuredStep(n, step_s, (0.9,) * 3, 0.9)

    steps = (step(1, 4.0), step(2, 4.0), step(4, 4.0), step(8, 8.0))  # 0.25, 0.5, 1 and 1 samples a second
    device = replace(made_up_device(), steps={OURS: steps})
    assert device.starving_below(OURS) == 4
    assert replace(device, steps={OURS: steps[2:]}).starving_below(OURS) == 4


def test_gradients_and_the_end_of_the_backward_pass_are_fractions_of_the_step() -> None:
    device = made_up_device()
    for which in BOTH:
        gradients, backward_end_s = device.moments(which, 6)
        step_s = device.step_s(which, 6)
        assert backward_end_s == pytest.approx(0.9 * step_s)
        assert [gradient.ready_s for gradient in gradients] == pytest.approx([0.5 * step_s, 0.6 * step_s, 0.9 * step_s])
        assert tuple(gradient.size_bytes for gradient in gradients) == GRADIENTS


def test_strong_scaling_shares_one_batch_and_weak_scaling_keeps_the_local_one() -> None:
    strong, weak = (points(scaling, OURS) for scaling in Scaling)
    assert [(p.ranks, p.local_batch, p.global_batch) for p in strong] == [(1, 32, 32), (2, 16, 32), (4, 8, 32)]
    assert [(p.ranks, p.local_batch, p.global_batch) for p in weak] == [
        (ranks, 8, 8 * ranks) for ranks in (1, 2, 4, 64)
    ]
    assert (strong[0].exposed_s, strong[0].sent_bytes, strong[0].efficiency) == (0, 0, 1)
    assert (strong[0].step_s, strong[0].throughput) == pytest.approx((0.138, 32 / 0.138))
    assert weak[1].efficiency == pytest.approx(weak[0].step_s / weak[1].step_s)
    assert strong[2].efficiency == pytest.approx(strong[0].step_s / (4 * strong[2].step_s))


def test_buckets_are_sent_one_after_the_other_and_what_ends_after_the_backward_pass_is_waited_for() -> None:
    found = points(Scaling.STRONG, OURS)[2]
    each_s = [all_reduce_s(AllReduce.RING, 4, size, LINK) for size in GRADIENTS]  # a bucket of 1 MiB, 40, and the rest
    (first, second, third), backward_end_s = made_up_device().moments(OURS, 8)
    end_s = max(first.ready_s + each_s[0], second.ready_s) + each_s[1]
    end_s = max(end_s, third.ready_s) + each_s[2]
    assert found.exposed_s == pytest.approx(end_s - backward_end_s)
    assert found.step_s == pytest.approx(found.compute_s + found.exposed_s)
    assert found.best_cap_exposed_s <= found.exposed_s


def test_it_is_told_as_stored() -> None:
    assert_as_stored("scale", scale_table("made up", made_up_points()), in_words(made_up_device()))
