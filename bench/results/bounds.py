"""Roofline bounds of convolution times on this machine, and the kinds of layers that reports group them by.

The bound is the larger of two times: that of moving each tensor once at the rate of a memory copy, and that of the
arithmetic of direct convolution at the rate of a matrix product (Williams, Waterman, Patterson 2009). Winograd and FFT
algorithms need fewer multiplications and can be faster than the bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite, prod
from typing import Any

from mucudnn.bench.results.columns import Columns, table_of
from mucudnn.core.problem import ITEM_BYTES, ConvProblem
from mucudnn.core.tables import Table

_FIRST_LAYER_CHANNELS = 4  # A layer with at most this many input channels is assumed to read images.


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """The peak rates of a machine: floating-point operations per second, and bytes read and written per second.

    A rate that was not measured is infinite.
    """

    flops_per_s: float = inf
    bytes_per_s: float = inf

    @classmethod
    def measured(cls, device: str, dtype: str) -> MachineLimits:
        """Measure both peak rates of this machine, for one second, with torch's current number of threads; CPU only.

        Half precision gets the rate of float32: torch's half-precision products on the CPU give no valid bound.
        """
        # Imported here because it loads torch, which reports of stored results do not need.
        from mucudnn.measuring.clocks import copied_bytes_per_s, sustained_flops_per_s

        product_dtype = "float32" if ITEM_BYTES[dtype] == 2 else dtype
        return cls(sustained_flops_per_s(device, product_dtype), copied_bytes_per_s(device))

    def or_better(self, other: MachineLimits) -> MachineLimits:
        """Return limits with the higher of the two values of each rate: a rate that was reached once is possible."""
        return MachineLimits(max(self.flops_per_s, other.flops_per_s), max(self.bytes_per_s, other.bytes_per_s))

    def bound_s(self, problem: ConvProblem, n: int) -> float:
        """Return a lower bound on the seconds of a direct convolution of ``n`` samples; 0 if no rate was measured."""
        return max(problem.flops(n) / self.flops_per_s, problem.least_bytes(n) / self.bytes_per_s)

    @property
    def are_known(self) -> bool:
        return isfinite(self.flops_per_s) and isfinite(self.bytes_per_s)

    def __str__(self) -> str:
        """Format the two rates as ``212 GFLOP/s, 27.0 GB/s``."""
        return f"{self.flops_per_s / 1e9:.0f} GFLOP/s, {self.bytes_per_s / 1e9:.1f} GB/s"


def kind_of_layer(problem: ConvProblem) -> str:
    """Return the kind of a convolution layer: depthwise, grouped, pointwise, first layer, strided, or ``3x3``."""
    if problem.groups > 1:
        return "depthwise" if problem.groups == problem.c else "grouped"
    if prod(problem.window) == 1:
        return "pointwise"
    if problem.c <= _FIRST_LAYER_CHANNELS:
        return "first layer"
    return "strided" if max(problem.stride) > 1 else "x".join(map(str, problem.window))


def shares(kinds_s: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each kind of layer in the total time.

    >>> shares({"3x3": 3.0, "rest": 1.0})
    {'3x3': 0.75, 'rest': 0.25}
    """
    whole_s = sum(kinds_s.values())
    return {kind: seconds / whole_s for kind, seconds in kinds_s.items()} if whole_s else {}


def kinds_table(rows: Sequence[dict[str, Any]], title: str, left: Columns[dict[str, Any]], *, caption: str) -> Table:
    """Return a table of the share of each kind of layer in percent.

    rows: with the seconds by kind of layer as ``kinds_s``.
    left: the first columns.
    """

    def percent(kind: str, row: dict[str, Any]) -> str:
        share = shares(row["kinds_s"]).get(kind)
        return "" if share is None else f"{100 * share:.1f}"

    kinds = dict.fromkeys(kind for row in rows for kind in row["kinds_s"])
    right = {kind: partial(percent, kind) for kind in kinds}
    return table_of(rows, f"{title}: share of time by kind of layer, %", left, right, caption=caption)
