"""Deals work out over ranks, longest first."""

from __future__ import annotations

from collections.abc import Sequence


def deal(costs: Sequence[float], ranks: int) -> list[int]:
    """Return the rank, from 0, of each piece of work: the longest first, to the rank that has least to do so far.

    costs: of the pieces, in any unit; one that costs nothing goes to the rank with the fewest pieces. The last rank is
    done at most 4/3 - 1/(3 ranks) times as late as with the best dealing (Graham, 1969). The same costs always give
    the same answer.

    >>> deal([1, 5, 3, 3], ranks=2)
    [0, 0, 1, 1]
    """
    loads = [(0.0, 0, rank) for rank in range(ranks)]  # cost, number of pieces
    ranks_of = [0] * len(costs)
    for piece in sorted(range(len(costs)), key=lambda piece: -costs[piece]):
        load, count, rank = min(loads)
        ranks_of[piece] = rank
        loads[rank] = load + costs[piece], count + 1, rank
    return ranks_of
