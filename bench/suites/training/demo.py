"""``make demo``: tunes AlexNet's convolutions, then trains AlexNet with torch's and with mucudnn's, side by side."""

from __future__ import annotations

import copy

import torch

import mucudnn
from mucudnn.bench.analyses.tuning_report import tuning_table
from mucudnn.bench.sources.layers import load_source
from mucudnn.bench.sources.networks import build, input_shape_of
from mucudnn.bench.sources.table_tuning import tune_table
from mucudnn.bench.sources.trainee import labelled_batches
from mucudnn.bench.suites.training.demo_report import training_table
from mucudnn.bench.suites.training.side_by_side import train_in_turns
from mucudnn.running.environment import current_environment
from mucudnn.terminal.console import output, progress_bar
from mucudnn.words.config import Config

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
