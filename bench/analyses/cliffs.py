"""Finds cliffs, batch sizes with more time per sample or far more memory than smaller ones, and their remedies.

The remedy of a cliff is a cut, which runs the batch in several smaller parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, hypot

from mucudnn.words.units import format_bytes

LEAST_MARGIN = 0.05  # Smaller differences of time are ignored, even without noise.
SINGLE_SAMPLE = 0.5  # relative uncertainty of a time with a single sample
WORKSPACE_JUMP = 1.5  # A jump multiplies the workspace per sample by at least this factor ...
LEAST_JUMP_BYTES = 8 * 2**20  # ... and exceeds the workspace in proportion to the smaller batch by at least this.


class Curve(StrEnum):
    """A way to compute n samples: torch in one call, the fastest algorithm in one call, or the fastest division."""

    TORCH = "torch"
    UNDIVIDED = "undivided"
    DIVIDED = "divided"

    @property
    def label(self) -> str:
        """Name of the curve in tables and figures."""
        return "PyTorch" if self is Curve.TORCH else self.value


class CliffKind(StrEnum):
    """The way in which a batch size is worse than another: slower per sample, more workspace, or over the limit."""

    SLOWER = "slower"
    MORE_WORKSPACE = "more workspace"
    DOES_NOT_FIT = "does not fit"


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a curve: seconds and bytes of a whole batch of ``n`` samples.

    runs_as: how the batch is computed, as a text. is_cut: whether it is computed in several parts. fits: whether the
    bytes are within the workspace limit. uncertainty: relative uncertainty of a measured time.
    """

    n: int
    time_s: float
    workspace_bytes: int
    runs_as: str
    is_cut: bool = False
    fits: bool = True
    uncertainty: float = 0.0

    @property
    def time_per_sample_s(self) -> float:
        return self.time_s / self.n

    @property
    def workspace_per_sample_bytes(self) -> float:
        return self.workspace_bytes / self.n


@dataclass(frozen=True, slots=True)
class Cliff:
    """A batch size that is worse than another one on the same curve.

    reference: the other batch, which is smaller, except possibly if this one does not fit. cut: the point of a division
    into parts that avoids the cliff, or None if no division does. removed: whether the cut is no worse than the
    reference. refuted: whether timing whole runs of this batch found nothing faster than torch's own algorithm.
    """

    curve: Curve
    kind: CliffKind
    point: Point
    reference: Point
    cut: Point | None
    removed: bool
    refuted: bool = False

    @property
    def n(self) -> int:
        return self.point.n

    @property
    def speedup(self) -> float | None:
        """Speedup from dividing the batch, over computing it in one call; None if no division helps."""
        return None if self.cut is None else self.point.time_s / self.cut.time_s

    @property
    def is_gain(self) -> bool:
        """Whether dividing this batch into parts saves time, rather than memory."""
        return self.kind is CliffKind.SLOWER and self.cut is not None

    @property
    def finding(self) -> str:
        """A description of how this batch size is worse than the reference batch size."""
        point, reference = self.point, self.reference
        match self.kind:
            case CliffKind.SLOWER:
                factor = point.time_per_sample_s / reference.time_per_sample_s
                return f"{factor:.2f}× the time per sample of {reference.n}"
            case CliffKind.MORE_WORKSPACE:
                needs, needed = format_bytes(point.workspace_bytes), format_bytes(reference.workspace_bytes)
                return f"needs {needs}, {reference.n} needs {needed}"
            case CliffKind.DOES_NOT_FIT:
                return f"needs {format_bytes(point.workspace_bytes)}, does not fit; {reference.n} fits"

    @property
    def remedy(self) -> str:
        """The division into parts that removes this cliff, such as ``64 runs as gemm 32×2, 1.40×``."""
        if self.cut is None:
            return "no cut helps"
        words = f"{self.n} runs as {self.cut.runs_as}, {self.speedup:.2f}×"
        if self.kind is not CliffKind.SLOWER:
            words += f", {format_bytes(self.cut.workspace_bytes)}"
        if not self.removed:
            words += f", still slower per sample than {self.reference.n}"
        return f"{words} (whole runs do not confirm it)" if self.refuted else words

    def __str__(self) -> str:
        return f"batch {self.n}: {self.finding}; {self.remedy}"


Divide = Callable[[int, int | None], Point | None]  # finds the best configuration for n samples within a limit in bytes


def find_cliffs(curve: Curve, measured: Sequence[Point], divide: Divide, limit_bytes: int | None) -> Iterator[Cliff]:
    """Yield the cliffs of a curve, smaller batches first.

    measured: points by ascending n. divide: finds the best division of n samples within a limit in bytes. limit_bytes:
    the workspace limit of divisions.
    """
    fitting = [point for point in measured if point.fits]
    for point in measured:
        smaller = [other for other in fitting if other.n < point.n]
        if not point.fits:
            yield from _does_not_fit(curve, point, smaller or fitting[:1], divide(point.n, limit_bytes))
        elif smaller:
            yield from _slower(curve, point, smaller, divide(point.n, limit_bytes))
            yield from _more_workspace(curve, point, smaller[-1], divide)


def is_slower_per_sample(point: Point, reference: Point) -> bool:
    """Return whether a point takes longer per sample than a reference, by more than the uncertainties of both times."""
    margin = max(LEAST_MARGIN, hypot(point.uncertainty, reference.uncertainty))
    return point.time_per_sample_s > (1 + margin) * reference.time_per_sample_s


def _does_not_fit(curve: Curve, point: Point, fitting: Sequence[Point], cut: Point | None) -> Iterator[Cliff]:
    for reference in fitting[-1:]:  # There is no reference if no batch size fits.
        yield Cliff(curve, CliffKind.DOES_NOT_FIT, point, reference, cut, removed=cut is not None)


def _slower(curve: Curve, point: Point, smaller: Sequence[Point], divided: Point | None) -> Iterator[Cliff]:
    """Yield a cliff if this batch is slower per sample than a smaller one.

    The reference is the smaller batch with the least time per sample; if several tie, the largest of them.
    """
    faster = [other for other in smaller if is_slower_per_sample(point, other)]
    if faster:
        reference = min(faster, key=lambda other: (other.time_per_sample_s, -other.n))
        helps = divided is not None and point.time_s > (1 + LEAST_MARGIN) * divided.time_s
        cut = divided if helps else None
        removed = cut is not None and not is_slower_per_sample(cut, reference)
        yield Cliff(curve, CliffKind.SLOWER, point, reference, cut, removed)


def _more_workspace(curve: Curve, point: Point, reference: Point, divide: Divide) -> Iterator[Cliff]:
    """Yield a cliff if this batch needs far more workspace per sample than the reference, the next smaller batch.

    A division into parts is a remedy if it avoids the jump in workspace and is not slower.
    """
    expected = reference.workspace_per_sample_bytes * point.n
    jump_bytes = ceil(max(WORKSPACE_JUMP * expected, expected + LEAST_JUMP_BYTES))
    if point.workspace_bytes >= jump_bytes:
        divided = divide(point.n, jump_bytes - 1)
        helps = divided is not None and divided.time_s <= (1 + LEAST_MARGIN) * point.time_s
        yield Cliff(curve, CliffKind.MORE_WORKSPACE, point, reference, cut=divided if helps else None, removed=helps)
