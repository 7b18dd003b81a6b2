"""``mucudnn bench convolutions``: all convolutions of a network or a table, PyTorch against mucudnn."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any

import click

from mucudnn.cli.shared import options, parameters
from mucudnn.cli.shared.commands import FileCommand, Outputs
from mucudnn.cli.shared.options import outputs
from mucudnn.core.config import BatchSizePolicy, Config
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import ITEM_BYTES, Operation, Pair, dtype_name
from mucudnn.core.values import shown


def _factor(text: str) -> float:
    with suppress(ValueError):
        if 0 < (factor := float(text)) < inf:
            return factor
    raise InvalidInputError(f"{shown(text)} is not a factor; write a number above 0, for example 0.5")


@click.command(cls=FileCommand)
@options.source
@options.option(
    "filter",
    parameters.Text("RxS,...", parameters.parse_filters),
    "Use only layers with filters of these sizes, or all.",
    "all",
    "filters",
)
@options.option(
    "batch-scale",
    parameters.Text("NUMBER", _factor),
    "Factor on the batch sizes of a table, such as DeepBench's; at least one sample remains.",
)
@options.option(
    "dtype",
    parameters.Text(",".join(list(ITEM_BYTES)[::-1]), parameters.listed(dtype_name)),
    "Data types of all tensors to compare.",
    "float32",
    "dtypes",
)
@options.memory_formats
@options.option(
    "workspace-limit",
    parameters.sizes("none"),
    "Workspace limits of any one operation, each a size such as 64MiB, or none.",
    "none",
    "limits",
)
@options.option(
    "workspace-budget",
    parameters.sizes("off"),
    "Also divide this workspace over all operations, in each dtype and memory format.",
    "off",
    "budgets",
)
@options.option(
    "policy",
    parameters.several(BatchSizePolicy),
    "Micro-batch sizes of mucudnn; whole mini-batches are always measured.",
    "power-of-two",
    "policies",
)
@options.rounds(15, "Smallest number of samples of each contestant; short calls get more.")
@options.run_time_limit
@options.config("operations", "algorithms", "time_limit", "database", workspace_limit=None)
@options.threads
@options.device
@outputs("out")
def convolutions(
    source: str,
    batch: int | None,
    input_shape: tuple[int, ...] | None,
    filters: tuple[Pair, ...],
    batch_scale: float | None,
    budgets: tuple[int | None, ...],
    run_time_limit: float | None,
    device: str,
    outputs: Outputs,
    config: Config,
    **compared: Any,
) -> None:
    """Benchmark all convolutions of SOURCE: PyTorch, the best undivided algorithm, and mucudnn, interleaved.

    mucudnn chooses under each workspace limit and policy, in each dtype and memory format. On CUDA also PyTorch with
    torch.backends.cudnn.benchmark, which times 10 engines or (limit 0) all of them. SOURCE is as for mucudnn tune;
    deepbench-inference-server and -device are measured forward unless --operations names others.
    """
    if batch_scale is not None and batch is not None:
        raise click.UsageError("--batch replaces the sizes of a table: give it or --batch-scale, not both")
    from mucudnn.bench.sources.layers import load_source, with_filters
    from mucudnn.bench.sources.published import TABLES
    from mucudnn.bench.suites.convolutions import Compared, benchmark_convolutions, convolutions_tables
    from mucudnn.core.terminal import progress_bar

    table = load_source(source, batch=batch, batch_scale=batch_scale or 1.0, input_shape=input_shape)
    if filters:
        table = with_filters(table, filters)
    if source in TABLES and source != "deepbench-train" and not options.is_given("operations"):
        config = replace(config, operations=(Operation.FORWARD,))
    sizes = tuple(size for size in budgets if size is not None)
    comparison = Compared(**compared, budgets=sizes, time_limit_s=run_time_limit)
    with outputs.shown(convolutions_tables) as folder, progress_bar() as progress:
        benchmark_convolutions(table, config, comparison, folder, device=device, progress=progress)
