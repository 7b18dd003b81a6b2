"""The race and the workbench, with algorithms of known cost, and once with torch's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.clock.machine import FORWARD, FakeAlgorithm, FakeClock, linear
from support.races import CLOCK, SIZES, fake, race_of, race_on, results_of

from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.core.records import Failure, Measurement
from mucudnn.measuring.candidates import find_candidates
from mucudnn.measuring.clocks import StoppingRule
from mucudnn.measuring.operands import random_operands
from mucudnn.measuring.workbench import Workbench


def test_measures_the_known_costs() -> None:
    one = FakeAlgorithm(
        "one", CLOCK, linear(0.01, 0.002), setup_s=0.5, prepared_bytes=3, scratch_bytes_per_sample=5, error=1e-3
    )
    result = results_of(one)["one", 4]
    assert isinstance(result, Measurement)
    assert result.step_s == pytest.approx(0.042)
    assert result.setup_s == pytest.approx(0.5)
    assert (result.prepared_bytes, result.scratch_bytes) == (3, 20)
    assert result.relative_error == pytest.approx(1e-3, rel=1e-2)
    assert result.samples >= 3


def test_what_is_not_supported_is_kept_with_the_reason_and_never_run() -> None:
    never, partly = fake("never", unsupported="no such filter"), fake("partly", unsupported_sizes=[2])
    candidates, failures = find_candidates(FORWARD, [never, partly], SIZES)
    assert [c.micro_config.micro_batch_size for c in candidates] == [1, 4, 8]
    assert [(f.micro_config.algorithm, f.reason) for f in failures] == [
        ("never", "no such filter"),
        ("partly", "not this size"),
    ]
    assert not never.sizes_run


def test_undivided_torch_is_a_candidate_whatever_is_said_of_slices() -> None:
    candidates, _ = find_candidates(FORWARD, [fake("native", unsupported_sizes=SIZES)], SIZES)
    assert [c.micro_batch_size for c in candidates] == [8]


def test_a_candidate_that_fails_is_recorded_and_the_others_go_on() -> None:
    results = results_of(fake("one", failing_sizes=[4]), fake("other"))
    assert results["one", 4] == Failure(results["one", 4].micro_config, "out of memory at 4")
    assert isinstance(results["one", 2], Measurement)
    assert isinstance(results["other", 8], Measurement)


def test_a_workspace_that_no_memory_can_hold_is_a_failure() -> None:
    result = results_of(fake("huge", prepared_bytes=2**60))["huge", 1]
    assert isinstance(result, Failure)
    assert "available" in result.reason


def test_a_hopeless_algorithm_is_not_measured_at_every_size() -> None:
    slow = fake("slow", 0.05, scratch_bytes_per_sample=10)
    results = results_of(fake("fast", 0.01), slow)
    first = results["slow", 1]
    assert isinstance(first, Measurement)
    assert first.samples < 3
    assert ("slow", 8) not in results
    assert 8 not in slow.sizes_run


def test_a_slow_algorithm_stays_if_it_needs_less_workspace() -> None:
    results = results_of(fake("fast", 0.01, prepared_bytes=100), fake("small", 0.05))
    small = results["small", 1]
    assert isinstance(small, Measurement)
    assert small.samples >= 3


def test_small_micro_batches_are_dropped_for_no_larger_one() -> None:
    """A remainder of one sample can only be computed by micro-batches of one."""
    improving = FakeAlgorithm("improving", CLOCK, lambda size: 0.05)  # the same for 1 and for 8 samples
    results = results_of(improving)
    samples = {size: r.samples for (_, size), r in results.items() if isinstance(r, Measurement)}
    assert samples.keys() == set(SIZES)
    assert samples[1] >= 3


def test_an_algorithm_above_the_error_bound_is_measured_once_with_one_sample() -> None:
    results = results_of(fake("wrong", 0.001, error=1e-2), fake("right"), max_relative_error=1e-5)
    wrong = results["wrong", 1]
    assert isinstance(wrong, Measurement)
    assert wrong.samples == 1
    assert wrong.relative_error > 1e-5
    assert {size for name, size in results if name == "wrong"} == {1}


def test_the_time_limit_ends_the_race_but_torch_is_measured() -> None:
    results = results_of(fake("native", 1.0), fake("other", 0.9), time_limit_s=0.5)
    assert {name for name, _ in results} == {"native"}
    assert {size for _, size in results} == {min(SIZES), max(SIZES)}, "the first that fits, and the baseline"


def test_nothing_is_measured_twice() -> None:
    algorithms = [
        fake("fast", 0.01),
        fake("slow", 0.04, scratch_bytes_per_sample=1),
        fake("failing", failing_sizes=[2]),
    ]
    first = list(race_of(*algorithms).measure())
    known = tuple(r for r in first if isinstance(r, Measurement))
    failed = tuple(r for r in first if isinstance(r, Failure))
    again = race_of(*algorithms, stored=known, stored_failures=failed)
    assert again.standings.missing() == []
    assert list(again.measure()) == []


def test_what_is_allocated_inside_is_declared_with_the_scratch_that_is_handed_in() -> None:
    one = fake("one", prepared_bytes=3, scratch_bytes_per_sample=5, internal_bytes_per_sample=2)
    result = results_of(one)["one", 4]
    assert isinstance(result, Measurement)
    assert (result.prepared_bytes, result.scratch_bytes) == (3, 28)


def test_what_is_allocated_inside_counts_for_the_limit() -> None:
    one = fake("one", prepared_bytes=3, scratch_bytes_per_sample=5, internal_bytes_per_sample=2)
    assert {size for _, size in results_of(one, limit_bytes=31)} == {1, 2, 4}
    assert {size for _, size in results_of(one, limit_bytes=30)} == {1, 2}


def test_nothing_is_run_to_count_bytes_of_what_is_over_the_limit_by_those_handed_in() -> None:
    one = fake("one", scratch_bytes_per_sample=10, internal_bytes_per_sample=1)
    results_of(one, limit_bytes=22)
    assert set(one.internals_asked) == {1, 2}


def test_what_stored_micro_configs_allocate_inside_is_not_counted_again() -> None:
    one = fake("one", scratch_bytes_per_sample=4, internal_bytes_per_sample=3)
    known = tuple(r for r in race_of(one).measure() if isinstance(r, Measurement))
    one.internals_asked.clear()
    assert [c.workspace_bytes() for c in race_of(one, stored=known).candidates] == [7, 14, 28, 56]
    assert not one.internals_asked


def test_a_stream_goes_through_fresh_slices_and_wraps_around() -> None:
    one = fake("one")
    candidates, _ = find_candidates(FORWARD, [one], [2])
    next_step = Workbench(FORWARD, 5).stream(candidates[0])
    for _ in range(3):
        next_step()
    sample = FORWARD.c * FORWARD.h * FORWARD.w
    assert one.offsets_run == [0, 2 * sample, 0]


def test_operands_are_random_numbers_in_the_problem_s_format_and_leave_the_global_generator_alone() -> None:
    problem = ConvProblem(
        Operation.FORWARD, c=4, h=7, w=6, k=5, r=3, s=3, dtype="bfloat16", memory_format=MemoryFormat.CHANNELS_LAST
    )
    before = torch.random.get_rng_state()
    operands = random_operands(problem, 3)
    assert torch.equal(before, torch.random.get_rng_state())
    assert operands.x.shape == problem.x_shape(3)
    assert operands.y.shape == problem.y_shape(3)
    for tensor in (operands.x, operands.w, operands.y):
        assert tensor.dtype is torch.bfloat16
        assert tensor.is_contiguous(memory_format=torch.channels_last)
        assert (tensor != 0).float().mean() > 0.9


@pytest.mark.parametrize("may_keep", [False, True])
def test_what_may_be_kept_counts_neither_against_the_limit_nor_in_the_race(may_keep: bool) -> None:
    costly = fake("costly", 0.01, setup_s=5.0, prepared_bytes=1000)
    results = results_of(fake("native", 0.02), costly, limit_bytes=None if not may_keep else 100, may_keep=may_keep)
    samples = {
        size: r.samples for (name, size), r in results.items() if name == "costly" and isinstance(r, Measurement)
    }
    assert (max(samples.values()) >= 3) is may_keep  # otherwise the first samples tell that it cannot win
    assert not any(name == "costly" for name, _ in results_of(fake("native"), costly, limit_bytes=100))


def test_when_time_is_up_one_that_fits_is_still_measured() -> None:
    native = fake("native", scratch_bytes_per_sample=1000)
    results = results_of(native, fake("late"), fake("later"), limit_bytes=10, time_limit_s=0.0)
    assert [name for name, _ in results if name != "native"] == ["late"]


def test_rules_are_those_of_the_clock() -> None:
    class Coarse(FakeClock):
        step_rule = StoppingRule(noise=-1.0, patience=100, time_limit_s=0.5, sample_s=0.0)

    clock = Coarse()
    candidates, _ = find_candidates(FORWARD, [FakeAlgorithm("one", clock, linear(0.02))], [1])
    (result,) = race_on(FORWARD, 8, candidates, clock).measure()
    assert isinstance(result, Measurement)
    assert result.samples == 24  # and a warm-up


def test_a_pass_is_over_all_slices() -> None:
    passes: set[int] = set()

    class Noting(FakeClock):
        def time(self, function: Callable[[], object], calls: int, calls_per_pass: int = 1) -> float:
            passes.add(calls_per_pass)
            return super().time(function, calls, calls_per_pass)

    clock = Noting()
    candidates, _ = find_candidates(FORWARD, [FakeAlgorithm("one", clock, linear(0.02))], SIZES)
    list(race_on(FORWARD, max(SIZES), candidates, clock).measure())
    assert passes == {8, 4, 2, 1}
