"""Overheads of frameworks: what a call takes longer than the algorithm in it alone, from samples of the same rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

import numpy as np

from mucudnn.bench.folders.speedups import CONFIDENCE, LEAST_ROUNDS, resampled_medians


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds that a call takes longer, and their interval; NaN where the samples do not tell."""

    seconds: float = nan
    low: float = nan
    high: float = nan


def overhead_of(call_s: Sequence[float], alone_s: Sequence[float]) -> Overhead:
    """Return the median of the differences, round by round, with the percentile bootstrap's interval over rounds.

    call_s, alone_s: samples in seconds, sample i of both being from round i. Only rounds that both have count; there is
    no interval for fewer than ``LEAST_ROUNDS``.

    >>> overhead_of([0.5, 0.75, 1.0], [0.25, 0.5, 0.75])
    Overhead(seconds=0.25, low=0.25, high=0.25)
    """
    differences = tuple(call - alone for call, alone in zip(call_s, alone_s, strict=False))
    if not differences:
        return Overhead()
    middle = float(np.median(differences))
    if len(differences) < LEAST_ROUNDS:
        return Overhead(middle)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resampled_medians(differences, seed=0), (tail, 1 - tail))
    return Overhead(middle, float(low), float(high))
