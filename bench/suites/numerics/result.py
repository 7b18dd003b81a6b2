"""Result of the numerics benchmark: what the numbers of each algorithm are like on each problem."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from mucudnn.running.environment import Environment
from mucudnn.words.problem import ConvProblem

SAMPLES = 2  # with one alone torch takes another backend for such small images


@dataclass(frozen=True, slots=True)
class AlgorithmNumerics:
    """One algorithm on one problem.

    The *image* is x, or dy for BACKWARD_DATA. The *pixel* is one element of its first sample. It is in the middle; for
    BACKWARD_FILTER it is in the last corner, which some elements of the filter never meet. The *results* are what the
    operation writes.

    local: as the algorithm declares it. nan_results, inf_results: number of results that are not finite where the pixel
    is NaN, or infinite. largest: largest power of two up to which the elements of a random image give finite results.
    outlier_error: largest error of a result that the pixel has no part in, where it is ``OUTLIER`` among ones.
    keeps_subnormals: whether an image of subnormals gives right results, rather than zeros. relative_error: L2, against
    float64, for random normal numbers.
    """

    algorithm: str
    problem: ConvProblem
    local: bool
    nan_results: int
    inf_results: int
    largest: float
    outlier_error: float
    keeps_subnormals: bool
    relative_error: float


@dataclass(frozen=True, slots=True)
class NumericsBenchmark:
    """Results by operation and geometry, torch's own first in each."""

    rows: tuple[AlgorithmNumerics, ...]
    environment: Environment
    date: datetime
