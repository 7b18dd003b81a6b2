"""Tunes a whole layer table, each layer at its own batch size, and tells what was chosen layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

from mucudnn.bench.sources.layers import Layer, LayerTable
from mucudnn.distributed.team import Team
from mucudnn.running.environment import Environment
from mucudnn.tracing.headroom import Limits
from mucudnn.tuning.choose import Divided
from mucudnn.tuning.result import TunedProblem, Tuning, TuningInterrupted
from mucudnn.tuning.tuner import tune_tasks
from mucudnn.words.config import Config
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import Operation
from mucudnn.words.progress import Progress
from mucudnn.words.task import Task


@dataclass(frozen=True, slots=True)
class TunedLayer:
    """Choice for one operation of one layer that occurs ``count`` times in its network.

    names: those of the layer, or of all that are equal.
    """

    names: tuple[str, ...]
    count: int
    tuned: TunedProblem


@dataclass(frozen=True, slots=True)
class TableTuning:
    """A row for each layer and operation, in the order of the table; not all of them if it was interrupted."""

    source: str
    config: Config
    environment: Environment
    rows: tuple[TunedLayer, ...]
    wanted: int
    divided: Divided | None = None

    @property
    def interrupted(self) -> bool:
        return len(self.rows) < self.wanted

    @property
    def baseline_s(self) -> float | None:
        """Torch's time of all rows, each counted as often as it occurs; ``None`` where that of a row is not known."""
        known = [row.count * row.tuned.baseline_s for row in self.rows if row.tuned.baseline_s is not None]
        return sum(known) if len(known) == len(self.rows) else None

    @property
    def time_s(self) -> float:
        """Our time of all rows, each counted as often as it occurs."""
        return sum(row.count * row.tuned.time_s for row in self.rows)

    @property
    def speedup(self) -> float | None:
        """Torch's time over ours; ``None`` where torch's is not known, or there are no rows."""
        return self.baseline_s / self.time_s if self.baseline_s is not None and self.rows else None

    @property
    def workspace_bytes(self) -> int:
        """The largest of all rows, since one buffer serves them in turn; the sum where a budget was divided."""
        each = [row.tuned.configuration.workspace_bytes for row in self.rows]
        return max(each, default=0) if self.divided is None else sum(each)


def tune_table(
    table: LayerTable,
    config: Config,
    *,
    limits: Limits | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> TableTuning:
    """Tune every layer at its own batch size, with the other ranks of a process group if there is one.

    Ctrl-C ends it with the rows that are ready.

    limits: as for ``table_tasks``. progress: called with what is being done and the fraction that is done.

    Raises what ``tune`` raises.
    """
    tasks = table_tasks(table, config, limits)
    try:
        tuning = tune_tasks(tasks, config, device=device, progress=progress, team=Team.of(config))
    except TuningInterrupted as interruption:
        tuning = interruption.partial
    return of_table(table, tuning)


def table_tasks(table: LayerTable, config: Config, limits: Limits | None = None) -> list[Task]:
    """A task for each operation of each layer, in the order of the table.

    limits: the headroom of the modules of the table's model, in place of one limit for all; torch's own fits in any
    case. Modules that share a layer of the table get the least of theirs.

    Raises ``InvalidInputError`` if there is nothing to tune, or the config asks for the headroom without limits.
    """
    wanted = table.problems(config.operations)
    if not wanted:  # the first layer of a network has no backward_data: nobody asks for the gradient of its input
        raise InvalidInputError(
            f"{table.source} has no {' or '.join(config.operations)} to tune; choose other operations or another source"
        )
    return [
        Task(
            problem,
            layer.batch_size,
            config.workspace_limit_bytes if limits is None else _least(limits, layer, problem.operation),
            count=layer.count,
            name=f"{layer.name}, {problem}",
            in_headroom=limits is not None,
            baseline_exempt=config.baseline_exempt,
        )
        for layer, problem in wanted
    ]


def _least(limits: Limits, layer: Layer, operation: Operation) -> int:
    """Least limit of the layer's modules; 0 for what does not run in a training step, such as dw of a frozen filter."""
    return min(limits.get((name, operation), 0) for name in layer.names)


def of_table(table: LayerTable, tuning: Tuning) -> TableTuning:
    """Give a tuning the names and counts of the table's layers.

    The tuning is of ``table_tasks``, or of the first of them.
    """
    wanted = table.problems(tuning.config.operations)
    rows = [
        TunedLayer(layer.names, layer.count, tuned) for (layer, _), tuned in zip(wanted, tuning.problems, strict=False)
    ]
    return TableTuning(table.source, tuning.config, tuning.environment, tuple(rows), len(wanted), tuning.divided)
