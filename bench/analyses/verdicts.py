"""Verdicts on two sets of samples: faster, slower, same or undecided.

Samples are logarithms of time over torch's time in the same round. Slow phases of shared cores last for seconds or
minutes and differ between runs, but they affect whole rounds, so that they cancel in the ratio.

- **Significance** is decided by the two-sided rank test of Mann and Whitney (1947, "On a test of whether one of two
  random variables is stochastically larger than the other"), which assumes no distribution and is robust to outliers.
  The p-values of all rows are compared with ``FAMILY_LEVEL`` by the step-down method of Holm (1979, "A simple
  sequentially rejective multiple test procedure"), which corrects for multiple comparisons, also of dependent rows,
  such as rows with the same torch samples.
- **Size** is the ratio of the medians with its 95 % interval, by the percentile bootstrap (Efron, Tibshirani 1993, "An
  introduction to the bootstrap", chapter 13). At the level that many comparisons need, a bootstrap is unreliable for
  few samples; therefore it decides only about "same".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf, log

import numpy as np
from numpy.typing import NDArray

from mucudnn.bench.folders.speedups import LEAST_ROUNDS, Estimate, interval, resampled_medians
from mucudnn.words.errors import UnavailableError

FAMILY_LEVEL = 0.001  # probability that any row of a comparison is called faster or slower by mistake
# Slowdown in slow phases of shared cores. Without torch in the same rounds, a whole run may have been in one.
PHASE = 4 / 3
_RESAMPLES = 2000
_MOST_EXACT = 40  # number of samples; beyond, the exact test takes seconds, and the normal approximation is close

Samples = NDArray[np.float64]


class Verdict(StrEnum):
    """Outcome of a comparison of two sets of samples.

    ``SLOWER``, ``FASTER``: significantly different, and by more than the tolerance. ``SAME``: the interval of the ratio
    is within the tolerance. ``UNDECIDED``: neither.
    """

    SLOWER = "slower"
    FASTER = "faster"
    SAME = "same"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Pair:
    """Logarithms of a row's samples before and after a change.

    is_controlled: whether the samples are divided by torch's samples of the same rounds.
    """

    before: Samples
    after: Samples
    is_controlled: bool

    @property
    def p_value(self) -> float:
        """The p-value of the rank test; 1 if there are too few samples, or if all samples are equal."""
        from scipy.stats import mannwhitneyu

        both = np.concatenate((self.before, self.after))
        if min(len(self.before), len(self.after)) < LEAST_ROUNDS or np.ptp(both) == 0:
            return 1.0
        has_ties = len(np.unique(both)) < len(both)
        method = "exact" if len(both) <= _MOST_EXACT and not has_ties else "asymptotic"
        return float(mannwhitneyu(self.before, self.after, method=method).pvalue)

    @property
    def allowance(self) -> float:
        """Logarithm of the ratio by which a slow machine may distort times; 0 if torch's samples cancel that."""
        return 0.0 if self.is_controlled else log(PHASE)

    @property
    def shift(self) -> Estimate:
        """Logarithm of the time after over the time before, with an interval that includes the allowance."""
        shift = float(np.median(self.after) - np.median(self.before))
        if min(len(self.before), len(self.after)) < LEAST_ROUNDS:
            return Estimate(shift, -inf, inf)
        drawn = [resampled_medians(tuple(s), seed, _RESAMPLES) for seed, s in enumerate((self.before, self.after))]
        low, high = interval(drawn[1] - drawn[0])
        return Estimate(shift, low - self.allowance, high + self.allowance)


def require_scipy() -> None:
    """Raise ``UnavailableError`` if scipy is not installed."""
    try:
        import scipy  # noqa: F401
    except ImportError:
        raise UnavailableError("this needs scipy, which is not installed: pip install 'mucudnn[report]'") from None


def judged(pairs: Sequence[Pair], tolerance: float) -> list[tuple[Estimate, Verdict]]:
    """Judge all pairs together; return the ratio of time after to time before, and the verdict, of each pair.

    tolerance: relative change up to which times count as equal. Raises ``UnavailableError`` if scipy is not installed.
    """
    require_scipy()
    are_different = rejected([pair.p_value for pair in pairs], FAMILY_LEVEL)
    return [_judged(pair, different, log(1 + tolerance)) for pair, different in zip(pairs, are_different, strict=True)]


def rejected(p_values: Sequence[float], level: float) -> list[bool]:
    """Return for each hypothesis whether Holm's method, which corrects for multiple comparisons, rejects it.

    >>> rejected([0.02, 0.001, 0.04], 0.05)
    [True, True, True]
    >>> rejected([0.03, 0.001, 0.04], 0.05)
    [False, True, False]
    """
    result = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        if p_values[index] > level / (len(p_values) - rank):
            break
        result[index] = True
    return result


def _judged(pair: Pair, is_different: bool, tolerance: float) -> tuple[Estimate, Verdict]:
    shift = pair.shift
    if is_different and abs(shift.value) > tolerance + pair.allowance:
        verdict = Verdict.SLOWER if shift.value > 0 else Verdict.FASTER
    elif pair.is_controlled and -tolerance <= shift.low <= shift.high <= tolerance:
        verdict = Verdict.SAME
    else:
        verdict = Verdict.UNDECIDED
    return Estimate(*(float(np.exp(one)) for one in (shift.value, shift.low, shift.high))), verdict
