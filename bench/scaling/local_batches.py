"""Predicts the time of all convolutions of a training step for each local batch (samples on one device)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from mucudnn.bench.sources.table_tuning import TableTuning, TunedLayer
from mucudnn.solver.costs import PICOSECONDS, Costs, FloatArray, pool
from mucudnn.solver.front import desirable_sets
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.torch_settings import TORCHS_OWN


class Convolutions(StrEnum):
    """The convolutions of a step: torch's on the whole batch, or mucudnn's fastest configurations."""

    TORCH = "torch"
    MUCUDNN = "mucudnn"


@dataclass(frozen=True, slots=True, eq=False)
class LocalBatches:
    """The seconds of all convolutions of a step, as arrays indexed by the number of samples: (largest + 1,).

    measured: sizes at which all of torch's convolutions were measured undivided. Their times are interpolated linearly
    between these sizes, and extrapolated with the slope from the first to the last.
    """

    measured: tuple[int, ...]
    times_s: Mapping[Convolutions, FloatArray]

    @property
    def largest(self) -> int:
        return len(self.times_s[Convolutions.TORCH]) - 1


def local_batches(tuning: TableTuning, up_to: int, largest: int) -> LocalBatches:
    """Predict convolution times for local batches 1 to ``largest`` from measurements at batch size ``up_to``.

    ``largest`` may exceed ``up_to``. Torch's time is infinite if torch was not measured for a problem. Raises
    ``InvalidInputError`` for an interrupted tuning.
    """
    if tuning.interrupted:
        raise InvalidInputError(f"only {len(tuning.rows)} of {tuning.wanted} problems are tuned; tune them all first")
    limit = tuning.config.workspace_limit_bytes
    baseline_exempt = tuning.config.baseline_exempt or limit is None
    torchs, ours, sizes = np.zeros(largest + 1), np.zeros(largest + 1), set(range(1, up_to + 1))
    for row in tuning.rows:
        fold = row.tuned.batch_size // up_to
        known = _undivided_s(row, fold)
        torch_s = along(known, largest)
        divided_s = desirable_sets(row.tuned.allowed_measurements, largest * fold).fastest_s(limit)[::fold]
        torchs += row.count * torch_s
        ours += row.count * (np.minimum(divided_s, torch_s) if baseline_exempt else divided_s)
        sizes &= known.keys()
    return LocalBatches(tuple(sorted(sizes)), {Convolutions.TORCH: torchs, Convolutions.MUCUDNN: ours})


def along(known: Mapping[int, float], largest: int) -> FloatArray:
    """Interpolate known values linearly at each integer n from 0 to ``largest``.

    Extrapolate with the slope from the first to the last, which is least sensitive to noise, or from (0, 0) if one
    value is known; the slope is at least 0. All results are at least 0, and infinite if no value is known.
    """
    n = np.arange(largest + 1)
    if not known:
        return np.full(n.size, np.inf)
    sizes = sorted(known)
    first, last = (0, 0.0) if len(sizes) == 1 else (sizes[0], known[sizes[0]]), (sizes[-1], known[sizes[-1]])
    growth = max((last[1] - first[1]) / (last[0] - first[0]), 0.0)
    inside = np.interp(n, sizes, [known[size] for size in sizes])
    outside = np.minimum(n - sizes[0], 0) + np.maximum(n - sizes[-1], 0)
    line: FloatArray = np.maximum(inside + growth * outside, 0.0)
    return line


def _undivided_s(row: TunedLayer, fold: int) -> dict[int, float]:
    """Return the measured seconds of torch's own algorithm in one call, by the network's number of samples.

    fold: number of samples that the layer gets for one sample of the network.
    """
    costs = pool(row.tuned.allowed_measurements, row.tuned.batch_size)
    if TORCHS_OWN not in costs.names:
        return {}
    number = costs.names.index(TORCHS_OWN)
    return {size // fold: _seconds(costs, number, size) for size in _sizes(costs, number) if size % fold == 0}


def _sizes(costs: Costs, number: int) -> list[int]:
    return [int(size) for size in np.flatnonzero(np.isfinite(costs.step_ps[number]))]


def _seconds(costs: Costs, number: int, size: int) -> float:
    return float(costs.setup_ps[number] + costs.step_ps[number, size]) / PICOSECONDS
