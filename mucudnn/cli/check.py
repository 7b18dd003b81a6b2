"""``mucudnn check``: check PyTorch's own convolutions of a source on this machine."""

from __future__ import annotations

from typing import Any

import click

from mucudnn.cli.shared import options
from mucudnn.terminal.files import FileCommand

_WRONG = 1  # exit status


@click.command(cls=FileCommand)
@options.source
@options.dtype
@options.memory_format
@options.threads
@click.pass_context
def check(context: click.Context, /, source: str, **sizes: Any) -> None:
    """Run PyTorch's own convolutions of SOURCE in a separate process, and compare them with float64.

    Each operation of each layer runs in both memory formats, between red zones and under checks of the heap. Listed are
    those that give wrong results, crash, hang, or take more than 20 times as long as their float32 arithmetic, each
    with a few lines of plain PyTorch that reproduce it. Nothing is tuned, and only the CPU is checked.

    Exit status: 1 if something is wrong in the memory format that the model itself uses (--memory-format), else 0.
    """
    from mucudnn.bench.analyses.check import check as checked
    from mucudnn.bench.analyses.check import findings_table
    from mucudnn.bench.sources.layers import load_source
    from mucudnn.measuring.proving.prover import prover
    from mucudnn.terminal.console import output
    from mucudnn.words.progress import progress_bar

    table = load_source(source, **sizes)
    with progress_bar() as progress:
        found = list(checked(table, prover(), progress))
    console, faults = output(), [finding for finding in found if finding.verdict != "right"]
    if faults:
        console.print(findings_table(table.source, faults))
    for finding in faults:
        console.print(f"\n{finding.problem}, batch {finding.layer.batch_size}: {finding.verdict}")
        console.print(finding.reproducer(), soft_wrap=True)
    right = len(found) - len(faults)
    console.print(f"PyTorch's own convolutions, in both memory formats: {right} of {len(found)} right")
    if any(finding.is_users and finding.is_fault for finding in found):
        context.exit(_WRONG)
