"""Shares of unlike devices against all shares there are."""

from __future__ import annotations

from itertools import product
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mucudnn.solver.shares import best_shares, equal_shares
from mucudnn.words.errors import InfeasibleError, InvalidInputError

BATCH = 7
TIMES = st.sampled_from([0.0, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0, inf])
CURVES = st.lists(st.lists(TIMES, min_size=BATCH + 1, max_size=BATCH + 1), min_size=1, max_size=4)


@settings(max_examples=100)
@given(curves=CURVES)
def test_the_shares_are_the_best_of_all_whatever_the_curves_are(curves: list[list[float]]) -> None:
    every = [shares for shares in product(range(BATCH + 1), repeat=len(curves)) if sum(shares) == BATCH]
    costs = [[curve[n] for curve, n in zip(curves, shares, strict=True)] for shares in every]
    least = min((max(times), sum(times)) for times in costs)
    if least[0] == inf:
        with pytest.raises(InfeasibleError, match="7 samples"):
            best_shares(curves, BATCH)
        return
    best = best_shares(curves, BATCH)
    assert sum(best.samples) == BATCH
    assert best.times_s == tuple(curve[n] for curve, n in zip(curves, best.samples, strict=True))
    assert (best.step_s, sum(best.times_s)) == least


def test_a_device_of_three_times_the_speed_takes_three_times_as_much() -> None:
    curves = [[3.0 * n for n in range(101)], [1.0 * n for n in range(101)]]
    best = best_shares(curves, 100)
    assert best.samples == (25, 75)
    assert best.step_s == 75
    assert equal_shares(curves, 100).step_s == 150


def test_a_device_too_slow_to_help_takes_nothing() -> None:
    assert best_shares([[0, 1, 2, 3], [0, 9, 9, 9]], 3).samples == (3, 0)


def test_a_step_in_the_curve_is_used_to_its_end() -> None:
    stairs = [0.0, *(4.0 * (1 + (n - 1) // 4) for n in range(1, 17))]  # a device that computes four at a time
    line = [1.5 * n for n in range(17)]
    assert best_shares([stairs, line], 16).samples == (12, 4)


def test_equal_shares_give_the_rest_to_the_first() -> None:
    assert equal_shares([[float(n) for n in range(9)]] * 3, 8).samples == (3, 3, 2)


@pytest.mark.parametrize(
    ("curves", "batch"), [([], 1), ([[0.0, 1.0]], 2), ([[0.0, -1.0]], 1), ([[0.0, nan]], 1), ([[0.0, 1.0]], 0)]
)
def test_what_is_no_curve_is_refused(curves: list[list[float]], batch: int) -> None:
    for of in (best_shares, equal_shares):
        with pytest.raises(InvalidInputError):
            of(curves, batch)
