"""Division of one batch over devices of unequal speed, so that the slowest device ends as early as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mucudnn.solver.costs import FloatArray, IntArray
from mucudnn.words.errors import InfeasibleError, InvalidInputError
from mucudnn.words.values import whole

Curve = Sequence[float]  # Seconds for 0, 1, 2, ... samples; infinite for sizes that cannot run.


@dataclass(frozen=True, slots=True)
class Shares:
    """The number of samples and the time of each device. A step lasts as long as the slowest device."""

    samples: tuple[int, ...]
    times_s: tuple[float, ...]

    @property
    def step_s(self) -> float:
        return max(self.times_s)


def best_shares(curves: Sequence[Curve], batch_size: int) -> Shares:
    """Return the shares of the batch, one for each device, with which the slowest device ends earliest.

    curves: for each device the seconds for 0 to ``batch_size`` samples; the curves may have any shape. The answer is
    exact, by dynamic programming over the devices. Ties: the least sum of times, then as few samples as possible for
    the last device, and so on.

    Raises ``InvalidInputError`` for curves that are negative or NaN or end before ``batch_size``, ``InfeasibleError``
    if no shares add up to ``batch_size``.
    """
    batch_size = whole(batch_size, "batch_size", 1)
    table = _checked(curves, batch_size)
    least_s, _ = _fold(table, np.maximum)
    if not np.isfinite(least_s):
        raise InfeasibleError(f"no shares of {len(curves)} devices add up to {batch_size} samples; measure more sizes")
    _, samples = _fold(np.where(table <= least_s, table, np.inf), np.add)
    return _shares(table, samples)


def equal_shares(curves: Sequence[Curve], batch_size: int) -> Shares:
    """Return shares of the batch that differ by at most one sample, larger shares first; times may be infinite.

    Raises ``InvalidInputError`` for curves that are negative or NaN or end before ``batch_size``.
    """
    batch_size = whole(batch_size, "batch_size", 1)
    table = _checked(curves, batch_size)
    each, more = divmod(batch_size, len(curves))
    return _shares(table, [each + (device < more) for device in range(len(curves))])


def _checked(curves: Sequence[Curve], batch_size: int) -> FloatArray:
    """Check the devices' time curves; return them as one array (devices, batch_size + 1)."""
    if not curves:
        raise InvalidInputError("there is no device to divide the batch over; give at least one")
    for number, curve in enumerate(curves):
        if len(curve) <= batch_size:
            raise InvalidInputError(
                f"the curve of device {number} ends at {len(curve) - 1} samples; it must reach {batch_size}"
            )
    table = np.array([curve[: batch_size + 1] for curve in curves], dtype=np.float64)
    if not (table >= 0).all():
        raise InvalidInputError(
            "a curve has times that are negative or NaN; give seconds, or infinity for sizes that cannot run"
        )
    return table


def _fold(table: FloatArray, combine: Callable[[FloatArray, float], FloatArray]) -> tuple[float, list[int]]:
    """Return the least time for the whole batch, and the number of samples of each device.

    combine: combines the time of the devices so far with the time of the next device.
    """
    least = np.full(table.shape[1], np.inf)  # The least time for n samples on the devices so far.
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
