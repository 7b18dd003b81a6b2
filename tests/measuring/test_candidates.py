"""Counting of what candidates allocate: in which order, and once."""

from __future__ import annotations

from dataclasses import replace

from support.clock.machine import FORWARD, FakeAlgorithm
from support.races import SIZES, fake

from mucudnn.core.problem import ConvProblem
from mucudnn.core.records import MicroConfig
from mucudnn.kernels.algorithm import BaseAlgorithm
from mucudnn.measuring.candidates import Counted, by_cost_of_counting, count_once, find_candidates


class Foreign(FakeAlgorithm):
    def is_foreign(self, problem: ConvProblem) -> bool:
        return True


class CountedInRuns(FakeAlgorithm):
    internal_bytes = BaseAlgorithm.internal_bytes  # type: ignore[assignment]


def test_what_costs_least_to_count_comes_first() -> None:
    runs = CountedInRuns("runs", fake("clock").clock, lambda n: 0.01)
    torchs, proven = replace(runs, name="native"), Foreign("proven", runs.clock, runs.step_s)
    candidates, _ = find_candidates(FORWARD, [runs, proven, fake("declared"), torchs], SIZES)
    groups = by_cost_of_counting(candidates, MicroConfig("native", max(SIZES)))
    names = [sorted({(c.algorithm.name, c.micro_batch_size) for c in group}) for group in groups]
    assert names == [
        [("native", 8)],
        [("declared", n) for n in SIZES],
        [("proven", n) for n in SIZES],
        [("native", 1)],
        [("native", 2), ("native", 4)],
        [("runs", n) for n in SIZES],
    ]


def test_bytes_are_counted_once_even_if_that_fails() -> None:
    class Failing(FakeAlgorithm):
        def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
            super().internal_bytes(problem, micro_batch_size)
            raise MemoryError

    right = fake("right", scratch_bytes_per_sample=5, internal_bytes_per_sample=2)
    wrong, counted = Failing("wrong", right.clock, right.step_s), Counted()
    for algorithm, scratch_bytes in ((right, 28), (wrong, None)):
        (candidate,), _ = find_candidates(FORWARD, [algorithm], [4])
        assert [count_once(candidate, counted) for _ in range(2)] == [scratch_bytes] * 2
        assert algorithm.internals_asked == [4]
