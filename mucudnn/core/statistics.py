"""Statistics of samples: their spread, and the uncertainty of their median.

The interquartile range is used throughout, since interruptions make a few samples much larger than all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt
from statistics import quantiles


def spread(values: Sequence[float]) -> float:
    """Return IQR / median, the noise of a measurement; 0 for fewer than two values.

    >>> spread([1.0, 2.0, 3.0, 4.0, 5.0])  # (4 - 2) / 3
    0.6666666666666666
    """
    if len(values) < 2:
        return 0.0
    lower, middle, upper = quantiles(values, n=4, method="inclusive")
    return (upper - lower) / middle if middle > 0 else 0.0


def uncertainty(values: Sequence[float]) -> float:
    """Return half the width of the median's 95 % confidence interval, 1.57 IQR / sqrt(n); inf for fewer than 2 values.

    Source: McGill, Tukey, Larsen 1978, "Variations of box plots".
    """
    if len(values) < 2:
        return inf
    lower, _, upper = quantiles(values, n=4, method="inclusive")
    return 1.57 * (upper - lower) / sqrt(len(values))
