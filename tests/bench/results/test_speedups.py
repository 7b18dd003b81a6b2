"""Speedups and their intervals: paired rounds, known distributions, and what too few samples do not tell."""

from __future__ import annotations

from math import isnan
from random import Random
from statistics import median

import pytest

from mucudnn.bench.results.statistics import speedup_of


def test_the_ratio_is_that_of_the_sums_of_medians() -> None:
    torch, ours = [[0.3, 0.1, 0.2, 9.0], [6.0] * 4], [[0.1, 0.2, 0.3, 0.1], [3.0] * 4]
    expected = (median(torch[0]) + 6) / (median(ours[0]) + 3)
    assert speedup_of(torch, ours).value == pytest.approx(expected)


def test_slow_rounds_cancel() -> None:
    """Rounds that differ tenfold, with torch twice as slow in each, give an interval without width."""
    ours = [0.1, 1.0, 0.3, 0.2, 0.7]
    found = speedup_of([[2 * time for time in ours]], [ours])
    assert found.low == pytest.approx(2) == found.high
    shuffled = speedup_of([[0.2, 0.4, 0.6, 2.0, 1.4]], [ours])
    assert shuffled.low < 1.5 < 2.5 < shuffled.high


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    random, hits = Random(1), 0
    for _ in range(200):
        ours = [random.lognormvariate(0, 0.1) for _ in range(15)]
        torch = [1.5 * random.lognormvariate(0, 0.1) for _ in range(15)]
        found = speedup_of([torch], [ours])
        hits += found.low <= 1.5 <= found.high
    assert 0.9 < hits / 200 <= 1


def test_without_paired_rounds_there_is_no_interval_and_without_samples_no_speedup() -> None:
    for torch, ours in (([0.2, 0.2], [0.1, 0.1]), ([0.2, 0.2, 0.2], [0.1, 0.1, 0.1, 0.1])):
        found = speedup_of([torch], [ours])
        assert found.value == 2
        assert isnan(found.low)
        assert isnan(found.high)
    for torch, ours in (([[]], [[0.1]]), ([[0.1]], [[]]), ([], [])):
        assert isnan(speedup_of(torch, ours).value)
