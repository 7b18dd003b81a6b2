"""``mucudnn bench budgets``: training steps within memory budgets, by mucudnn and by PyTorch's ways to save memory."""

from __future__ import annotations

import click

from mucudnn.bench.results.variants import SAVINGS, Saving, budget_bytes
from mucudnn.cli.shared import options, parameters
from mucudnn.cli.shared.commands import FileCommand, Outputs
from mucudnn.cli.shared.options import outputs
from mucudnn.cli.shared.parameters import SOURCE
from mucudnn.core.config import Config
from mucudnn.core.problem import MemoryFormat


def parse_budget(text: str) -> str:
    """Return the text of a budget. Raises ``InvalidInputError`` for other text.

    >>> parse_budget("1/3")
    '1/3'
    """
    budget_bytes(text, step_bytes=0)
    return text


@click.command(cls=FileCommand)
@click.argument("sources", type=SOURCE, nargs=-1, required=True)
@options.batch_sizes("8")
@options.flag(
    "largest-batch",
    "Time the largest batch of each variant within each budget, which is a size; torch-accumulate has none.",
)
@options.option(
    "budgets",
    parameters.Text("SHARE|SIZE,...", parameters.listed(parse_budget)),
    "Memory of a step: shares of what PyTorch's needs, such as 1/3, or sizes, such as 2GiB.",
    ("1/2", "1/3", "1/5"),
)
@options.input_shape
@options.option(
    "memory-format",
    parameters.choice(MemoryFormat),
    "Memory format of images; volumes are contiguous.",
    "channels-last",
)
@options.option(
    "variants", parameters.several(Saving), "Variants to compare with PyTorch's own.", ",".join(SAVINGS), "savings"
)
@options.rounds(9, "Samples of each variant; each is one step or several.")
@options.run_time_limit
@options.config(options.limit_or_headroom, "confirm", "fuse", "time_limit", "database")
@options.threads
@options.device
@outputs("out")
def budgets(
    sources: tuple[str, ...],
    batch_sizes: tuple[int, ...] | None,
    budgets: tuple[str, ...],
    input_shape: tuple[int, ...] | None,
    memory_format: MemoryFormat,
    savings: tuple[Saving, ...],
    rounds: int,
    run_time_limit: float | None,
    device: str,
    outputs: Outputs,
    config: Config,
    *,
    largest_batch: bool,
) -> None:
    """Time training steps of each SOURCE within memory budgets: mucudnn, and PyTorch's ways to save memory.

    torch-checkpoint computes 2 to 8 segments again, or blocks of a model that is no sequence; torch-accumulate adds the
    gradients of parts of the batch; torch-compile, which takes minutes, has PyTorch's activation_memory_budget. Each
    variant has its own process, counts the peak of a step, and chooses what needs the most memory within the budget, or
    if nothing fits, the least. Steps are interleaved with those of PyTorch without a budget. SOURCE is as for mucudnn
    bench training. Rows that the folder of --out already has are not measured again.
    """
    from mucudnn.bench.suites.budgets import BudgetOptions, benchmark_budgets, budget_tables
    from mucudnn.core.terminal import progress_bar

    comparison = BudgetOptions(config, savings, memory_format, rounds, run_time_limit)
    if batch_sizes and largest_batch:
        raise click.UsageError("--batch and --largest-batch exclude each other: give one of them")
    sizes = (None,) * len(sources) if largest_batch else parameters.one_each(batch_sizes or (8,), sources)
    with outputs.shown(budget_tables) as folder, progress_bar() as progress:
        benchmark_budgets(
            sources, sizes, budgets, comparison, folder, input_size=input_shape, device=device, progress=progress
        )
