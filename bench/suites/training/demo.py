"""``make demo``: tunes AlexNet's convolutions, then trains AlexNet with torch's and with mucudnn's, side by side."""

from __future__ import annotations

import copy

import torch
from rich.table import Table

import mucudnn
from mucudnn.bench.analyses.tuning_report import tuning_table
from mucudnn.bench.report.tables import milliseconds, new_table, ratio
from mucudnn.bench.sources.layers import load_source
from mucudnn.bench.sources.networks import build, input_shape_of
from mucudnn.bench.sources.table_tuning import tune_table
from mucudnn.bench.sources.trainee import labelled_batches
from mucudnn.bench.suites.training.side_by_side import TrainingComparison, train_in_turns
from mucudnn.running.environment import current_environment
from mucudnn.terminal.console import output, progress_bar
from mucudnn.words.config import Config


def training_table(comparison: TrainingComparison) -> Table:
    """Time per step with torch.nn.Conv2d and with mucudnn, how far the losses part, and how exact gradients are."""
    printed = new_table(f"training, {len(comparison.losses)} steps in turns from the same seed", ("",), ("",))
    printed.show_header = False
    printed.add_row("torch.nn.Conv2d, ms per step", milliseconds(comparison.torch_step_s))
    printed.add_row("mucudnn, ms per step", milliseconds(comparison.mucudnn_step_s))
    printed.add_row("speedup of the whole step", ratio(comparison.speedup))
    printed.add_row("loss, first and last step", f"{comparison.losses[0]:.3f} → {comparison.losses[-1]:.3f}")
    rows = (("mucudnn", comparison.difference), ("torch in channels_last", comparison.yardstick))
    for name, difference in rows:
        printed.add_row(f"{name} against torch: largest relative difference of the losses", f"{difference.loss:.1e}")
        printed.add_row(f"{name} against torch: ... and of the first step's gradients", f"{difference.gradient:.1e}")
    printed.add_row("torch against float64: ... of the first step's gradients", f"{comparison.errors.torch:.1e}")
    printed.add_row("mucudnn against float64: ... of the first step's gradients", f"{comparison.errors.mucudnn:.1e}")
    return printed


NETWORK = "alexnet"
INPUT_SHAPE = input_shape_of(NETWORK)
BATCH_SIZE = 32
STEPS = 8
CONFIG = Config(workspace_limit="64MiB")


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
        comparison = train_in_turns(model, optimized, labelled_batches(STEPS, BATCH_SIZE, INPUT_SHAPE))
    console.print(training_table(comparison))
    if (confirmation := mucudnn.report(optimized).confirmation) is not None:
        console.print(f"confirmed when it was tuned: {confirmation}")


if __name__ == "__main__":
    main()
