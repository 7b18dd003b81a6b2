"""Trains torch's and mucudnn's convolutions from the same seed into a result folder: whether both learn the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import mucudnn
from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.rows import Row, Subject
from mucudnn.bench.folders.writing import open_folder
from mucudnn.bench.report.records import config_record
from mucudnn.bench.sources.trainable import trainable_model
from mucudnn.bench.sources.trainee import Batch, labelled_batches
from mucudnn.bench.suites.training.side_by_side import TrainingComparison, train_in_turns
from mucudnn.running.environment import current_environment
from mucudnn.words.config import Config
from mucudnn.words.progress import Progress, share_of, silent

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
    """Train the network with torch and, in turns with it, as each config tunes it, into the folder ``out``.

    configs: those that differ in policy or limit alone. What the folder has already is not trained again. steps: of
    each model, on random images with labels that can be learnt; the first is not timed.

    Raises what ``open_folder`` and ``mucudnn.optimize`` raise.
    """
    with open_folder(out, _header(network, configs, batch_size, steps, device)) as folder:
        for index, config in enumerate(configs):
            subject = _subject(network, batch_size, config)
            if folder.known(subject):
                continue
            part = share_of(progress, index / len(configs), 1 / len(configs))
            folder.add([*_rows(subject, config, _compared(network, config, batch_size, steps, device, part))])
        folder.write_summary()


def _compared(
    network: str, config: Config, batch_size: int, steps: int, device: str, progress: Progress
) -> TrainingComparison:
    torch.manual_seed(0)
    model, shape = trainable_model(network)
    model = model.to(device)
    batches = [_on(device, batch) for batch in labelled_batches(steps, batch_size, shape)]
    ours: nn.Module = mucudnn.optimize(copy.deepcopy(model), batches[0][0], config, progress=progress)
    progress("training, in turns", 0.9)
    return train_in_turns(model, ours, batches)


def _on(device: str, batch: Batch) -> Batch:
    images, labels = batch
    return images.to(device), labels.to(device)


def _header(network: str, configs: Sequence[Config], batch_size: int, steps: int, device: str) -> Header:
    settings = {
        **config_record(replace(configs[0], database=None)),
        "batch_sizes": [batch_size],
        "steps": steps,
        "policy": [str(config.policy) for config in configs],
        "workspace_limit": [config.workspace_limit_bytes for config in configs],
    }
    environment = current_environment(device)
    return Header("equality", network, settings, environment, ("network", "batch_size", "choices"), len(configs))


def _subject(network: str, batch_size: int, config: Config) -> Subject:
    choices = f"{config.policy}, workspace limit {config.workspace_limit_bytes}"
    return {"network": network, "batch_size": batch_size, "choices": choices}


def _rows(subject: Subject, config: Config, found: TrainingComparison) -> Iterator[Row]:
    """Yield torch's row and ours. Errors of the gradients are from float64, differences from torch's.

    Torch's own differences are those of its other memory format: the yardstick.
    """
    yield Row(
        *(subject, "torch", found.torch_s),
        relative_error=found.errors.torch,
        more={
            "loss_difference": found.yardstick.loss,
            "gradient_difference": found.yardstick.gradient,
        },
    )
    yield Row(
        *(subject, "mucudnn", found.mucudnn_s, str(config.policy), config.workspace_limit_bytes),
        relative_error=found.errors.mucudnn,
        more={
            "loss_difference": found.difference.loss,
            "gradient_difference": found.difference.gradient,
            "loss_over_yardstick": _over(found.difference.loss, found.yardstick.loss),
            "gradient_over_yardstick": _over(found.difference.gradient, found.yardstick.gradient),
            "losses": list(found.losses),
        },
    )


def _over(difference: float, yardstick: float) -> float | None:
    """Return how many times as far ours parts from torch's as torch's own; ``None``: that does not part at all."""
    return difference / yardstick if yardstick else None
