"""The cost of an all-reduce by the alpha-beta model: how long p ranks take until each has the sum of all their bytes.

A message of n bytes takes alpha + n beta: alpha is the latency, beta the inverse of the bandwidth. In each round a rank
sends one message and receives one. Of an algorithm two numbers count: the rounds, and the bytes that pass in them one
after the other, as a multiple of the data (its volume). The additions are not counted.

Where p is no power of two, the butterfly and Rabenseifner's algorithm begin and end with a round in which the ranks
beyond the largest power of two below p hand all their data to a partner and get the sum back, as MPICH does.

Sources: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH (2005); Chan,
Heimlich, Purkayastha and van de Geijn, Collective communication: theory, practice, and experience (2007).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mucudnn.solver.costs import FloatArray
from mucudnn.words.communication import AllReduce, Link
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.values import whole


def rounds(algorithm: AllReduce, ranks: int) -> int:
    """Return how many rounds an all-reduce has; none of a single rank.

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
    """Return the bytes that pass one after the other, for each byte that is reduced. Raises as ``rounds``."""
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
    """Return the seconds that one all-reduce of so many bytes takes. Raises as ``rounds``."""
    return rounds(algorithm, ranks) * link.latency_s + volume(algorithm, ranks) * size_bytes / link.bytes_per_s


def lower_bound_s(ranks: int, size_bytes: float, link: Link) -> float:
    """Return the seconds below which no all-reduce of so many bytes can be. Raises as ``rounds``.

    Each rank must send and receive 2 (p - 1) / p of the bytes, and what it has reaches all in log2 p rounds at least.
    """
    p = whole(ranks, "ranks", 1)
    return max(2 * (p - 1) / p * size_bytes / link.bytes_per_s, _ceil_log2(p) * link.latency_s)


def fitted_link(algorithm: AllReduce, ranks: int, times_s: Mapping[int, float]) -> Link:
    """Return the link with which the all-reduces are nearest to measured ones, by the squares of relative errors.

    times_s: seconds by bytes. A latency below 0 becomes 0.

    Raises ``InvalidInputError`` for a single rank, fewer than two sizes, times that are not above 0, and where the
    times do not grow with the bytes.
    """
    if ranks < 2 or len(times_s) < 2 or min(times_s.values()) <= 0:
        raise InvalidInputError(
            f"a link cannot be fitted to {len(times_s)} times of {ranks} ranks; it needs two sizes or more, times "
            "above 0, and two ranks or more"
        )
    measured = np.array([*times_s.values()])
    per_latency = np.full(measured.size, float(rounds(algorithm, ranks)))
    per_byte_s = volume(algorithm, ranks) * np.array([*times_s], dtype=float)
    alpha, beta = _least_squares([per_latency, per_byte_s], measured)
    if alpha < 0:
        alpha, (beta,) = 0.0, _least_squares([per_byte_s], measured)
    if beta <= 0:
        raise InvalidInputError(
            "the measured all-reduces take no longer for more bytes, so they have no bandwidth; measure again on a "
            "quiet network, or give --latency and --bandwidth"
        )
    return Link(alpha, 1 / beta)


def _least_squares(columns: Sequence[FloatArray], times_s: FloatArray) -> list[float]:
    """Solve for the factors of the columns; each time counts by its relative error."""
    matrix = np.stack(columns, axis=1) / times_s[:, None]
    scale = matrix.max(axis=0)  # bytes and rounds are of unlike size
    solution = np.linalg.lstsq(matrix / scale, np.ones(times_s.size), rcond=None)[0]
    return [float(factor) for factor in solution / scale]


def _floor_log2(p: int) -> int:
    return p.bit_length() - 1


def _ceil_log2(p: int) -> int:
    return (p - 1).bit_length()


def _folding(p: int) -> int:
    """Return the rounds before and after, of all data, that what is no power of two costs."""
    return 0 if p.bit_count() == 1 else 2
