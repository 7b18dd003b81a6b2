"""The program of ``make demo``: tunes AlexNet, then trains it with torch and with mucudnn, interleaved.

Any two implementations round differently, and training amplifies the differences. Losses are therefore compared step by
step, but gradients only in the first step, where all models have the same weights. The yardstick is the difference
between torch and torch in the other memory format.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

import mucudnn
from mucudnn.bench.results.tuning_report import tuning_table
from mucudnn.bench.sources.layers import load_source
from mucudnn.bench.sources.networks import build, input_shape_of
from mucudnn.bench.sources.table_tuning import tune_table
from mucudnn.bench.sources.trainee import Batch, Trainee, labelled_batches
from mucudnn.core.config import Config
from mucudnn.core.tables import Column, Table, milliseconds, ratio
from mucudnn.core.terminal import output, progress_bar
from mucudnn.kernels.torch_convolution import relative_l2_error
from mucudnn.measuring.turns import in_turns
from mucudnn.running.devices import current_environment

NETWORK = "alexnet"
BATCH_SIZE = 32
STEPS = 8
CONFIG = Config(workspace_limit="64MiB")


@dataclass(frozen=True)
class Training:
    """The seconds and losses of the steps of a training, the first of which is a warm-up, and its gradients."""

    times_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)

    def steps(self, model: nn.Module, batches: Sequence[Batch]) -> Iterator[None]:
        """Train the model, one step and batch after the other, with random numbers that depend on the step alone."""
        trainee = Trainee(model)
        for seed, (images, labels) in enumerate(batches):
            x = images.to(next(model.parameters()).dtype)
            torch.manual_seed(seed)
            begun_s = time.perf_counter()
            self.losses.append(trainee.learn(x, labels).item())  # This waits for the GPU.
            self.times_s.append(time.perf_counter() - begun_s)
            if seed == 0:
                self.gradients.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
            yield

    def gradient_difference(self, reference: Training) -> float:
        """Return the largest relative difference ‖a - b‖ / ‖b‖ of a parameter's gradient in the first step."""
        return max(map(relative_l2_error, self.gradients, reference.gradients))

    def loss_difference(self, reference: Training) -> float:
        """Return the largest relative difference of the loss of a step."""
        return max(abs(a / b - 1) for a, b in zip(self.losses, reference.losses, strict=True))


def train_in_turns(models: Sequence[nn.Module], batches: Sequence[Batch]) -> list[Training]:
    """Train the models, interleaved, for one step per batch, with the same random numbers for dropout."""
    trainings = [Training() for _ in models]
    pairs = zip(trainings, models, strict=True)
    turns = in_turns([partial(next, training.steps(model, batches)) for training, model in pairs])
    for _ in batches:
        next(turns)
    return trainings


def training_table(torchs: Training, ours: Training, reformatted: Training, exact: Training) -> Table:
    """Return a table of step times, and of differences from torch and from float64.

    reformatted: torch in channels_last.
    """
    torch_s, our_s = (median(training.times_s[1:]) for training in (torchs, ours))
    lines = {
        "torch.nn.Conv2d, ms per step": milliseconds(torch_s),
        "mucudnn, ms per step": milliseconds(our_s),
        "speedup of the whole step": ratio(torch_s / our_s),
        "loss, first and last step": f"{ours.losses[0]:.3f} → {ours.losses[-1]:.3f}",
    }
    for name, training in (("mucudnn", ours), ("PyTorch in channels_last", reformatted)):
        against = f"{name} against PyTorch: "
        lines[f"{against}largest relative difference of the losses"] = f"{training.loss_difference(torchs):.1e}"
        lines[f"{against}... and of the first step's gradients"] = f"{training.gradient_difference(torchs):.1e}"
    for name, training in (("PyTorch", torchs), ("mucudnn", ours)):
        error = training.gradient_difference(exact)
        lines[f"{name} against float64: ... of the first step's gradients"] = f"{error:.1e}"
    title = f"training, {len(ours.losses)} steps in turns from the same seed"
    return Table(title, [Column(""), Column("", form="")], [*lines.items()], show_header=False)


def main() -> None:
    console = output()
    console.print(f"mucudnn {mucudnn.__version__} on {current_environment()}\n")
    with progress_bar() as progress:
        tuning = tune_table(load_source(NETWORK, batch=BATCH_SIZE), CONFIG, progress=progress)
    console.print(tuning_table(tuning))

    torch.manual_seed(0)
    model = build(NETWORK)
    batches = [*labelled_batches(STEPS, BATCH_SIZE, input_shape_of(NETWORK))]
    with progress_bar() as progress:
        ours = mucudnn.optimize(copy.deepcopy(model), batches[0][0], CONFIG, progress=progress)
    reformatted = copy.deepcopy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    exact = copy.deepcopy(model).double()
    with console.status(f"training {NETWORK}: {STEPS} steps of torch.nn.Conv2d and of mucudnn, in turns"):
        trained = train_in_turns((model, ours), batches)
        trained += [*train_in_turns((reformatted,), batches), *train_in_turns((exact,), batches[:1])]
    console.print(training_table(*trained))
    if (confirmation := mucudnn.report(ours).confirmation) is not None:
        console.print(f"confirmed when it was tuned: {confirmation}")


if __name__ == "__main__":
    main()
