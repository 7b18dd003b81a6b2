"""The time of an all-reduce over p ranks in the alpha-beta model.

A message of n bytes takes alpha + n beta, where alpha is the latency and beta the inverse of the bandwidth. In each
round a rank sends one message and receives one. An algorithm is described by two numbers: its rounds, and its volume,
the bytes on the critical path as a multiple of the data. The additions are not counted.

If p is not a power of two, the butterfly and Rabenseifner's algorithm begin and end with an additional round, in which
the ranks beyond the largest power of two below p send all their data to a partner and receive the sum, as in MPICH.

Sources: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH (2005); Chan,
Heimlich, Purkayastha and van de Geijn, Collective communication: theory, practice, and experience (2007).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.values import real, settle, whole


class AllReduce(StrEnum):
    """Algorithms of an all-reduce, which sums an array over all ranks.

    ``RING``: reduce-scatter and all-gather around a ring. ``TREE``: reduce and broadcast over a binomial tree.
    ``BUTTERFLY``: recursive doubling, all data in each exchange. ``RABENSEIFNER``: reduce-scatter by recursive halving,
    all-gather by recursive doubling.
    """

    RING = "ring"
    TREE = "tree"
    BUTTERFLY = "butterfly"
    RABENSEIFNER = "rabenseifner"


@dataclass(frozen=True, slots=True)
class Link:
    """The link that connects a rank to others: latency of a message in seconds, and bandwidth in each direction.

    Raises ``InvalidInputError`` for a negative latency, a bandwidth not above 0, and values that are not finite.
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        settle(self, latency_s=real(self.latency_s, "latency_s"), bytes_per_s=real(self.bytes_per_s, "bytes_per_s"))
        if not 0 <= self.latency_s < inf:
            raise InvalidInputError(f"latency_s is {self.latency_s}; it must be at least 0, and finite")
        if not 0 < self.bytes_per_s < inf:
            raise InvalidInputError(f"bytes_per_s is {self.bytes_per_s}; it must be above 0, and finite")


def rounds(algorithm: AllReduce, ranks: int) -> int:
    """Return the number of rounds of an all-reduce by this algorithm; 0 for a single rank.

    Raises ``InvalidInputError`` unless ``ranks`` is a whole number of at least 1.
    """
    p = whole(ranks, "ranks", 1)
    if p == 1:
        return 0
    match algorithm:
        case AllReduce.RING:
            return 2 * (p - 1)
        case AllReduce.TREE:
            return 2 * _ceil_log2(p)
        case AllReduce.BUTTERFLY:
            return _floor_log2(p) + _folding(p)
        case AllReduce.RABENSEIFNER:
            return 2 * _floor_log2(p) + _folding(p)


def volume(algorithm: AllReduce, ranks: int) -> float:
    """Return the bytes on the critical path of an all-reduce for each byte that is reduced.

    Raises ``InvalidInputError`` unless ``ranks`` is a whole number of at least 1.
    """
    p = whole(ranks, "ranks", 1)
    if p == 1:
        return 0.0
    match algorithm:
        case AllReduce.RING:
            return 2 * (p - 1) / p
        case AllReduce.TREE:
            return 2.0 * _ceil_log2(p)
        case AllReduce.BUTTERFLY:
            return float(_floor_log2(p) + _folding(p))
        case AllReduce.RABENSEIFNER:
            power = 1 << _floor_log2(p)
            return 2 * (power - 1) / power + _folding(p)


def all_reduce_s(algorithm: AllReduce, ranks: int, size_bytes: float, link: Link) -> float:
    """Return the predicted seconds of one all-reduce of ``size_bytes``.

    Raises ``InvalidInputError`` unless ``ranks`` is a whole number of at least 1.
    """
    return rounds(algorithm, ranks) * link.latency_s + volume(algorithm, ranks) * size_bytes / link.bytes_per_s


def _floor_log2(p: int) -> int:
    return p.bit_length() - 1


def _ceil_log2(p: int) -> int:
    return (p - 1).bit_length()


def _folding(p: int) -> int:
    """Return the number of additional rounds of an all-reduce if ``p`` is not a power of two, else 0."""
    return 0 if p.bit_count() == 1 else 2
