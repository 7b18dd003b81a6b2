"""``mucudnn bench data-parallel``: steps of data-parallel training on several ranks."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from mucudnn.bench.results.variants import Communication
from mucudnn.cli.shared import options, parameters
from mucudnn.cli.shared.commands import FileCommand, Outputs
from mucudnn.cli.shared.options import outputs
from mucudnn.cli.shared.ranks import of_torchrun, on_every_rank
from mucudnn.core.config import Config
from mucudnn.core.errors import InvalidInputError, SharingError, UnavailableError
from mucudnn.core.problem import MemoryFormat
from mucudnn.core.values import shown

if TYPE_CHECKING:
    from mucudnn.bench.results.writing import Row
    from mucudnn.bench.suites.data_parallel import RanksSetting

_MOST_RANKS = 64  # processes on one machine
_BATCH = {"cuda": 64, "cpu": 8}  # samples of each rank
_LARGEST_CAP = 65536.0  # MiB
_LONGEST_PERIOD = 1000  # steps: a sample runs a whole period


def parse_cap(text: str) -> float | None:
    """Parse a size for ``bucket_cap_mb``; ``default``, for PyTorch's size, is None. Raises ``InvalidInputError``.

    >>> parse_cap("default"), parse_cap("0.5")
    (None, 0.5)
    """
    if text == "default":
        return None
    with suppress(ValueError):
        if 0 < (cap := float(text)) <= _LARGEST_CAP:
            return cap
    raise InvalidInputError(f"{shown(text)} is not a bucket size in MiB; write for example default,1,5,25")


def _measured(
    setting: RanksSetting, input_shape: tuple[int, ...] | None, rounds: int, threads: int, config: Config
) -> list[Row]:
    """Measure training steps on this rank (process). The arguments are options of the command."""
    import torch
    import torch.distributed as dist

    from mucudnn.bench.sources.models import importable, load_model
    from mucudnn.bench.sources.trainee import loss_for
    from mucudnn.bench.suites.data_parallel import measure_data_parallel
    from mucudnn.core.terminal import progress_bar, silent

    options.use_threads(threads)
    torch.manual_seed(0)
    model, shape = load_model(
        setting.source, input_shape=input_shape, dtype=setting.dtype, memory_format=setting.memory_format
    )
    with progress_bar() as progress, importable(setting.source):
        return measure_data_parallel(
            setting,
            model,
            shape,
            loss_for(setting.source),
            config,
            rounds=rounds,
            progress=silent if dist.get_rank() else progress,
        )


@click.command(cls=FileCommand)
@options.source_argument
@options.option(
    "ranks",
    parameters.count(most=_MOST_RANKS),
    "Number of ranks, each a process; default: 2, or those of torchrun.",
)
@options.option("batch", parameters.count(), "Samples of each rank; default: 64 on cuda, 8 on cpu.")
@options.option(
    "communication", parameters.choice(Communication), "Method by which the ranks communicate.", "allreduce"
)
@options.option(
    "period",
    parameters.count(2, most=_LONGEST_PERIOD),
    "For post-local-sgd and hierarchical-sgd: steps between averagings over all ranks.",
    4,
)
@options.option(
    "bucket-cap-mb",
    parameters.Text("MIB,...", parameters.listed(parse_cap)),
    "Bucket sizes of DistributedDataParallel to compare, interleaved, such as default,1,25.",
    "default",
    "bucket_caps",
)
@options.rounds(9, "Samples of each kind of step.")
@options.input_shape
@options.dtype
@options.memory_format
@options.config(options.limit_or_headroom, "time_limit", "database")
@options.option(
    "threads",
    parameters.count(most=parameters.MOST_THREADS),
    "CPU threads of each rank; default: the cores divided by the ranks of a machine, at least 1.",
)
@options.option(
    "device",
    click.Choice(["cpu", "cuda"]),
    "Where to run: cpu (the ranks exchange over gloo), or cuda (over NCCL, each rank on the GPU of its number).",
    "cpu",
)
@outputs("out")
def data_parallel(
    ranks: int | None,
    batch: int | None,
    communication: Communication,
    rounds: int,
    input_shape: tuple[int, ...] | None,
    threads: int | None,
    device: str,
    outputs: Outputs,
    config: Config,
    **trained: Any,
) -> None:
    """Time data-parallel training of SOURCE, a network or package.module:factory, PyTorch and mucudnn interleaved.

    Every rank trains on its own samples, in PyTorch's DistributedDataParallel. The time of a step is split into
    convolutions, other compute, and communication that is not hidden; after the steps the ranks' parameters are
    compared bit by bit. Also under torchrun: torchrun --nproc-per-node 4 -m mucudnn bench data-parallel SOURCE.
    """
    import torch

    from mucudnn.bench.results.writing import open_folder
    from mucudnn.bench.suites.data_parallel import RanksSetting, data_parallel_tables
    from mucudnn.running.devices import current_environment, require_cuda

    if communication is Communication.BF16 and device == "cpu":
        raise click.UsageError("PyTorch sends bf16 between GPUs only: give --communication fp16, or --device cuda")
    if communication.averages_parameters and trained["memory_format"] is MemoryFormat.CHANNELS_LAST:
        raise click.UsageError(
            f"PyTorch's averaging leaves parameters contiguous, so {communication} does not go with "
            "--memory-format channels-last: leave it out, or give another --communication"
        )
    started = of_torchrun("WORLD_SIZE")
    if started is not None and ranks not in (None, started):
        raise click.UsageError(f"torchrun has started {started} ranks, not {ranks}: leave --ranks out")
    ranks = started or ranks or 2
    here = of_torchrun("LOCAL_WORLD_SIZE") or ranks
    if device == "cuda":
        require_cuda()
        if here > torch.cuda.device_count():
            raise UnavailableError(
                f"{here} ranks need as many GPUs, and there are {torch.cuda.device_count()}: give fewer --ranks"
            )
    threads = threads or max(1, len(os.sched_getaffinity(0)) // here)
    batch_size = batch or _BATCH[device]
    setting = RanksSetting(**trained, ranks=ranks, batch_size=batch_size, device=device, communication=communication)
    measuring = partial(_measured, setting, input_shape, rounds, threads, config)
    if of_torchrun("RANK") not in (None, 0):
        on_every_rank(measuring, ranks, device)
        return
    header = setting.header(config, rounds, replace(current_environment(device), threads=threads))
    with outputs.shown(data_parallel_tables) as path, open_folder(path, header) as folder:
        is_measured = any(folder.known(setting.subject(cap)) for cap in setting.bucket_caps)
        if is_measured and started is None:  # ranks of torchrun would wait for this one
            folder.write_summary()
            return
        rows = on_every_rank(measuring, ranks, device) or []
        folder.add(rows)
        folder.write_summary()
        if any(row.more["equal"] < row.more["compared"] for row in rows):
            raise SharingError("the parameters of the ranks were not equal after all steps; report this")
