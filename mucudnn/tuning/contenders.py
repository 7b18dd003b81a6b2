"""Contenders: configurations that deserve a whole run, and which of them is the best by it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf

from mucudnn.solver.front import desirable_sets
from mucudnn.words.results import Configuration, Measurement, WholeRun
from mucudnn.words.torch_settings import TORCHS_OWN

MOST_CONTENDERS = 3
NEARLY_AS_FAST = 1.15  # predictions this close are within what sums of parts and noise get wrong
JUST_AS_FAST = 1.07  # predictions this close are within what noise alone gets wrong, mostly
_EVEN = 1.03  # times the fastest in whole runs: within their noise
_COARSE = 4  # times the error of torch's own: half of it is worth being only just as fast


def contenders(measurements: Sequence[Measurement], batch_size: int, limit_bytes: int | None) -> list[Configuration]:
    """Return configurations that deserve a whole run, in the order of prediction.

    They are the fastest by prediction, and the best of single algorithms that come near it, each other than the
    baseline. Only the baseline if there is no other.
    """
    fastest = fastest_within(measurements, batch_size, limit_bytes)
    return contenders_near(fastest, measurements, batch_size, limit_bytes, NEARLY_AS_FAST)[:MOST_CONTENDERS]


def contenders_near(
    found: set[Configuration],
    measurements: Sequence[Measurement],
    batch_size: int,
    limit_bytes: int | None,
    margin: float,
) -> list[Configuration]:
    """Return those of which the best is ``margin`` times as fast at most, in the order of prediction.

    found: the fastest of all by prediction, if anything fits. To it come the best of single algorithms: at all, divided
    and undivided. Torch's own, undivided, is only returned where there is no other.
    """
    bounds = _least_times(measurements, batch_size)
    for name in sorted(bounds, key=lambda name: (bounds[name], name)):
        if bounds[name] > margin * min((c.time_s for c in found if not c.is_baseline), default=inf):
            break
        own = [m for m in measurements if m.micro_config.algorithm == name]
        divided = [m for m in own if m.micro_config.micro_batch_size < batch_size]
        undivided = [m for m in own if m.micro_config.micro_batch_size == batch_size]
        found = found.union(*(fastest_within(some, batch_size, limit_bytes) for some in (own, divided, undivided)))
    ranked = sorted(found, key=lambda c: (c.time_s, c.workspace_bytes, c.micro_configs))
    others = [c for c in ranked if not c.is_baseline]
    near = [c for c in others if c.time_s <= margin * others[0].time_s]
    return near or ranked


def _least_times(measurements: Sequence[Measurement], batch_size: int) -> dict[str, float]:
    """Algorithm -> seconds that no configuration of it alone can be below: its best time per sample, without setup."""
    least: dict[str, float] = {}
    for m in measurements:
        name, n = m.micro_config.algorithm, m.micro_config.micro_batch_size
        if n <= batch_size:
            least[name] = min(m.step_s / n * batch_size, least.get(name, inf))
    return least


def fastest_within(measurements: Sequence[Measurement], batch_size: int, limit_bytes: int | None) -> set[Configuration]:
    """Return the fastest by prediction; nothing where nothing fits."""
    fastest = desirable_sets(measurements, batch_size).fastest(batch_size, limit_bytes) if measurements else None
    return set() if fastest is None else {fastest}


def best_of(runs: Mapping[Configuration, WholeRun], measurements: Sequence[Measurement]) -> Configuration:
    """Return the fastest. Of those that are as good as even, it is the one in the fewest parts.

    Where its error is many times that of torch's own, one with at most half of it is taken that is just as fast: the
    error of a network is that of its coarsest layers.
    """
    most = max(run.speedup for run in runs.values())
    even = (configuration for configuration, run in runs.items() if run.speedup >= most / _EVEN)
    best = min(even, key=lambda c: (len(c.micro_configs), -runs[c].speedup))
    errors = {c: relative_error_of(c, measurements) or 0.0 for c in runs}
    torchs = next((m.relative_error for m in measurements if m.micro_config.algorithm == TORCHS_OWN), inf)
    if errors[best] <= _COARSE * torchs:
        return best
    finer = [c for c, run in runs.items() if errors[c] <= errors[best] / 2 and run.speedup >= most / JUST_AS_FAST]
    return max(finer, key=lambda c: runs[c].speedup, default=best)


def relative_error_of(configuration: Configuration, measurements: Iterable[Measurement]) -> float | None:
    """Return the largest error of its algorithms, each compared with float64 once; None: torch's own could not be."""
    used = set(configuration.algorithms)
    return max((m.relative_error for m in measurements if m.micro_config.algorithm in used), default=None)
