"""``mucudnn bench deepbench``: measure DeepBench's convolutions into a result folder."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from mucudnn.cli.shared import options, parameters
from mucudnn.cli.shared.outputs import Outputs, outputs
from mucudnn.terminal.files import FileCommand
from mucudnn.words.config import BatchSizePolicy, Config
from mucudnn.words.problem import MemoryFormat, Operation, Pair

if TYPE_CHECKING:
    from mucudnn.bench.sources.layers import LayerTable

_TRAINING = "training"
_TABLES = {
    _TRAINING: "deepbench-train",
    "inference-server": "deepbench-inference-server",
    "inference-device": "deepbench-inference-device",
}


@click.command(cls=FileCommand)
@options.option("set", click.Choice(list(_TABLES)), "Table of DeepBench.", _TRAINING, "set_name")
@options.option(
    "batch-scale",
    parameters.Finite(min=0, min_open=True),
    "Factor on DeepBench's own batch sizes; at least one sample remains.",
)
@options.option("batch", parameters.Count(), "Samples in every mini-batch, in place of DeepBench's own batch sizes.")
@options.dtype
@options.memory_format
@options.filters("--filter", "all")
@options.option(
    "workspace-limit",
    parameters.Text("SIZE,...", parameters.parse_sizes),
    "Workspace limits of any one operation, each a size such as 64MiB, or none.",
    "8MiB,64MiB,512MiB",
    "limits",
)
@options.option(
    "policy",
    parameters.several(BatchSizePolicy),
    "Micro-batch sizes of mucudnn; whole mini-batches are always measured.",
    "power-of-two",
    "policies",
)
@options.option(
    "operations",
    parameters.several(Operation),
    "Operations; default: all three for the training set, forward for the others.",
)
@options.rounds(15, "Smallest number of samples of each contestant; short calls get more.")
@options.run_time_limit
@options.config(
    *("algorithms", "max_relative_error", "deterministic", "strict", "thorough", "time_limit", "database"),
    workspace_limit=None,
)
@options.threads
@options.device
@outputs("out", required=True)
def deepbench(
    set_name: str,
    batch_scale: float | None,
    batch: int | None,
    dtype: str,
    memory_format: MemoryFormat,
    filters: tuple[Pair, ...],
    limits: tuple[int | None, ...],
    policies: tuple[BatchSizePolicy, ...],
    operations: tuple[Operation, ...] | None,
    rounds: int,
    run_time_limit: float | None,
    device: str,
    outputs: Outputs,
    config: Config,
) -> None:
    """Benchmark DeepBench: PyTorch, the best undivided algorithm, and mucudnn under each limit and policy.

    Samples are interleaved, and all are kept in the folder DIR; run the same command again to resume.
    """
    if batch_scale is not None and batch is not None:
        raise click.UsageError("--batch replaces DeepBench's own sizes: give it or --batch-scale, not both")
    from mucudnn.bench.sources.layers import load_source, with_filters
    from mucudnn.bench.suites.convolutions.benchmark import benchmark_convolutions
    from mucudnn.bench.suites.convolutions.contest import Choices
    from mucudnn.bench.suites.convolutions.report import deepbench_tables
    from mucudnn.words.progress import progress_bar

    table = load_source(_TABLES[set_name], batch=batch, dtype=dtype, memory_format=memory_format)
    table = _scaled(table, 1.0 if batch_scale is None else batch_scale)
    if filters:
        table = with_filters(table, filters)
    operations = operations or (tuple(Operation) if set_name == _TRAINING else (Operation.FORWARD,))
    config = replace(config, operations=operations)
    choices = Choices(policies, limits, rounds=rounds, time_limit_s=run_time_limit)
    with outputs.shown(deepbench_tables) as folder, progress_bar() as progress:
        benchmark_convolutions("deepbench", table, config, choices, folder, device=device, progress=progress)


def _scaled(table: LayerTable, scale: float) -> LayerTable:
    layers = (replace(layer, batch_size=max(1, round(scale * layer.batch_size))) for layer in table.layers)
    return replace(table, layers=tuple(layers))
