"""Tunes all layers of a table, each at its own batch size, and returns the chosen configurations layer by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mucudnn.bench.sources.layers import Layer, LayerTable, load_source
from mucudnn.bench.sources.models import blamed_in_training, load_model
from mucudnn.core.answers import TunedProblem
from mucudnn.core.config import Config
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import ConvProblem, MemoryFormat
from mucudnn.core.records import Environment, Task
from mucudnn.core.team import ALONE
from mucudnn.core.terminal import Progress
from mucudnn.kernels.memory import format_of
from mucudnn.solver.division import Division
from mucudnn.tuning.headroom import Limits, find_headroom
from mucudnn.tuning.result import Tuning, TuningInterrupted
from mucudnn.tuning.tuner import team_of, tune_tasks


@dataclass(frozen=True, slots=True)
class TunedLayer:
    """The configuration chosen for one operation of a layer, with the layer's names and number of occurrences."""

    names: tuple[str, ...]
    count: int
    tuned: TunedProblem


@dataclass(frozen=True, slots=True)
class TableTuning:
    """The result of tuning a layer table: a chosen configuration for each layer and operation.

    rows: in the order of the table.
    wanted: number of rows of a complete tuning; an interrupted tuning has fewer rows.
    """

    source: str
    config: Config
    environment: Environment
    rows: tuple[TunedLayer, ...]
    wanted: int
    division: Division[Task] | None = None

    @property
    def interrupted(self) -> bool:
        return len(self.rows) < self.wanted

    @property
    def baseline_s(self) -> float | None:
        """PyTorch's own time for all rows, each multiplied by the layer's occurrences; None if one is unknown."""
        return self._total([row.tuned.baseline_s for row in self.rows])

    @property
    def least_baseline_s(self) -> float | None:
        """The same, with the least time of operations in which PyTorch's own is too slow to be measured."""
        return self._total([row.tuned.least_baseline_s for row in self.rows])

    def _total(self, seconds: Sequence[float | None]) -> float | None:
        counted = [row.count * time_s for row, time_s in zip(self.rows, seconds, strict=True) if time_s is not None]
        return sum(counted) if len(counted) == len(self.rows) else None

    @property
    def time_s(self) -> float:
        """The time of all chosen configurations, each multiplied by the layer's occurrences."""
        return sum(row.count * row.tuned.time_s for row in self.rows)

    @property
    def speedup(self) -> float | None:
        """PyTorch's time over that of the chosen configurations; None if PyTorch's is unknown or there are no rows."""
        return self.baseline_s / self.time_s if self.baseline_s is not None and self.rows else None

    @property
    def workspace_bytes(self) -> int:
        """The workspace of all rows: the largest, because rows share a buffer, or the sum if a budget was divided."""
        sizes = [row.tuned.configuration.workspace_bytes for row in self.rows]
        return max(sizes, default=0) if self.division is None else sum(sizes)


def tune_table(
    table: LayerTable,
    config: Config,
    *,
    limits: Limits | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> TableTuning:
    """Tune every layer at its own batch size, together with the other ranks of a process group if there is one.

    On Ctrl-C, return the rows tuned so far.

    limits: workspace that is free at each module, as for ``table_tasks``.
    progress: called with a description and the fraction done.

    Raises the errors of ``tune``.
    """
    tasks = table_tasks(table, config, limits)
    team = team_of() if config.share_tuning else ALONE
    try:
        tuning = tune_tasks(tasks, config, device=device, progress=progress, team=team)
    except TuningInterrupted as interruption:
        tuning = interruption.partial
    return of_table(table, tuning)


def table_tasks(table: LayerTable, config: Config, limits: Limits | None = None) -> list[Task]:
    """Return a tuning task for each operation of each layer, in the order of the table.

    limits: headroom of each module (workspace that is free without raising the peak memory), in place of one limit for
    all; modules that share a layer get the smallest headroom.

    Raises ``InvalidInputError`` if there is nothing to tune, or if the config asks for headroom and limits is None.
    """
    tasks = []
    for layer, problem in problems_to_tune(table, config):
        if limits is None:
            limit = config.workspace_limit_bytes
        else:  # 0 for operations that the training step does not run, such as dw of a frozen layer
            limit = min(limits.get((name, problem.operation), 0) for name in layer.names)
        tasks.append(
            Task(
                problem,
                layer.batch_size,
                limit,
                count=layer.count,
                name=f"{layer.name}, {problem}",
                in_headroom=limits is not None,
                baseline_exempt=config.baseline_exempt,
            )
        )
    return tasks


def problems_to_tune(table: LayerTable, config: Config) -> list[tuple[Layer, ConvProblem]]:
    """Return the problems of a table whose operations the config selects.

    Raises ``InvalidInputError`` if there are none.
    """
    wanted = table.problems(config.operations)
    if not wanted:  # for example backward_data of a network with a single layer
        raise InvalidInputError(
            f"{table.source} has no {' or '.join(config.operations)} to tune; choose other operations or another source"
        )
    return wanted


def of_table(table: LayerTable, tuning: Tuning) -> TableTuning:
    """Return the layers of a table with the results of their tasks, or of the first tasks if tuning was interrupted."""
    wanted = table.problems(tuning.config.operations)
    return TableTuning(
        table.source,
        tuning.config,
        tuning.environment,
        rows=tuple(
            TunedLayer(layer.names, layer.count, tuned)
            for (layer, _), tuned in zip(wanted, tuning.problems, strict=False)
        ),
        wanted=len(wanted),
        division=tuning.division,
    )


def table_with_headroom(
    source: str,
    *,
    batch: int | None = None,
    input_shape: tuple[int, ...] | None = None,
    dtype: str = "float32",
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS,
    device: str = "cpu",
) -> tuple[LayerTable, Limits]:
    """Return the layers of a model, and the headroom in a training step with ``batch`` samples (by default 1).

    Headroom is the workspace that each convolution can use without raising the step's peak memory. Modules with the
    same geometry stay separate layers, because each has its own headroom. Other arguments are those of ``load_source``.

    Raises the errors of ``load_source`` and ``find_headroom``, and ``InvalidInputError`` for sources without a model,
    and for models that cannot be trained on this input or run no convolution in a training step.
    """
    table = load_source(source, batch=batch, input_shape=input_shape, dtype=dtype, memory_format=memory_format)
    model, shape = load_model(
        source, input_shape=input_shape, dtype=dtype, memory_format=memory_format, initialised=False
    )
    sample = torch.zeros(batch or 1, *shape, dtype=getattr(torch, dtype))
    sample = sample.to(device=device, memory_format=format_of(memory_format, sample.dim()))
    with blamed_in_training(source, sample.shape):
        limits = find_headroom(model.to(device=device), sample)
    if not limits:
        raise InvalidInputError(f"{source} runs no convolution in a training step: there is no headroom to use")
    apart = (
        replace(layer, names=(name,), count=count)
        for layer in table.layers
        for name, count in Counter(layer.names).items()  # a module may be called several times
    )
    return LayerTable(table.source, tuple(apart)), limits
