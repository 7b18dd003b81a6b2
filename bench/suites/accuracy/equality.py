"""Trains a network with torch's and mucudnn's convolutions, interleaved, from the same seed, to compare the results.

Any two implementations round differently, and training amplifies the differences. Losses are therefore compared step by
step, but gradients only in the first step, where both models have the same weights: with torch's gradients and with
gradients computed in float64. The yardstick is the difference between torch and torch in the other memory format.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

import mucudnn
from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.rows import Row, Subject
from mucudnn.bench.folders.writing import write_missing
from mucudnn.bench.report.records import config_record
from mucudnn.bench.sources.models import load_model
from mucudnn.bench.sources.trainee import Batch, TrainedStep, Trainee, labelled_batches
from mucudnn.running.environment import current_environment
from mucudnn.words.config import Config
from mucudnn.words.progress import Progress, silent

STEPS = 8


def benchmark_equality(
    network: str,
    configs: Sequence[Config],
    out: Path,
    *,
    batch_size: int,
    steps: int = STEPS,
    device: str = "cpu",
    progress: Progress = silent,
) -> None:
    """Train a network with torch and with mucudnn, interleaved, for each config; write rows into the folder ``out``.

    configs: may differ only in policy and limit; a config that the folder already has is skipped. steps: number of
    training steps of each model, on random images with learnable labels; the first step is not timed.

    Raises the errors of ``open_folder`` and ``mucudnn.optimize``.
    """
    settings = {
        **config_record(configs[0]),
        "batch_sizes": [batch_size],
        "steps": steps,
        "policy": [str(config.policy) for config in configs],
        "workspace_limit": [config.workspace_limit_bytes for config in configs],
    }
    environment = current_environment(device)

    def rows_of(config: Config, subject: Subject, progress: Progress) -> tuple[Row, Row]:
        torch.manual_seed(0)
        model, shape = load_model(network)
        model = model.to(device)
        batches = [(x.to(device), labels.to(device)) for x, labels in labelled_batches(steps, batch_size, shape)]
        ours: nn.Module = mucudnn.optimize(copy.deepcopy(model), batches[0][0], config, progress=progress)
        progress("training, in turns", 0.9)
        torchs_row, our_row = train_in_turns(model, ours, batches, subject)
        return torchs_row, replace(our_row, policy=str(config.policy), limit_bytes=config.workspace_limit_bytes)

    wanted = {
        (network, batch_size, f"{one.policy}, workspace limit {one.workspace_limit_bytes}"): partial(rows_of, one)
        for one in configs
    }
    columns = ("network", "batch_size", "choices")
    write_missing(out, Header("equality", network, settings, environment, columns, len(wanted)), wanted, progress)


def train_in_turns(
    torch_model: nn.Module, mucudnn_model: nn.Module, batches: Iterable[Batch], subject: Subject
) -> tuple[Row, Row]:
    """Train torch's and mucudnn's model, interleaved, for one step per batch; return torch's row and mucudnn's row.

    The first step is an untimed warm-up. relative_error: the largest error of a parameter's gradient in the first step,
    against float64. loss_difference, gradient_difference: the largest relative difference from torch over the losses of
    all steps, and over the gradients of the first step; in torch's row, the difference of torch in the other memory
    format. Only in mucudnn's row: loss_over_yardstick, gradient_over_yardstick: mucudnn's difference over torch's, None
    if torch's is 0; losses: the loss of each step.

    The other format and float64 run afterwards, because the memory of a third model would slow down the other two.
    """
    kept = list(batches)
    again, ours_again = copy.deepcopy(torch_model), copy.deepcopy(mucudnn_model)
    torchs, ours, difference = _in_turns(torch_model, mucudnn_model, kept)
    channels_last = copy.deepcopy(again).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    torchs_error, our_error = _gradient_errors(copy.deepcopy(again), ours_again, kept[0])
    _, _, yardstick = _in_turns(again, channels_last, kept)
    over = {
        name.replace("difference", "over_yardstick"): found / yardstick[name] if yardstick[name] else None
        for name, found in difference.items()
    }
    losses = [step.loss for step in ours]
    torchs_row, our_row = (
        Row(subject, name, samples_s=[step.time_s for step in steps[1:]])
        for name, steps in (("torch", torchs), ("mucudnn", ours))
    )
    return (
        replace(torchs_row, relative_error=torchs_error, more=yardstick),
        replace(our_row, relative_error=our_error, more={**difference, **over, "losses": losses}),
    )


def _in_turns(
    reference: nn.Module, model: nn.Module, batches: Sequence[Batch]
) -> tuple[list[TrainedStep], list[TrainedStep], dict[str, float]]:
    """Train the reference model and ``model``, interleaved, for one step per batch.

    Return the steps of both, and by name the largest differences of ``model`` in loss and gradient.
    """
    trainees = Trainee(reference), Trainee(model)
    steps: list[tuple[TrainedStep, TrainedStep]] = []
    gradient = 0.0
    for seed, (images, labels) in enumerate(batches):
        a, b = (trainee.step(images, labels, seed) for trainee in trainees)
        steps.append((a, b))
        if seed == 0:
            gradient = _gradient_difference(reference, model)
    loss = max(abs(a.loss - b.loss) / abs(a.loss) for a, b in steps)
    own, others = ([pair[which] for pair in steps] for which in (0, 1))
    return own, others, {"loss_difference": loss, "gradient_difference": gradient}


def _gradient_errors(torch_model: nn.Module, mucudnn_model: nn.Module, first: Batch) -> tuple[float, float]:
    """Run one training step of both models; return their gradients' errors against a float64 copy of torch's model."""
    images, labels = first
    exact = copy.deepcopy(torch_model).double()
    Trainee(exact).step(images.double(), labels, seed=0)
    for model in (torch_model, mucudnn_model):
        Trainee(model).step(images, labels, seed=0)
    return _gradient_difference(exact, torch_model), _gradient_difference(exact, mucudnn_model)


def _gradient_difference(reference: nn.Module, model: nn.Module) -> float:
    """Return the largest relative difference ‖a - b‖ / ‖a‖ between two models' gradients, over all parameters."""
    pairs = zip(reference.parameters(), model.parameters(), strict=True)
    gradients = [(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None]
    return max(float((a - b).norm() / a.norm()) for a, b in gradients)
