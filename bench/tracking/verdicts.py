"""Verdicts on two sets of samples: faster, slower, same or undecided, by their spread.

What the machine does to a call is told by what it does to torch's own call in the same round: slow phases of shared
cores last for seconds or minutes, hit whole rounds, and are never the same in two runs. So it is the logarithm of time
over torch's time in the same round that is compared, and phases cancel.

- **Whether there is a difference** is decided by the two-sided rank test of Mann and Whitney (1947, "On a test of
  whether one of two random variables is stochastically larger than the other"): it needs no distribution, and single
  disturbed rounds weigh no more than others. Of many comparisons some differ by chance: the p-values of all rows are
  held against ``FAMILY_LEVEL`` together, by the step-down method of Holm (1979, "A simple sequentially rejective
  multiple test procedure"), which holds for rows that depend on each other, as those with the same torch do.
- **How large it is** is shown by the ratio of the medians with its 95 % interval, by the percentile bootstrap (Efron,
  Tibshirani 1993, "An introduction to the bootstrap", chapter 13). A bootstrap at the level that many comparisons need
  would say too much of few samples, so that it decides about "same" alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import exp, log

import numpy as np
from numpy.typing import NDArray

from mucudnn.bench.folders.speedups import resampled_medians
from mucudnn.words.errors import UnavailableError

FAMILY_LEVEL = 0.001  # probability that any row of a comparison is called faster or slower by mistake
LEAST_SAMPLES = 3  # below, nothing is said of a row
# Slow phases of shared cores take a third longer. Where no torch ran beside, a run may have been in one as a whole.
PHASE = 4 / 3
_CONFIDENCE = 0.95
_RESAMPLES = 2000
_MOST_EXACT = 40  # samples of both: counting all orders takes seconds beyond, and the normal approximation is close

Samples = NDArray[np.float64]


class Verdict(StrEnum):
    """Outcome of a comparison of two sets of samples.

    ``SLOWER``, ``FASTER``: surely different, and by more than the tolerance. ``SAME``: the interval of the ratio is
    within the tolerance. ``UNDECIDED``: the samples do not tell.
    """

    SLOWER = "slower"
    FASTER = "faster"
    SAME = "same"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Pair:
    """Logarithms of samples of one row, before and after. is_controlled: they are over torch's in the same round."""

    before: Samples
    after: Samples
    is_controlled: bool

    @property
    def allowance(self) -> float:
        """Logarithm of what the machine alone may have done to the ratio."""
        return 0.0 if self.is_controlled else log(PHASE)


@dataclass(frozen=True, slots=True)
class Change:
    """A row's time after over its time before: above 1 is slower; with its 95 % interval."""

    ratio: float
    low: float
    high: float
    p_value: float
    verdict: Verdict


def require_scipy() -> None:
    """Raise ``UnavailableError`` where scipy is not installed."""
    try:
        import scipy  # noqa: F401
    except ImportError:
        raise UnavailableError("this needs scipy, which is not installed: pip install 'mucudnn[report]'") from None


def changes(pairs: Sequence[Pair], tolerance: float) -> list[Change]:
    """Judge all rows of a comparison together. tolerance: a fraction; changes up to it count as none.

    Raises ``UnavailableError`` where scipy is not installed.
    """
    require_scipy()
    p_values = [_p_value(pair) for pair in pairs]
    is_different = rejected(p_values, FAMILY_LEVEL)
    every = zip(pairs, p_values, is_different, strict=True)
    return [_change(pair, p_value, different, log(1 + tolerance)) for pair, p_value, different in every]


def rejected(p_values: Sequence[float], level: float) -> list[bool]:
    """Say which hypotheses Holm's method rejects: see this module.

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


def _p_value(pair: Pair) -> float:
    from scipy.stats import mannwhitneyu

    if min(len(pair.before), len(pair.after)) < LEAST_SAMPLES:
        return 1.0
    both = np.concatenate((pair.before, pair.after))
    has_ties = len(np.unique(both)) < len(both)
    method = "exact" if len(both) <= _MOST_EXACT and not has_ties else "asymptotic"
    return float(mannwhitneyu(pair.before, pair.after, method=method).pvalue) if np.ptp(both) > 0 else 1.0


def _change(pair: Pair, p_value: float, is_different: bool, tolerance: float) -> Change:
    shift = float(np.median(pair.after) - np.median(pair.before))
    low, high = _interval(pair)
    beyond = tolerance + pair.allowance
    if is_different and abs(shift) > beyond:
        verdict = Verdict.SLOWER if shift > 0 else Verdict.FASTER
    elif pair.is_controlled and -tolerance <= low <= high <= tolerance:
        verdict = Verdict.SAME
    else:
        verdict = Verdict.UNDECIDED
    return Change(exp(shift), exp(low), exp(high), p_value, verdict)


def _interval(pair: Pair) -> tuple[float, float]:
    """Return the interval of the difference of the medians, of which the machine's own part is within."""
    if min(len(pair.before), len(pair.after)) < LEAST_SAMPLES:
        return float("-inf"), float("inf")
    before, after = (
        resampled_medians(tuple(samples), seed, _RESAMPLES) for seed, samples in enumerate((pair.before, pair.after))
    )
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(after - before, (tail, 1 - tail))
    return float(low) - pair.allowance, float(high) + pair.allowance
