"""Dealing work out over ranks, against every dealing that there is."""

from __future__ import annotations

from itertools import product

import numpy

from mucudnn.distributed import deal


def longest(costs: list[float], ranks_of: list[int], ranks: int) -> float:
    """When the last rank is done."""
    return max(sum(c for c, of in zip(costs, ranks_of, strict=True) if of == rank) for rank in range(ranks))


def test_no_rank_is_later_than_graham_allows() -> None:
    for seed, ranks in product(range(20), (1, 2, 3)):
        generator = numpy.random.default_rng(seed)
        costs = generator.pareto(1.0, size=int(generator.integers(1, 8))).tolist()
        best = min(longest(costs, [*dealt], ranks) for dealt in product(range(ranks), repeat=len(costs)))
        assert longest(costs, deal(costs, ranks), ranks) <= (4 / 3 - 1 / (3 * ranks)) * best * (1 + 1e-12), seed


def test_the_longest_goes_first_and_equal_loads_go_to_the_fewest_pieces() -> None:
    assert deal([1.0, 2.0, 3.0], 2) == [1, 1, 0]
    assert sorted(deal([0.0] * 6, 3)) == [0, 0, 1, 1, 2, 2]
    assert sorted(deal([1.0, 1.0], 5)) == [0, 1]
    assert deal([], 2) == []
    assert deal([0.1] * 10, 3) == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0], "whatever the rounding"
