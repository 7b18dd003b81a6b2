"""``mucudnn scale``: predict data-parallel training from measurements of one device, or measure learners on it."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from math import inf
from typing import Any

import click

from mucudnn.cli.shared import options, parameters
from mucudnn.cli.shared.commands import FileCommand, Outputs
from mucudnn.cli.shared.options import outputs
from mucudnn.core.config import Config
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.values import NUMBER, parse_seconds, shown
from mucudnn.solver.all_reduce import AllReduce, Link

_OF_RANKS = ("batch", "ranks", "up_to", "latency", "bandwidth", "all_reduce")  # options of the prediction alone
_SIZES = 3  # number of local batches at which steps are measured
_BYTES_PER_S = {"b": 1.0} | {
    f"{prefix}{unit}": base**power * bytes_of_unit
    for power, prefix in enumerate("kmgt", start=1)
    for unit, base, bytes_of_unit in (("b", 1e3, 1.0), ("ib", 1024.0, 1.0), ("bit", 1e3, 1 / 8))
}  # by unit in lower case


def parse_bandwidth(text: str) -> float:
    """Parse a bandwidth in decimal units (GB/s), powers of 1024 (GiB/s) or bits (Gbit/s); return bytes per second.

    Raises ``InvalidInputError`` for anything else, and for 0.

    >>> parse_bandwidth("25GB/s"), parse_bandwidth("100 Gbit/s"), parse_bandwidth("1GiB/s")
    (25000000000.0, 12500000000.0, 1073741824.0)
    """
    match = re.fullmatch(rf"\s*({NUMBER})\s*([A-Za-z]+)/s\s*", text)
    factor = None if match is None else _BYTES_PER_S.get(match.group(2).lower())
    if match is None or factor is None or not 0 < float(match.group(1)) * factor < inf:
        raise InvalidInputError(f"bandwidth {shown(text)} is not understood; write for example 25GB/s or 100Gbit/s")
    return float(match.group(1)) * factor


@click.command(cls=FileCommand)
@options.source_argument
@options.option(
    "batch", parameters.count(most=parameters.MOST_SOLVED), "Samples of all ranks together, under strong scaling.", 1024
)
@options.option("ranks", parameters.Text("N,...", parameters.parse_ranks), "Numbers of ranks.", "1,2,4,...,4096")
@options.option(
    "up-to",
    parameters.count(2, most=parameters.MOST_SOLVED),
    "Largest local batch to measure, and that of weak scaling; larger ones are extrapolated.",
    64,
)
@options.bundled(
    "link",
    lambda latency, bandwidth: Link(latency, bandwidth),
    options.option("latency", parameters.Text("TIME", parse_seconds), "Latency of a message between two ranks.", "5us"),
    options.option(
        "bandwidth",
        parameters.Text("SPEED", parse_bandwidth),
        "Bandwidth of a rank's link, each way, as 100Gbit/s.",
        "25GB/s",
    ),
)
@options.option("all-reduce", parameters.choice(AllReduce), "Algorithm of the all-reduces.", "ring")
@options.option(
    "learners",
    parameters.Text("N,...", parameters.parse_ranks),
    "Predict nothing, but measure so many learners on the device: processes that train on their own, such as 1,2,4.",
)
@options.option("local-batch", parameters.COUNTS, "Samples in a step of a learner, with --learners.", "8,16")
@options.rounds(5, "Steps to measure for each local batch size, or samples for each number of learners.")
@options.input_shape
@options.dtype
@options.memory_format
@options.config(options.workspace_limit("64MiB"), "time_limit", "database")
@options.threads
@options.device
@outputs("csv")
def scale(
    source: str,
    batch: int,
    ranks: tuple[int, ...],
    up_to: int,
    link: Link,
    all_reduce: AllReduce,
    learners: tuple[int, ...] | None,
    local_batch: tuple[int, ...],
    rounds: int,
    device: str,
    outputs: Outputs,
    config: Config,
    **sizes: Any,
) -> None:
    """Predict data-parallel training of SOURCE, a network or package.module:factory, on many equal ranks.

    Tunes the model at a few local batches, and measures steps with PyTorch's convolutions and with mucudnn's there, in
    turns. Communication is that of DistributedDataParallel, modelled by latency and bandwidth. Shows step time,
    throughput and efficiency, the best bucket sizes, and the local batch below which a device is underused.

    With --learners, measures the throughput of several processes on this device, each tuned beside the others. On a CPU
    they share the threads.
    """
    import torch

    from mucudnn.bench.sources.models import blamed_in_training, importable, seeded_model
    from mucudnn.bench.sources.trainee import loss_for
    from mucudnn.bench.suites.learners import LearnersSetting, knees_in_words, learners_table, measure_learners
    from mucudnn.bench.suites.scaling import in_words, measure_steps, predict, scale_table
    from mucudnn.core.tables import memory_bound
    from mucudnn.core.terminal import progress_bar
    from mucudnn.core.torch_settings import deterministic_torch
    from mucudnn.measuring.clocks import wall_clock
    from mucudnn.optimizing.optimize import optimize
    from mucudnn.running.devices import current_environment

    if wrong := [name for name in _OF_RANKS if learners and options.is_given(name)]:
        raise click.UsageError(f"--{wrong[0].replace('_', '-')} is of the prediction, which --learners replaces")
    with deterministic_torch(asked=config.deterministic):
        environment = current_environment(device)  # fails early if the device is missing
    if learners:
        setting = LearnersSetting(source, device, local_batch, config, sizes)
        with progress_bar() as progress, importable(source):
            throughputs = measure_learners(setting, learners, rounds=rounds, progress=progress)
        title = f"{source}, {memory_bound(config)}"
        outputs.tell(
            learners_table(title, throughputs),
            knees_in_words(throughputs),
            str(environment),
            rows=[asdict(throughput) for throughput in throughputs],
        )
        return
    up_to = max(2, min(up_to, batch))
    model, x = seeded_model(source, up_to, device, **sizes)
    model.train()
    labels = torch.zeros(up_to, dtype=torch.long, device=x.device)
    with progress_bar() as progress, importable(source), blamed_in_training(source, x.shape):
        measured = measure_steps(
            model,
            lambda n: (x[:n], labels[:n]),
            loss_for(source),
            sorted({round(up_to ** (i / (_SIZES - 1))) for i in range(_SIZES)}),
            lambda network, images, progress: optimize(
                network, images, replace(config, confirm=False), progress=progress
            ),
            wall_clock(device),
            rounds=rounds,
            progress=progress,
        )
    points = [*predict(measured, link, all_reduce, ranks, batch=batch, local_batch=up_to)]
    title = f"{source}, {batch} samples in all or {up_to} a rank, {memory_bound(config)}"
    outputs.tell(
        scale_table(title, points), in_words(measured), str(environment), rows=[asdict(point) for point in points]
    )
