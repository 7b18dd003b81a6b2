"""Statistics of results: speedups with their intervals, and tests of differences.

Intervals of speedups are percentile bootstraps (Efron, Tibshirani 1993, "An introduction to the bootstrap", chapter 13)
over rounds: both samples of a round are drawn together, so that slow rounds cancel out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite, nan
from statistics import median

import numpy as np
from numpy.typing import NDArray

from mucudnn.core.errors import UnavailableError

CONFIDENCE = 0.95
LEAST_ROUNDS = 3  # Fewer rounds are too few for an interval.
RESAMPLES = 1000

Samples = Sequence[float]
_MOST_EXACT = 40  # With more samples, the exact test takes seconds, and the normal approximation is close.


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value estimated from samples, with its confidence interval. The bounds are NaN if there are too few samples."""

    value: float = nan
    low: float = nan
    high: float = nan

    def columns(self, name: str) -> dict[str, float]:
        """Return the value and its bounds as table columns.

        name: column name with ``{}`` where ``_low`` and ``_high`` are inserted.

        >>> Estimate(2.0, 1.5, 3.0).columns("gain{}")
        {'gain': 2.0, 'gain_low': 1.5, 'gain_high': 3.0}
        """
        return {name.format(""): self.value, name.format("_low"): self.low, name.format("_high"): self.high}


def speedup_of(torch_s: Sequence[Samples], tuned_s: Sequence[Samples]) -> Estimate:
    """Return the speedup of operations that run one after the other: the sum of torch's medians over the sum of ours.

    There is no interval if an operation has fewer than ``LEAST_ROUNDS`` rounds, or different numbers of them. Rounds of
    different operations are drawn independently.

    torch_s: torch's samples of each operation, in seconds.
    tuned_s: ours, where sample i of both is from round i.

    >>> speedup_of([[0.4, 0.2, 0.3]], [[0.2, 0.1, 0.15]])
    Estimate(value=2.0, low=2.0, high=2.0)
    """
    if not torch_s or not all((*torch_s, *tuned_s)):
        return Estimate()
    ratio = float(sum(map(median, torch_s)) / sum(map(median, tuned_s)))
    if not isfinite(ratio):
        ratio = nan
    pairs = zip(torch_s, tuned_s, strict=True)
    if any(len(torch) != len(tuned) or len(tuned) < LEAST_ROUNDS for torch, tuned in pairs):
        return Estimate(ratio)
    torchs = sum(resampled_medians(tuple(samples), seed) for seed, samples in enumerate(torch_s))
    times = sum(resampled_medians(tuple(samples), seed) for seed, samples in enumerate(tuned_s))
    return Estimate(ratio, *interval(np.asarray(torchs) / np.asarray(times)))


def mean_speedup(pairs: Sequence[tuple[Samples, Samples]]) -> Estimate:
    """Return the geometric mean of the speedups of several subjects.

    pairs: for each subject, torch's samples and ours, as for ``speedup_of``. The mean is NaN if there are no subjects,
    and has no interval if one of the speedups has none.

    >>> mean_speedup([([0.4] * 3, [0.2] * 3), ([0.8] * 3, [0.1] * 3)])
    Estimate(value=4.0, low=4.0, high=4.0)
    """
    speedups = [speedup_of([torch], [tuned]) for torch, tuned in pairs]
    if not speedups:
        return Estimate()
    ratio = float(np.exp(np.mean(np.log([speedup.value for speedup in speedups]))))
    if np.isnan([speedup.low for speedup in speedups]).any():
        return Estimate(ratio)
    drawn = [
        np.log(resampled_medians(tuple(torch), seed) / resampled_medians(tuple(tuned), seed))
        for seed, (torch, tuned) in enumerate(pairs)
    ]
    return Estimate(ratio, *interval(np.exp(np.mean(drawn, axis=0))))


def interval(drawn: NDArray[np.float64]) -> tuple[float, float]:
    """Return the percentile interval that covers the fraction ``CONFIDENCE`` of the resampled values."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, (tail, 1 - tail))
    return float(low), float(high)


@lru_cache(maxsize=4096)  # Each entry takes 8 KB; the tables and pictures of a folder share the cache.
def resampled_medians(samples: tuple[float, ...], seed: int, resamples: int = RESAMPLES) -> NDArray[np.float64]:
    """Return the medians of bootstrap resamples, whose samples are drawn with replacement.

    The same seed draws the same rounds, so that the samples of a round stay paired.
    """
    drawn = np.asarray(samples, dtype=float).take(_draws(len(samples), seed, resamples))
    drawn.sort(axis=1)  # faster than numpy's median for rows this short
    return np.asarray((drawn[:, (len(samples) - 1) // 2] + drawn[:, len(samples) // 2]) / 2)


@lru_cache(maxsize=64)
def _draws(rounds: int, seed: int, resamples: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(rounds, size=(resamples, rounds))


def rank_test(before: NDArray[np.float64], after: NDArray[np.float64]) -> float:
    """Return the p-value of the two-sided rank test; 1 if there are too few samples, or if all samples are equal.

    The test is that of Mann and Whitney (1947, "On a test of whether one of two random variables is stochastically
    larger than the other"), which assumes no distribution and is robust to outliers. Raises ``UnavailableError`` if
    scipy is not installed.
    """
    try:
        from scipy.stats import mannwhitneyu
    except ImportError:
        raise UnavailableError("this needs scipy, which is not installed: pip install scipy") from None
    samples = np.concatenate((before, after))
    if min(len(before), len(after)) < LEAST_ROUNDS or np.ptp(samples) == 0:
        return 1.0
    has_ties = len(np.unique(samples)) < len(samples)
    method = "exact" if len(samples) <= _MOST_EXACT and not has_ties else "asymptotic"
    return float(mannwhitneyu(before, after, method=method).pvalue)


def rejected(p_values: Sequence[float], level: float) -> list[bool]:
    """Return for each hypothesis whether Holm's method rejects it.

    The step-down method (Holm 1979, "A simple sequentially rejective multiple test procedure") corrects for multiple
    comparisons, also of dependent hypotheses.

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
