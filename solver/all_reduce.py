"""The time of an all-reduce over p ranks in the alpha-beta model, and buckets of gradients that overlap with it.

A message of n bytes takes alpha + n beta, where alpha is the latency and beta the inverse of the bandwidth. In each
round a rank sends one message and receives one. An algorithm is described by two numbers: its rounds, and its volume,
the bytes on the critical path as a multiple of the data. The additions are not counted.

If p is not a power of two, the butterfly and Rabenseifner's algorithm begin and end with an additional round, in which
the ranks beyond the largest power of two below p send all their data to a partner and receive the sum, as in MPICH.

Sources: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH (2005); Chan,
Heimlich, Purkayastha and van de Geijn, Collective communication: theory, practice, and experience (2007).

Gradients become ready in a known order during the backward pass. A bucket is a sequence of consecutive gradients that
is sent as one message, once its last gradient is ready and the previous bucket has been sent. Few large buckets save
latency, many small buckets start earlier. The best cap is found exactly, for any message cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.values import real, settle, whole

if TYPE_CHECKING:
    from mucudnn.solver.front import IntArray


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


def rounds_and_volume(algorithm: AllReduce, ranks: int) -> tuple[int, float]:
    """Return the rounds of an all-reduce, and the bytes on its critical path for each byte that is reduced.

    Both are 0 for a single rank. Raises ``InvalidInputError`` unless ``ranks`` is a whole number of at least 1.
    """
    p = whole(ranks, "ranks", 1)
    if p == 1:
        return 0, 0.0
    least_log2 = p.bit_length() - 1  # of the largest power of two up to p
    folding = 0 if p.bit_count() == 1 else 2  # additional rounds
    match algorithm:
        case AllReduce.RING:
            return 2 * (p - 1), 2 * (p - 1) / p
        case AllReduce.TREE:
            height = (p - 1).bit_length()
            return 2 * height, 2.0 * height
        case AllReduce.BUTTERFLY:
            return least_log2 + folding, float(least_log2 + folding)
        case AllReduce.RABENSEIFNER:
            power = 1 << least_log2
            return 2 * least_log2 + folding, 2 * (power - 1) / power + folding


def all_reduce_s(algorithm: AllReduce, ranks: int, size_bytes: float, link: Link) -> float:
    """Return the predicted seconds of one all-reduce of ``size_bytes``.

    Raises ``InvalidInputError`` unless ``ranks`` is a whole number of at least 1.
    """
    rounds, volume = rounds_and_volume(algorithm, ranks)
    return rounds * link.latency_s + volume * size_bytes / link.bytes_per_s


# Buckets

DDP_CAP_BYTES = 25 * 2**20  # DistributedDataParallel's default bucket_cap_mb ...
DDP_FIRST_CAP_BYTES = 2**20  # ... and the smaller cap of its first bucket, so that it is sent early

MessageCost = Callable[[int], float]  # bytes of a bucket -> seconds of its all-reduce


@dataclass(frozen=True, slots=True)
class Gradient:
    """A gradient to be all-reduced: its size in bytes, and when it is ready, in seconds from the step's start."""

    size_bytes: int
    ready_s: float


@dataclass(frozen=True, slots=True)
class Buckets:
    """Gradients merged into buckets, each of which is sent as one message.

    ends: cumulative number of gradients up to the end of each bucket.
    end_s: time when the last message has been sent, in seconds from the start of the step.
    cap_bytes: the ``bucket_cap_mb`` of DistributedDataParallel that makes these buckets, in bytes; None if no single
    cap makes them, or if no cap was searched for.
    """

    ends: tuple[int, ...]
    end_s: float
    cap_bytes: int | None = None


def ddp_ends(sizes_bytes: Sequence[int], cap_bytes: int, first_cap_bytes: int | None = None) -> tuple[int, ...]:
    """Return the end of each of DistributedDataParallel's buckets, as cumulative numbers of gradients.

    These are the buckets after DistributedDataParallel has learned the order of the gradients. The gradient with which
    a bucket reaches its cap ends the bucket.

    first_cap_bytes: cap of the first bucket, which differs from ``cap_bytes`` if the user sets no cap; None if it does
    not differ.
    """
    ends: list[int] = []
    filled, cap = 0, cap_bytes if first_cap_bytes is None else first_cap_bytes
    for number, size in enumerate(sizes_bytes, start=1):
        filled += size
        if filled >= cap:
            ends.append(number)
            filled, cap = 0, cap_bytes
    if sizes_bytes and (not ends or ends[-1] < len(sizes_bytes)):
        ends.append(len(sizes_bytes))
    return tuple(ends)


def ddp_default(gradients: Sequence[Gradient], cost: MessageCost) -> Buckets:
    """Return the buckets that DistributedDataParallel makes with its default ``bucket_cap_mb``.

    Raises ``InvalidInputError`` for gradients out of order.
    """
    sums = _sums(gradients)
    ends = ddp_ends([gradient.size_bytes for gradient in gradients], DDP_CAP_BYTES, DDP_FIRST_CAP_BYTES)
    end_s = 0.0
    for first, last in pairwise([0, *ends]):
        end_s = max(end_s, gradients[last - 1].ready_s) + cost(int(sums[last] - sums[first]))
    return Buckets(ends, end_s)


def best_cap(gradients: Sequence[Gradient], cost: MessageCost) -> Buckets:
    """Return the buckets of the ``bucket_cap_mb`` whose last message ends earliest; ties go to the largest cap.

    The search tries every cap that can matter: buckets change only where the cap passes the sum of some consecutive
    gradients.

    Raises ``InvalidInputError`` for gradients out of order.
    """
    import numpy as np  # here, because help texts import this module for the names of the algorithms

    sums = _sums(gradients)
    if not gradients:
        return Buckets((), 0.0)
    caps = np.unique(sums[None, :] - sums[:, None])[::-1]
    caps = caps[caps > 0]
    end_s, end = np.zeros(caps.size), np.zeros(caps.size, dtype=np.int64)
    ready_s = np.array([gradient.ready_s for gradient in gradients])
    cost = cache(cost)
    while (open_ := np.flatnonzero(end < len(gradients))).size:
        first = end[open_]
        last = np.minimum(np.searchsorted(sums, sums[first] + caps[open_]), len(gradients))
        costs = [cost(size) for size in (sums[last] - sums[first]).tolist()]
        end_s[open_] = np.maximum(end_s[open_], ready_s[last - 1]) + costs
        end[open_] = last
    best = int(caps[end_s.argmin()])
    return Buckets(ddp_ends([gradient.size_bytes for gradient in gradients], best), float(end_s.min()), best)


def _sums(gradients: Sequence[Gradient]) -> IntArray:
    """Return the cumulative bytes of the gradients: entry i is the sum of the first i gradients.

    Raises ``InvalidInputError`` for gradients out of order.
    """
    import numpy as np

    before_s = 0.0
    for number, gradient in enumerate(gradients):
        if gradient.size_bytes < 1 or not before_s <= gradient.ready_s < inf:
            raise InvalidInputError(
                f"gradient {number} has {gradient.size_bytes} bytes and is ready at {gradient.ready_s} s, after one of "
                f"{before_s} s; give at least one byte each, in the order in which they become ready, from 0 s on"
            )
        before_s = gradient.ready_s
    return np.cumsum([0, *(gradient.size_bytes for gradient in gradients)], dtype=np.int64)
