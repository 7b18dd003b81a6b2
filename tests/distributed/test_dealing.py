"""Dealing work out over ranks, against every dealing that there is."""

from __future__ import annotations

from itertools import product

import numpy

from mucudnn.distributed.team import deal


def longest(costs: list[float], ranks_of: list[int], ranks: int) -> float:
    """When the last rank is done."""
    return max(sum(c for c, of in zip(costs, ranks_of, strict=True) if of == rank) for rank in range(ranks))


def test_no_rank_is_later_than_graham_allows() -> None:
    for seed, ranks in product(range(20), (1, 2, 3)):
        generator = numpy.random.default_rng(seed)
        costs = generator.pareto(1.0, size=int(generator.integers(1, 8))).tolist()
        best = min(longest(costs, [*dealt], ranks) for dealt in product(range(ranks), repeat=len(costs)))
        assert longest(costs, deal(costs, ranks), ranks) <= (4 / 3 - 1 / (3 * ranks)) * best * (1 + 1e-12), seed


def test_the_longest_goes_first() -> None:
    assert deal([1.0, 2.0, 3.0], 2) == [1, 1, 0]


def test_what_costs_nothing_is_dealt_out_too() -> None:
    assert sorted(deal([0.0] * 6, 3)) == [0, 0, 1, 1, 2, 2]


def test_more_ranks_than_pieces() -> None:
    assert sorted(deal([1.0, 1.0], 5)) == [0, 1]
    assert deal([], 2) == []


def test_the_order_of_ranks_does_not_depend_on_rounding() -> None:
    costs = [0.1] * 10
    assert deal(costs, 3) == deal([*costs], 3) == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
