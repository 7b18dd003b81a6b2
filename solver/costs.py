"""The cost model: time and workspace of a configuration (algorithms with micro-batch sizes) of one problem.

    time      = sum over its algorithms of setup  +  sum over its micro-batches of step
    workspace = sum over its algorithms of prepared  +  max over its micro-batches of scratch

Times are whole picoseconds, far below the resolution of a clock, stored as float64. Sums are then exact (up to 2**53
ps, 2.5 hours) and independent of the order, so ties are exact and the order of the input does not matter.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.records import Configuration, Measurement, MicroConfig
from mucudnn.core.values import whole

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]

PICOSECONDS = 1e12  # per second


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """The measurements of one problem as arrays, repeated ones merged. Algorithms are numbered in order of their names.

    setup_ps, prepared_bytes: (algorithms,). step_ps, scratch_bytes: (algorithms, batch_size + 1), indexed by the
    micro-batch size; ``step_ps`` is infinite for sizes that were not measured.
    """

    names: tuple[str, ...]
    setup_ps: FloatArray
    prepared_bytes: IntArray
    step_ps: FloatArray
    scratch_bytes: IntArray

    @property
    def free_algorithms(self) -> frozenset[int]:
        """Numbers of the algorithms without setup time and prepared bytes, which cost only the time of steps."""
        return frozenset(np.flatnonzero((self.setup_ps == 0) & (self.prepared_bytes == 0)).tolist())

    def setup_of(self, algorithms: Collection[int]) -> float:
        """Return the sum of these algorithms' setup times in picoseconds."""
        return float(self.setup_ps[sorted(algorithms)].sum())

    def prepared_of(self, algorithms: Collection[int]) -> int:
        """Return the sum of these algorithms' prepared bytes, the memory for data that micro-batches share."""
        return int(self.prepared_bytes[sorted(algorithms)].sum())

    def configuration(self, parts: Sequence[tuple[int, int]]) -> Configuration:
        """Return the configuration of these pairs (algorithm number, micro-batch size), with its time and workspace.

        The micro-batches are put in running order.
        """
        ordered = sorted(parts, key=lambda part: (part[0], -part[1]))
        algorithms, sizes = np.array(ordered).T
        time_ps = self.setup_of({*algorithms.tolist()}) + self.step_ps[algorithms, sizes].sum()
        workspace = self.prepared_of({*algorithms.tolist()}) + self.scratch_bytes[algorithms, sizes].max()
        micro_configs = tuple(MicroConfig(self.names[algorithm], size) for algorithm, size in ordered)
        return Configuration(micro_configs, float(time_ps) / PICOSECONDS, int(workspace))


def pool(measurements: Sequence[Measurement], batch_size: int) -> Costs:
    """Merge the measurements of one problem into one ``Costs``, for micro-batches up to ``batch_size``.

    The setup time of an algorithm is the median of its measurements, its prepared bytes are their maximum. An algorithm
    that was measured more than once at the same micro-batch size gets the median of the times and the maximum of the
    scratch bytes. Larger micro-batches are left out.

    Raises ``InvalidInputError`` unless ``batch_size`` is a whole number of at least 1, and if a measurement is negative
    or not finite.
    """
    batch_size = whole(batch_size, "batch_size", 1)
    by_algorithm: dict[str, list[Measurement]] = defaultdict(list)
    by_micro_config: dict[MicroConfig, list[Measurement]] = defaultdict(list)
    for measurement in measurements:
        _check(measurement)
        by_algorithm[measurement.micro_config.algorithm].append(measurement)
        by_micro_config[measurement.micro_config].append(measurement)
    names = tuple(sorted(by_algorithm))
    step_ps = np.full((len(names), batch_size + 1), np.inf)
    scratch_bytes = np.zeros(step_ps.shape, dtype=np.int64)
    for micro_config, rows in by_micro_config.items():
        if micro_config.micro_batch_size <= batch_size:
            place = names.index(micro_config.algorithm), micro_config.micro_batch_size
            step_ps[place] = _picoseconds([row.step_s for row in rows])
            scratch_bytes[place] = max(row.scratch_bytes for row in rows)
    setup_ps = np.array([_picoseconds([row.setup_s for row in by_algorithm[name]]) for name in names])
    prepared = np.array([max(row.prepared_bytes for row in by_algorithm[name]) for name in names], dtype=np.int64)
    return Costs(names, setup_ps, prepared, step_ps, scratch_bytes)


def _picoseconds(times_s: Sequence[float]) -> float:
    return float(np.rint(median(times_s) * PICOSECONDS))


def _check(measurement: Measurement) -> None:
    what = f"measurement of {measurement.micro_config.algorithm} {measurement.micro_config.micro_batch_size}"
    for name in ("setup_s", "step_s", "prepared_bytes", "scratch_bytes"):
        value = getattr(measurement, name)
        if not 0 <= value * PICOSECONDS < math.inf:
            raise InvalidInputError(f"{what}: {name} is {value}; it must be finite and at least 0; measure it again")
