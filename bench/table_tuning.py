"""Tuning a whole layer table: its problems, by batch size, and what was chosen for each of its layers."""

from __future__ import annotations

from dataclasses import dataclass

from mucudnn.bench.layers import LayerTable
from mucudnn.config import Config
from mucudnn.problem import ConvProblem
from mucudnn.tuner import Progress, tune
from mucudnn.tuning import TunedProblem, Tuning, TuningInterrupted


@dataclass(frozen=True, slots=True)
class TunedLayer:
    """What was chosen for one operation of one layer that occurs ``count`` times in its network."""

    layer: str
    count: int
    tuned: TunedProblem


@dataclass(frozen=True, slots=True)
class TableTuning:
    """One row per layer and operation, in the order of the table; not all of them if it was interrupted."""

    source: str
    config: Config
    rows: tuple[TunedLayer, ...]
    wanted: int

    @property
    def interrupted(self) -> bool:
        return len(self.rows) < self.wanted

    @property
    def baseline_s(self) -> float:
        """Torch's time of all rows, each counted as often as it occurs."""
        return sum(row.count * row.tuned.baseline_s for row in self.rows)

    @property
    def time_s(self) -> float:
        """Our time of all rows, each counted as often as it occurs."""
        return sum(row.count * row.tuned.time_s for row in self.rows)

    @property
    def speedup(self) -> float:
        return self.baseline_s / self.time_s

    @property
    def workspace_bytes(self) -> int:
        """The largest of all rows: one buffer serves them in turn."""
        return max((row.tuned.configuration.workspace_bytes for row in self.rows), default=0)


def tune_table(
    table: LayerTable, config: Config, *, device: str = "cpu", progress: Progress | None = None
) -> TableTuning:
    """Tune every layer at its own batch size. Ctrl-C ends it with the rows that are ready.

    progress: called with what is being done and the fraction that is done.

    Raises what ``tune`` raises.
    """
    wanted = table.problems(config.operations)
    ready: dict[tuple[ConvProblem, int], TunedProblem] = {}
    batch_sizes = list(dict.fromkeys(layer.batch_size for layer, _ in wanted))
    try:
        for part, batch_size in enumerate(batch_sizes):
            names = {problem: f"{layer.name}, {problem}" for layer, problem in wanted if layer.batch_size == batch_size}
            own_part = _part(progress, part, len(batch_sizes))
            tuning = tune(names, batch_size, config, device=device, progress=own_part, names=names)
            ready |= _by_key(tuning)
    except TuningInterrupted as interruption:
        ready |= _by_key(interruption.partial)
    rows = [
        TunedLayer(layer.name, layer.count, ready[problem, layer.batch_size])
        for layer, problem in wanted
        if (problem, layer.batch_size) in ready
    ]
    return TableTuning(table.source, config, tuple(rows), len(wanted))


def _by_key(tuning: Tuning) -> dict[tuple[ConvProblem, int], TunedProblem]:
    return {(tuned.problem, tuned.batch_size): tuned for tuned in tuning.problems}


def _part(progress: Progress | None, part: int, parts: int) -> Progress | None:
    """The callback of one of several equal parts of the work."""
    if progress is None:
        return None
    return lambda text, fraction: progress(text, (part + fraction) / parts)
