"""Candidates that a source offers: foreign code, which is checked at every size, and may fail in any way."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.clock.machine import FORWARD, FakeAlgorithm, FakeClock, linear
from support.cudnn.backend import RANDOM, FakeBackend
from support.races import CLOCK, fake, race_on, results_of

from mucudnn.core.errors import BrokenDeviceError
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Failure, Measurement, MicroConfig
from mucudnn.kernels.algorithm import Workspace
from mucudnn.kernels.cudnn.algorithms import CudnnEngines
from mucudnn.kernels.cudnn.backend import Plan
from mucudnn.measuring.candidates import find_candidates


def test_what_a_source_offers_is_checked_at_every_size_and_ours_once() -> None:
    foreign, ours = fake("cudnn:7", 0.01, prepared_bytes=1), fake("ours", 0.01)
    for one in (foreign, ours):
        results_of(one)
    for size in (2, 4):  # ours is checked at the smallest
        assert foreign.sizes_run.count(size) > ours.sizes_run.count(size)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (float("nan"), "cudnn:7 (version 91900): the result is not finite"),
        (0.5, "cudnn:7 (version 91900): the result is wrong: its relative error is 0.5"),
    ],
)
def test_one_that_is_unsound_is_named_with_its_version_and_never_timed(error: float, reason: str) -> None:
    unsound = fake("cudnn:7", error=error, version=91900)
    results = results_of(unsound, fake("native"))
    (failure,) = (r for r in results.values() if isinstance(r, Failure))
    assert (failure.reason, failure.is_lasting) == (reason, True)
    assert unsound.sizes_run == [8]


class Shrinking(FakeAlgorithm):
    """Needs 80 bytes for a sample, and 10 less for each further one, as an engine that splits its work."""

    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        return Workspace(0, 90 - 10 * micro_batch_size)


def test_a_source_may_offer_what_needs_less_workspace_for_more_samples() -> None:
    for limit_bytes, is_measured in ((10, True), (9, False)):
        results = results_of(Shrinking("cudnn:7", CLOCK, linear(0.01)), limit_bytes=limit_bytes)
        assert isinstance(results.get(("cudnn:7", 8)), Measurement) is is_measured


class BreakableClock(FakeClock):
    """Of a device that reports the same error for ever after ``broken``."""

    broken = False

    def now(self) -> float:
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")
        return super().now()

    def time(self, function: Callable[[], object], calls: int, calls_per_pass: int = 1) -> float:
        elapsed_s = super().time(function, calls, calls_per_pass)
        self.now()
        return elapsed_s


def breaking(clock: BreakableClock, after: int, step_s: Callable[[int], float]) -> FakeAlgorithm:
    class Breaking(FakeAlgorithm):
        def step(self, *operands: object) -> None:  # type: ignore[override]
            super().step(*operands)  # type: ignore[arg-type]
            clock.broken = clock.broken or len(self.sizes_run) > after

    return Breaking("cudnn:7", clock, step_s, version=91900, scratch_bytes_per_sample=1)


@pytest.mark.parametrize("after", [0, 1, 2, 3])  # steps: in the check, in the probe, in the first sample, in the second
def test_one_that_breaks_the_device_is_recorded_and_ends_the_measuring(after: int) -> None:
    clock = BreakableClock()
    algorithms = [
        FakeAlgorithm("native", clock, linear(0.02)),
        breaking(clock, after, linear(0.01)),
        FakeAlgorithm("cudnn:9", clock, linear(0.01)),
    ]
    candidates, _ = find_candidates(FORWARD, algorithms, [1])
    results: list[Measurement | Failure] = []
    reason = "cudnn:7 (version 91900) left the device unusable: CUDA error: an illegal memory access was encountered"
    with pytest.raises(BrokenDeviceError, match=re.escape(reason)) as error:
        results.extend(race_on(FORWARD, 8, candidates, clock).measure())
    assert isinstance(results[-1], Failure)
    assert results[-1] == Failure(MicroConfig("cudnn:7", 1), reason)
    assert "micro-batches of 1" in str(error.value)
    assert "start the process anew" in str(error.value)


def takes_a_while(plan: Plan) -> None:
    """A backend that takes no time would be run again and again, to be timed at all."""
    CLOCK.advance(0.01)


@pytest.mark.parametrize("micro_batch_size", [2, 4])
def test_an_engine_that_does_not_add_in_place_is_wrong_there_and_right_with_a_temporary(micro_batch_size: int) -> None:
    class Overwriting(FakeBackend):
        def execute(self, plan: Plan, *rest: Any) -> None:
            super().execute(replace(plan, beta=0.0) if plan.config == RANDOM else plan, *rest)

    problem = FORWARD.with_operation(Operation.BACKWARD_FILTER)
    offered = CudnnEngines(Overwriting(started=takes_a_while)).offered(problem, [micro_batch_size])
    candidates, _ = find_candidates(problem, offered, [micro_batch_size])
    results = {r.micro_config.algorithm: r for r in race_on(problem, 4, candidates, CLOCK).measure()}
    failure = results.pop("cudnn:9 k2=-1 in-place")
    assert isinstance(failure, Failure)
    assert "the result is wrong: its relative error is 0.5" in failure.reason
    assert {"cudnn:9 k2=-1", "cudnn:7", "cudnn:7 in-place"} <= results.keys()
    assert all(isinstance(r, Measurement) and r.relative_error < 1e-6 for r in results.values())
