"""Uneven shares: how many samples of one batch each of several unlike devices takes, so that all end together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mucudnn.solver.costs import FloatArray, IntArray
from mucudnn.words.errors import InfeasibleError, InvalidInputError
from mucudnn.words.values import whole

Curve = Sequence[float]  # seconds of 0, 1, 2, ... samples; infinite where it cannot be


@dataclass(frozen=True, slots=True)
class Shares:
    """Samples of each device, and their seconds. A step lasts as long as the slowest device."""

    samples: tuple[int, ...]
    times_s: tuple[float, ...]

    @property
    def step_s(self) -> float:
        return max(self.times_s)


def best_shares(curves: Sequence[Curve], batch_size: int) -> Shares:
    """Return the shares whose slowest device ends first; of those the ones with the least sum of times.

    curves: of each device the seconds of 0 to ``batch_size`` samples, of any shape. Exact, by dynamic programming over
    the devices. Further ties: as few samples as possible for the last device, then for the one before.

    Raises ``InvalidInputError`` for curves that are negative or NaN or end before the batch, ``InfeasibleError`` where
    no shares make up the batch.
    """
    batch_size = whole(batch_size, "batch_size", 1)
    table = _checked(curves, batch_size)
    least_s, _ = _fold(table, np.maximum)
    if not np.isfinite(least_s):
        raise InfeasibleError(f"no shares of {len(curves)} devices make up {batch_size} samples; measure more sizes")
    _, samples = _fold(np.where(table <= least_s, table, np.inf), np.add)
    return _shares(table, samples)


def equal_shares(curves: Sequence[Curve], batch_size: int) -> Shares:
    """Return the shares that differ by one sample at most, the larger ones first. Raises as ``best_shares``.

    Their times may be infinite.
    """
    batch_size = whole(batch_size, "batch_size", 1)
    table = _checked(curves, batch_size)
    each, more = divmod(batch_size, len(curves))
    return _shares(table, [each + (device < more) for device in range(len(curves))])


def _checked(curves: Sequence[Curve], batch_size: int) -> FloatArray:
    """Return the curves up to the batch as (devices, batch_size + 1)."""
    if not curves:
        raise InvalidInputError("there is no device to share the batch out to; give one or more")
    for number, curve in enumerate(curves):
        if len(curve) <= batch_size:
            raise InvalidInputError(
                f"the curve of device {number} ends at {len(curve) - 1} samples; it must reach {batch_size}"
            )
    table = np.array([curve[: batch_size + 1] for curve in curves], dtype=np.float64)
    if not (table >= 0).all():
        raise InvalidInputError("a curve has times below 0 or NaN; give seconds, infinite where it cannot be")
    return table


def _fold(table: FloatArray, combine: Callable[[FloatArray, float], FloatArray]) -> tuple[float, list[int]]:
    """Return the least combination of the devices' times that makes up the batch, and the samples of each device."""
    least = np.full(table.shape[1], np.inf)  # of n samples on the devices so far
    least[0] = 0
    taken: list[IntArray] = []
    for times in table:
        best, took = np.full(least.size, np.inf), np.zeros(least.size, dtype=np.int64)
        for samples in np.flatnonzero(np.isfinite(times)).tolist():
            reached = combine(least[: least.size - samples], float(times[samples]))
            better = reached < best[samples:]
            best[samples:][better] = reached[better]
            took[samples:][better] = samples
        least = best
        taken.append(took)
    samples_of: list[int] = []
    left = least.size - 1
    for took in reversed(taken):
        samples_of.insert(0, int(took[left]))
        left -= samples_of[0]
    return float(least[-1]), samples_of


def _shares(table: FloatArray, samples: Sequence[int]) -> Shares:
    return Shares(tuple(samples), tuple(float(table[device, n]) for device, n in enumerate(samples)))
