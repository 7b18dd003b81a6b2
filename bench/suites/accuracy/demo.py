"""The program of ``make demo``: tunes AlexNet, then trains it with torch and with mucudnn, interleaved."""

from __future__ import annotations

import copy
from statistics import median

import torch
from rich.table import Table

import mucudnn
from mucudnn.bench.analyses.tuning_report import tuning_table
from mucudnn.bench.folders.rows import Row
from mucudnn.bench.report.tables import milliseconds, new_table, ratio
from mucudnn.bench.sources.layers import load_source
from mucudnn.bench.sources.networks import build, input_shape_of
from mucudnn.bench.sources.table_tuning import tune_table
from mucudnn.bench.sources.trainee import labelled_batches
from mucudnn.bench.suites.accuracy.equality import train_in_turns
from mucudnn.running.environment import current_environment
from mucudnn.terminal.console import output
from mucudnn.words.config import Config
from mucudnn.words.progress import progress_bar

NETWORK = "alexnet"
INPUT_SHAPE = input_shape_of(NETWORK)
BATCH_SIZE = 32
STEPS = 8
CONFIG = Config(workspace_limit="64MiB")


def training_table(torchs: Row, ours: Row) -> Table:
    """Return a table of the step times of both trainings, the differences of their losses, and the gradient errors."""
    torch_s, our_s, losses = median(torchs.samples_s), median(ours.samples_s), ours.more["losses"]
    printed = new_table(f"training, {len(losses)} steps in turns from the same seed", ("",), ("",))
    printed.show_header = False
    printed.add_row("torch.nn.Conv2d, ms per step", milliseconds(torch_s))
    printed.add_row("mucudnn, ms per step", milliseconds(our_s))
    printed.add_row("speedup of the whole step", ratio(torch_s / our_s))
    printed.add_row("loss, first and last step", f"{losses[0]:.3f} → {losses[-1]:.3f}")
    for name, row in (("mucudnn", ours), ("PyTorch in channels_last", torchs)):
        loss, gradient = (f"{row.more[f'{of}_difference']:.1e}" for of in ("loss", "gradient"))
        printed.add_row(f"{name} against PyTorch: largest relative difference of the losses", loss)
        printed.add_row(f"{name} against PyTorch: ... and of the first step's gradients", gradient)
    for name, row in (("PyTorch", torchs), ("mucudnn", ours)):
        printed.add_row(f"{name} against float64: ... of the first step's gradients", f"{row.relative_error:.1e}")
    return printed


def main() -> None:
    console = output()
    console.print(f"mucudnn {mucudnn.__version__} on {current_environment()}\n")
    with progress_bar() as progress:
        tuning = tune_table(load_source(NETWORK, batch=BATCH_SIZE), CONFIG, progress=progress)
    console.print(tuning_table(tuning))

    torch.manual_seed(0)
    model = build(NETWORK)
    sample = torch.randn(BATCH_SIZE, *INPUT_SHAPE)
    with progress_bar() as progress:
        optimized = mucudnn.optimize(copy.deepcopy(model), sample, CONFIG, progress=progress)
    with console.status(f"training {NETWORK}: {STEPS} steps of torch.nn.Conv2d and of mucudnn, in turns"):
        rows = train_in_turns(model, optimized, labelled_batches(STEPS, BATCH_SIZE, INPUT_SHAPE), {})
    console.print(training_table(*rows))
    if (confirmation := mucudnn.report(optimized).confirmation) is not None:
        console.print(f"confirmed when it was tuned: {confirmation}")


if __name__ == "__main__":
    main()
