"""``mucudnn scale``: predict data-parallel training from measurements of one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from mucudnn.cli.shared import options, parameters
from mucudnn.cli.shared.layer_tables import require_complete, tune_with_progress, tuning_environment
from mucudnn.cli.shared.outputs import Outputs, outputs
from mucudnn.terminal.files import FileCommand
from mucudnn.words.communication import AllReduce, Link
from mucudnn.words.config import Config
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.units import parse_bandwidth, parse_seconds

if TYPE_CHECKING:
    from mucudnn.bench.scaling.steps import MeasuredSteps
    from mucudnn.bench.sources.table_tuning import TableTuning

_STEPS = 4  # number of local batch sizes for which whole steps are measured


def _latency(text: str) -> float:
    seconds = parse_seconds(text)
    if seconds is None:
        raise InvalidInputError(f"{text!r} is not a latency; write for example 5us")
    return seconds


@click.command(cls=FileCommand)
@options.source_argument
@options.option(
    "batch", parameters.Count(most=parameters.MOST_SOLVED), "Samples of all ranks together, under strong scaling.", 1024
)
@options.option("ranks", parameters.Text("N,...", parameters.parse_ranks), "Numbers of ranks.", "1,2,4,...,4096")
@options.option(
    "up-to",
    parameters.Count(2, most=parameters.MOST_SOLVED),
    "Largest local batch to measure; larger ones are extrapolated.",
    64,
)
@options.option(
    "local-batch",
    parameters.Count(most=parameters.MOST_SOLVED),
    "Samples of each rank, under weak scaling; default: the largest local batch that is measured.",
)
@options.option("latency", parameters.Text("TIME", _latency), "Latency of a message between two ranks.", "5us")
@options.option(
    "bandwidth",
    parameters.Text("SPEED", parse_bandwidth),
    "Bandwidth of a rank's link, each way, as 100Gbit/s.",
    "25GB/s",
)
@options.option("all-reduce", parameters.choice(AllReduce), "Algorithm of the all-reduces.", "ring")
@options.flag("measure", "Measure latency and bandwidth by all-reduces of the ranks of torchrun.")
@click.option(
    "--overlap/--no-overlap",
    "overlaps",
    default=True,
    help="Whether communication overlaps with the backward pass; on CPUs both use the same cores.",
)
@options.rounds(5, "Steps to measure for each local batch size.")
@options.input_shape
@options.dtype
@options.memory_format
@options.config(options.memory_bounds("64MiB"), *options.MEASURING, thorough=True)
@options.threads
@options.device
@outputs("csv", "json", "plot")
def scale(
    source: str,
    batch: int,
    ranks: tuple[int, ...],
    up_to: int,
    local_batch: int | None,
    latency: float,
    bandwidth: float,
    all_reduce: AllReduce,
    measure: bool,
    overlaps: bool,
    rounds: int,
    device: str,
    outputs: Outputs,
    config: Config,
    **sizes: Any,
) -> None:
    """Predict data-parallel training of SOURCE, a network or package.module:factory, on many equal ranks.

    Convolutions are tuned once, at the largest local batch, from which their times at all other sizes follow; whole
    steps of PyTorch are measured at a few sizes. Communication is that of DistributedDataParallel, modelled by latency
    and bandwidth. Shows step time, throughput and efficiency with PyTorch's convolutions and with mucudnn's, the best
    bucket sizes, and the local batch below which a device is underused.
    """
    import torch.distributed as dist

    from mucudnn.bench.analyses.batch_sizes import require_sweepable
    from mucudnn.bench.scaling.prediction import Cluster, predict_from
    from mucudnn.bench.scaling.report import draw_scale, in_words, scale_record, scale_rows, scale_tables
    from mucudnn.distributed.link import joined, launched_rank

    _refuse_given(measure)
    require_sweepable(config)
    tuning_environment(device, config)  # fails early if the device is missing
    rank = launched_rank() if measure else 0
    up_to = max(2, min(up_to, batch))
    measure_steps = partial(_measured_steps, source, up_to, sizes, config, device, rounds)
    if rank == 0:  # the others wait in joined()
        tuning, steps, ours = _tuned(source, up_to, sizes, config, device), measure_steps(), measure_steps(is_ours=True)
    link, together = Link(latency, bandwidth), None
    if measure:
        with joined(device):
            link, together = _measured_link(all_reduce, device), measure_steps(together=dist.barrier)
    if rank > 0:
        return
    result = predict_from(
        tuning,
        (steps, together, ours),
        Cluster(link, all_reduce, overlaps),
        ranks,
        up_to=up_to,
        batch=batch,
        local_batch=local_batch or up_to,
    )
    outputs.tell(
        *scale_tables(result),
        in_words(result),
        str(result.environment),
        rows=scale_rows(result),
        record=scale_record(result),
        figure=lambda: draw_scale(result),
    )


def _refuse_given(measure: bool) -> None:
    """Raise ``UsageError`` if --latency or --bandwidth is given with --measure."""
    for name in ("latency", "bandwidth") if measure else ():
        options.refuse_given(f"--measure finds the {name} itself: leave one of them out", name)


def _tuned(source: str, up_to: int, sizes: dict[str, Any], config: Config, device: str) -> TableTuning:
    from mucudnn.bench.sources.layers import load_source

    tuning = tune_with_progress(load_source(source, batch=up_to, **sizes), config, device)
    require_complete(tuning)
    return tuning


def _measured_link(all_reduce: AllReduce, device: str) -> Link:
    import torch.distributed as dist

    from mucudnn.distributed.link import all_reduce_times_s
    from mucudnn.measuring.timing.cuda_clock import wall_clock
    from mucudnn.solver.all_reduce import fitted_link

    return fitted_link(all_reduce, dist.get_world_size(), all_reduce_times_s(wall_clock(device), device))


def _measured_steps(
    source: str,
    up_to: int,
    sizes: dict[str, Any],
    config: Config,
    device: str,
    rounds: int,
    *,
    is_ours: bool = False,
    together: Callable[[], object] = lambda: None,
) -> MeasuredSteps:
    """Measure training steps at a few of the batch sizes that the policy allows, including the smallest and largest.

    is_ours: whether to run mucudnn's choices from the database in place of PyTorch's convolutions. together: called
    before each step to synchronize ranks.
    """
    from mucudnn.bench.scaling.steps import measure_steps
    from mucudnn.bench.sources.models import blamed_in_training, importable, seeded_model
    from mucudnn.measuring.timing.cuda_clock import wall_clock
    from mucudnn.optimizing.optimize import optimize
    from mucudnn.solver.policies import micro_batch_sizes
    from mucudnn.words.config import BatchSizePolicy
    from mucudnn.words.progress import progress_bar

    model, x = seeded_model(source, up_to, device, **sizes)
    every = micro_batch_sizes(BatchSizePolicy(config.policy), up_to)
    chosen = [every[round(i * (len(every) - 1) / (_STEPS - 1))] for i in range(_STEPS)]
    model.train()
    with progress_bar() as progress, importable(source), blamed_in_training(source, x.shape):
        if is_ours:
            optimize(model, x, replace(config, confirm=False), progress=progress)
        return measure_steps(
            model,
            lambda n: (x[:n],),
            chosen,
            wall_clock(device),
            rounds=rounds,
            together=together,
            progress=progress,
        )
