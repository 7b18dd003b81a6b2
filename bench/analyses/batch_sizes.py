"""Time and workspace by batch size, with and without dividing batches into parts, and the cliffs that dividing removes.

A cliff is a batch size that is worse than a smaller one. Times of undivided batches are measured, with one call of n
samples at every measured micro-batch size. Times of divided batches are computed for every n, as sums of measured
times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import numpy as np

from mucudnn.bench.analyses.cliffs import SINGLE_SAMPLE, Cliff, Curve, Point, find_cliffs
from mucudnn.bench.sources.table_tuning import TableTuning, TunedLayer
from mucudnn.running.environment import Environment
from mucudnn.solver.costs import Costs, pool
from mucudnn.solver.front import DesirableSets, desirable_sets
from mucudnn.solver.policies import micro_batch_sizes
from mucudnn.words.config import BatchSizePolicy, Config
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import Operation
from mucudnn.words.results import Configuration, Measurement, MicroConfig

ENOUGH = 0.8  # The device counts as underused below this share of its best throughput.


@dataclass(frozen=True, slots=True)
class Curves:
    """Time and workspace by batch size, of one operation of a layer or, if operation is None, of the network.

    The curves of torch and of undivided calls have points at measured batch sizes; the curve of divided calls also has
    points at all sums of measured sizes.
    """

    names: tuple[str, ...]
    operation: Operation | None
    count: int
    points: Mapping[Curve, Mapping[int, Point]]
    cliffs: tuple[Cliff, ...]

    def at(self, curve: Curve, n: int) -> Point | None:
        return self.points[curve].get(n)


@dataclass(frozen=True, slots=True)
class BatchSweep:
    """The result of a sweep over batch sizes: curves of time and workspace, of all problems and of the network.

    network: the sum of the problems' times, each multiplied by its number of occurrences, and the largest workspace.
    measured_sizes: batch sizes to be measured, as the config's policy selects them. whole_run_speedup: speedup over
    torch of the chosen configurations at ``up_to``.
    """

    source: str
    config: Config
    environment: Environment
    up_to: int
    measured_sizes: tuple[int, ...]
    problems: tuple[Curves, ...]
    network: Curves
    whole_run_speedup: float | None

    @property
    def starving_below(self) -> Mapping[Curve, int]:
        """Batch size below which the device is underused, for each curve of the network that fits at any size."""
        times = {curve: self.network.points[curve].values() for curve in Curve}
        return {
            curve: starving_below({point.n: point.time_s if point.fits else inf for point in points})
            for curve, points in times.items()
            if any(point.fits for point in points)
        }

    @property
    def all_curves(self) -> tuple[Curves, ...]:
        """All curves of the sweep: first those of the network, then those of each problem."""
        return (self.network, *self.problems)

    @property
    def distinct_curves(self) -> tuple[Curves, ...]:
        """The curves of the network and of all problems, without the network's if they equal its only problem's."""
        return self.problems if [curves.count for curves in self.problems] == [1] else self.all_curves


def require_sweepable(config: Config) -> None:
    """Raise ``InvalidInputError`` if the settings do not allow comparing batch sizes."""
    if config.workspace_budget is not None or config.has_headroom_limit:
        given = "a workspace budget" if config.workspace_budget is not None else "the headroom limit"
        raise InvalidInputError(f"{given} is valid at one batch size only; give a workspace limit, or none")
    if config.policy == BatchSizePolicy.UNDIVIDED:
        raise InvalidInputError(
            f"policy {config.policy} measures one batch size only, which is no curve; "
            f"choose {BatchSizePolicy.POWER_OF_TWO} or {BatchSizePolicy.ALL}"
        )


def sweep_batch_sizes(tuning: TableTuning, up_to: int) -> BatchSweep:
    """Return curves and cliffs for batch sizes from 1 to ``up_to``, from measurements at batch size ``up_to``.

    Layers that are called with a multiple of ``up_to`` samples, because the model folds other axes into the batch, keep
    that multiple at every batch size.

    Raises ``InvalidInputError`` for settings that do not allow comparing batch sizes, and if the measurements were
    interrupted.
    """
    require_sweepable(tuning.config)
    if tuning.interrupted:
        raise InvalidInputError(f"only {len(tuning.rows)} of {tuning.wanted} problems are tuned; tune them all first")
    limit = tuning.config.workspace_limit_bytes
    solved = [_Problem.of(row, row.tuned.batch_size // up_to) for row in tuning.rows]
    problems = [
        _curves(row.names, row.tuned.problem.operation, row.count, problem.point, up_to, limit, row.tuned.configuration)
        for row, problem in zip(tuning.rows, solved, strict=True)
    ]
    network = _Network([(row.count, problem) for row, problem in zip(tuning.rows, solved, strict=True)])
    return BatchSweep(
        source=tuning.source,
        config=tuning.config,
        environment=tuning.environment,
        up_to=up_to,
        measured_sizes=micro_batch_sizes(BatchSizePolicy(tuning.config.policy), up_to),
        problems=tuple(problems),
        network=_curves(("network",), None, 1, network.point, up_to, limit),
        whole_run_speedup=tuning.speedup,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Problem:
    """The measurements of one problem, and its desirable sets (Pareto fronts of time and workspace).

    fold: number of samples that the layer gets for one sample of the network.
    """

    fold: int
    costs: Costs
    sets: DesirableSets
    measured: Mapping[MicroConfig, Measurement]

    @classmethod
    def of(cls, row: TunedLayer, fold: int) -> _Problem:
        tuned = row.tuned
        usable = tuned.allowed_measurements
        sets = desirable_sets(usable, tuned.batch_size)
        return cls(fold, pool(usable, tuned.batch_size), sets, {m.micro_config: m for m in usable})

    def point(self, curve: Curve, n: int, limit_bytes: int | None) -> Point | None:
        """Return time and workspace of ``n`` samples, or None if unknown.

        If nothing fits the limit, the result is the configuration that exceeds it least.
        """
        match curve:
            case Curve.TORCH:
                found = [c for c in self._undivided(n) if c.is_baseline]
            case Curve.UNDIVIDED:
                found = self._undivided(n)
            case Curve.DIVIDED:
                fastest = self.sets.fastest(n * self.fold, limit_bytes)
                found = [] if fastest is None else [fastest]
        limit = inf if limit_bytes is None else limit_bytes
        if not found:
            return None
        best = min(found, key=lambda c: (max(c.workspace_bytes - limit, 0), c.time_s, c.workspace_bytes))
        is_cut = len(best.micro_configs) > 1
        uncertainty = 0.0 if curve is Curve.DIVIDED else _uncertainty(self.measured[best.micro_configs[0]])
        fits = best.workspace_bytes <= limit
        return Point(n, best.time_s, best.workspace_bytes, str(best), is_cut, fits, uncertainty)

    def _undivided(self, n: int) -> list[Configuration]:
        """Return the undivided configuration of each algorithm that was measured with ``n`` samples in one call."""
        size = n * self.fold
        algorithms = np.flatnonzero(np.isfinite(self.costs.step_ps[:, size])).tolist()
        return [self.costs.configuration([(algorithm, size)]) for algorithm in algorithms]


@dataclass(frozen=True, slots=True, eq=False)
class _Network:
    """All problems of a network and how often each occurs; they run one after the other in a shared workspace."""

    problems: Sequence[tuple[int, _Problem]]

    def point(self, curve: Curve, n: int, limit_bytes: int | None) -> Point | None:
        parts = [(count, problem.point(curve, n, limit_bytes)) for count, problem in self.problems]
        known = [(count, point) for count, point in parts if point is not None]
        if not known or len(known) < len(parts):
            return None
        time_s = sum(count * point.time_s for count, point in known)
        cut = sum(count for count, point in known if point.is_cut)
        convolutions = sum(count for count, _ in known)
        return Point(
            n=n,
            time_s=time_s,
            workspace_bytes=max(point.workspace_bytes for _, point in known),
            runs_as=f"{convolutions} convolutions, {cut} cut" if curve is Curve.DIVIDED else str(curve),
            is_cut=cut > 0,
            fits=all(point.fits for _, point in known),
            uncertainty=sum(count * point.time_s * point.uncertainty for count, point in known) / time_s,
        )


def _uncertainty(measurement: Measurement) -> float:
    return measurement.noise if measurement.samples > 1 else SINGLE_SAMPLE


def _curves(
    names: tuple[str, ...],
    operation: Operation | None,
    count: int,
    point_of: Callable[[Curve, int, int | None], Point | None],
    up_to: int,
    limit_bytes: int | None,
    verdict: Configuration | None = None,
) -> Curves:
    """Return the curves of one problem or of the network, with the cliffs on them.

    point_of: returns time and workspace on a curve, for a number of samples and a limit in bytes, or None if unknown.
    verdict: the configuration selected by timing whole runs of ``up_to`` samples, or None.
    """
    sizes = range(1, up_to + 1)
    points = {
        curve: {point.n: point for n in sizes if (point := point_of(curve, n, limit_bytes)) is not None}
        for curve in Curve
    }
    divide = partial(point_of, Curve.DIVIDED)
    cliffs = [
        replace(cliff, refuted=cliff.is_gain and cliff.n == up_to and verdict is not None and verdict.is_baseline)
        for curve in (Curve.TORCH, Curve.UNDIVIDED)
        for cliff in find_cliffs(curve, tuple(points[curve].values()), divide, limit_bytes)
    ]
    return Curves(names, operation, count, points, tuple(cliffs))


def starving_below(seconds: Mapping[int, float]) -> int:
    """Return the smallest batch size from which on a device reaches the share ``ENOUGH`` of its best throughput.

    seconds: time of a whole batch, by its number of samples; not empty.

    >>> starving_below({1: 4.0, 2: 4.0, 4: 4.0, 8: 6.0})  # 0.25, 0.5, 1 and 1.33 samples a second
    8
    """
    throughput = {n: n / seconds[n] for n in sorted(seconds)}
    starved = [n for n, reached in throughput.items() if reached < ENOUGH * max(throughput.values())]
    least = max(starved, default=0) + 1
    return min((n for n in throughput if n >= least), default=least)
