"""``mucudnn check``: check PyTorch's own convolutions of a source on this machine."""

from __future__ import annotations

from typing import Any

import click

from mucudnn.cli.shared import options
from mucudnn.cli.shared.commands import FileCommand


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
    from mucudnn.bench.sources.layers import load_source
    from mucudnn.bench.suites.check import check as checked
    from mucudnn.core.tables import new_table
    from mucudnn.core.terminal import output, progress_bar
    from mucudnn.measuring.proving.prover import prover

    with progress_bar() as progress:
        findings = list(checked(load_source(source, **sizes), prover(), progress))
    console, faults = output(), [finding for finding in findings if finding.verdict != "right"]
    printed = new_table(source, ("layer", "convolution"), ("batch", "verdict", "what was seen"))
    for fault in faults:
        name = fault.layer.name + ("" if fault.is_users else " (other memory format)")
        printed.add_row(name, str(fault.problem), str(fault.layer.batch_size), fault.verdict, fault.details)
    if faults:
        console.print(printed)
    for fault in faults:
        title = f"\n{fault.problem}, batch {fault.layer.batch_size}: {fault.verdict}\n"
        console.print(title + fault.reproducer(), soft_wrap=True)
    right = f"{len(findings) - len(faults)} of {len(findings)} right"
    console.print(f"PyTorch's own convolutions, in both memory formats: {right}")
    if any(fault.is_users and fault.verdict not in ("slow", "not proven") for fault in faults):
        context.exit(1)
