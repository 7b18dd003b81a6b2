"""Speedups over torch of the same rounds, with their intervals, from samples alone.

The interval is the percentile bootstrap (Efron, Tibshirani 1993, "An introduction to the bootstrap", chapter 13) over
rounds: torch's sample and ours of one round are drawn together, so that what slows a round as a whole cancels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite, nan
from statistics import median

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
LEAST_ROUNDS = 3  # below, an interval would say too much
RESAMPLES = 1000

Samples = Sequence[float]


@dataclass(frozen=True, slots=True)
class Speedup:
    """Torch's time over ours, of medians, and its interval; NaN where the samples do not tell."""

    ratio: float = nan
    low: float = nan
    high: float = nan


def speedup_of(torch_s: Sequence[Samples], ours_s: Sequence[Samples]) -> Speedup:
    """Return the speedup of operations that run one after the other: the sum of torch's medians over that of ours.

    torch_s, ours_s: for each operation its samples in seconds, sample i of both being from round i. There is no
    interval where rounds are fewer than ``LEAST_ROUNDS`` or not the same. Rounds of different operations are drawn
    independently.

    >>> speedup_of([[0.4, 0.2, 0.3]], [[0.2, 0.1, 0.15]])
    Speedup(ratio=2.0, low=2.0, high=2.0)
    """
    if not torch_s or not all((*torch_s, *ours_s)):
        return Speedup()
    ratio = _ratio(sum(map(median, torch_s)), sum(map(median, ours_s)))
    pairs = list(zip(torch_s, ours_s, strict=True))
    if any(len(torch) != len(ours) or len(ours) < LEAST_ROUNDS for torch, ours in pairs):
        return Speedup(ratio)
    every = list(enumerate(pairs))
    torchs = sum(resampled_medians(tuple(torch), seed) for seed, (torch, _) in every)
    times = sum(resampled_medians(tuple(ours), seed) for seed, (_, ours) in every)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.asarray(torchs) / np.asarray(times), (tail, 1 - tail))
    return Speedup(ratio, float(low), float(high))


def _ratio(torch_s: float, ours_s: float) -> float:
    ratio = float(torch_s / ours_s)
    return ratio if isfinite(ratio) else nan


@lru_cache(maxsize=4096)  # 8 KB each: tables and pictures of a folder ask for the same
def resampled_medians(samples: tuple[float, ...], seed: int, resamples: int = RESAMPLES) -> NDArray[np.float64]:
    """Return the median of each resample, drawn with replacement.

    With the same seed the same positions are drawn, so that samples of equal rounds stay paired.
    """
    drawn = np.asarray(samples, dtype=float).take(_draws(len(samples), seed, resamples))
    drawn.sort(axis=1)  # of rows this short quicker than numpy's median
    return np.asarray((drawn[:, (len(samples) - 1) // 2] + drawn[:, len(samples) // 2]) / 2)


@lru_cache(maxsize=64)
def _draws(rounds: int, seed: int, resamples: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(rounds, size=(resamples, rounds))
