"""Predicted steps from known times: torch takes 4 + n ms a convolution, ours n ms; there are two, and a rest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.problems.made_up_scaling import GRADIENTS, MIB, RING, UP_TO, made_up_device, made_up_result, made_up_tuning
from support.problems.made_up_sweeps import layer, measured_ms, tuning

from mucudnn.bench.scaling.local_batches import Convolutions, local_batches
from mucudnn.bench.scaling.prediction import Device, Point, Scaling, predict
from mucudnn.solver.all_reduce import all_reduce_s
from mucudnn.words.communication import Link
from mucudnn.words.config import Config

TORCH, OURS = Convolutions


def point(scaling: Scaling, which: Convolutions, ranks: int) -> Point:
    (found,) = [p for p in made_up_result().of(scaling, which) if p.ranks == ranks]
    return found


def test_local_batches_are_solved_beyond_what_was_tuned() -> None:
    solved = local_batches(made_up_tuning(), UP_TO, 32)
    assert solved.measured == (1, 2, 4, 8)
    assert solved.largest == 32
    n = np.arange(1, 33)
    assert solved.times_s[TORCH][1:] == pytest.approx(2 * (4 + n) / 1e3)  # measured, between, and beyond
    even = n[1::2]
    assert solved.times_s[OURS][even] == pytest.approx(2 * even / 1e3)  # of micro-batches of two and more
    assert solved.times_s[OURS][1] == solved.times_s[TORCH][1]  # never slower than torch's own


def test_a_limit_that_holds_torchs_own_too_is_kept() -> None:
    large = [measured_ms("native", n, 1.0, 100) for n in (1, 2)] + [measured_ms("slow", n, 5.0 * n, 1) for n in (1, 2)]
    held = tuning(layer(large, 2), limit_bytes=50)
    assert local_batches(held, 2, 2).times_s[OURS][1:] == pytest.approx([5e-3, 10e-3])
    free = replace(held, config=Config(workspace_limit=None))
    assert local_batches(free, 2, 2).times_s[OURS][1:] == pytest.approx([1e-3, 1e-3])


def test_the_rest_is_what_convolutions_leave_of_a_step() -> None:
    device = made_up_device()
    n = np.arange(1, 33)
    assert device.rest_s[1:] == pytest.approx((10 + 2 * n) / 1e3)
    assert device.compute_s(TORCH)[1:] == pytest.approx((2 * (4 + n) + 10 + 2 * n) / 1e3)
    assert device.is_extrapolated(9)
    assert not device.is_extrapolated(8)


def test_steps_of_ours_are_met_where_they_were_measured() -> None:
    """Between them convolutions take by as much longer as at the sizes beside."""
    known = made_up_device()
    alone_s, rest_s = known.convolutions.times_s[OURS], known.rest_s
    measured = [
        replace(step, step_s=(1 + step.local_batch / 10) * alone_s[step.local_batch] + rest_s[step.local_batch])
        for step in known.steps.steps
    ]
    device = Device(known.convolutions, known.steps, ours=replace(known.steps, steps=tuple(measured)))
    for step in measured:
        assert device.compute_s(OURS)[step.local_batch] == pytest.approx(step.step_s)
    first, second = (step.local_batch for step in measured[-2:])
    between = (first + second) // 2
    factor = np.interp(between, [first, second], [1 + first / 10, 1 + second / 10])
    assert device.compute_s(OURS)[between] == pytest.approx(factor * alone_s[between] + rest_s[between])
    assert device.compute_s(TORCH) == pytest.approx(known.compute_s(TORCH))


def test_a_batch_beyond_all_that_were_measured_takes_no_less_time() -> None:
    """The rest of a step that was disturbed at the smallest batch seems to fall: it is not extrapolated below 0."""
    known = made_up_device()
    slow = replace(known.steps.steps[0], step_s=0.035)
    for steps in (known.steps, replace(known.steps, steps=(slow, *known.steps.steps[1:]))):
        for ours in (None, steps):
            device = Device(known.convolutions, steps, ours=ours)
            for which in Convolutions:
                even_s = device.compute_s(which)[UP_TO::2]
                assert (np.diff(even_s) >= 0).all()
                assert even_s[-1] > even_s[0]


def test_ranks_that_share_a_machine_slow_each_other_and_one_alone_is_not_slowed() -> None:
    known = made_up_device()
    both = [
        replace(step, step_s=factor * step.step_s) for step, factor in zip(known.steps.steps, (1, 2, 2), strict=True)
    ]
    device = Device(known.convolutions, known.steps, replace(known.steps, steps=tuple(both)))
    assert device.slowdown[[1, 2, 4, 6, 8, 32]] == pytest.approx([1, 4 / 3, 2, 2, 2, 2])
    alone, two, *_ = predict(device, RING, (1, 2), batch=16, local_batch=8)
    assert (alone.compute_s, two.compute_s) == pytest.approx(
        (device.compute_s(TORCH)[16], 2 * device.compute_s(TORCH)[8])
    )
    undisturbed = predict(known, RING, (2,), batch=16, local_batch=8)[0]
    slow = replace(RING, link=Link(2 * RING.link.latency_s, RING.link.bytes_per_s / 2))
    assert predict(device, slow, (2,), batch=16, local_batch=8)[0].step_s == pytest.approx(2 * undisturbed.step_s)


def test_gradients_come_earlier_with_faster_convolutions_and_the_optimizer_takes_as_long() -> None:
    device = made_up_device()
    for which in Convolutions:
        gradients, backward_end_s = device.gradients(which, 8)
        optimizer_s = 0.1 * device.compute_s(TORCH)[8]
        assert backward_end_s == pytest.approx(device.compute_s(which)[8] - optimizer_s)
        assert [g.ready_s / backward_end_s for g in gradients] == pytest.approx([5 / 9, 6 / 9, 1])
        assert [g.size_bytes for g in gradients] == [size for _, size in GRADIENTS]


def test_strong_scaling_shares_one_batch_and_weak_scaling_keeps_the_local_one() -> None:
    strong, weak = (made_up_result().of(scaling, OURS) for scaling in Scaling)
    assert [(p.ranks, p.local_batch, p.global_batch) for p in strong] == [(1, 32, 32), (2, 16, 32), (4, 8, 32)]
    assert [(p.ranks, p.local_batch, p.global_batch) for p in weak] == [
        (ranks, 8, 8 * ranks) for ranks in (1, 2, 4, 64)
    ]
    for alone, step_s in ((point(Scaling.STRONG, TORCH, 1), 0.146), (strong[0], 0.138)):
        assert (alone.exposed_s, alone.all_reduces_s, alone.bound_s, alone.efficiency) == (0, 0, 0, 1)
        assert (alone.step_s, alone.throughput) == pytest.approx((step_s, 32 / step_s))
    assert weak[0].efficiency == 1
    assert weak[1].efficiency == pytest.approx(weak[0].step_s / weak[1].step_s)
    assert strong[2].efficiency == pytest.approx(strong[0].step_s / (4 * strong[2].step_s))


def test_buckets_are_sent_one_after_the_other_and_what_ends_after_the_backward_pass_is_waited_for() -> None:
    found = point(Scaling.STRONG, OURS, 4)
    assert found.default_buckets == 3  # a first of 1 MiB, one of 40, and what is left
    each_s = [all_reduce_s(RING.all_reduce, 4, size, RING.link) for _, size in GRADIENTS]
    (first, second, third), backward_end_s = made_up_device().gradients(OURS, 8)
    end_s = max(first.ready_s + each_s[0], second.ready_s) + each_s[1]
    end_s = max(end_s, third.ready_s) + each_s[2]
    assert found.exposed_s == pytest.approx(end_s - backward_end_s)
    assert found.all_reduces_s == pytest.approx(sum(each_s))
    assert found.all_reduces_s >= found.bound_s == pytest.approx(1.5 * 44 * MIB / 1e9)
    assert found.merged_exposed_s <= found.best_cap_exposed_s <= found.exposed_s
    assert found.communication == pytest.approx(found.exposed_s / found.step_s)
