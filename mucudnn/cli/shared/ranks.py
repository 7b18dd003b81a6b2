"""Tuning a layer table on several devices: on the ranks that torchrun started, or on a worker process for each."""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from mucudnn.cli.shared.commands import in_options
from mucudnn.cli.shared.launch import cores_of_each, ranks_of_torchrun
from mucudnn.cli.shared.layer_tables import load_limited, tune_with_progress, tuning_environment
from mucudnn.cli.shared.options import use_threads
from mucudnn.words.errors import MucudnnError, SharingError

if TYPE_CHECKING:
    from mucudnn.bench.sources.table_tuning import TableTuning
    from mucudnn.words.config import Config

_LAST_WORDS_S = 5.0


@dataclass(frozen=True, slots=True)
class TuneTable:
    """A layer table to tune, on every rank alike.

    sizes: as for ``load_source``. threads: None: as many as torch takes.
    """

    source: str
    sizes: Mapping[str, Any]
    config: Config
    threads: int | None

    def tune(self, device: str) -> TableTuning:
        """Tune on a device; with other ranks, where this process is in a group of several."""
        from mucudnn.running.devices import device_named, made_current

        use_threads(self.threads)
        place = device_named(device)
        with made_current(place):
            tuning_environment(place.type, self.config)  # before a model is built for a device that is not there
            table, limits = load_limited(self.source, {**self.sizes}, self.config, place.type)
            return tune_with_progress(table, self.config, place.type, limits)


def tune_on_ranks(order: TuneTable, device: str, devices: Sequence[str]) -> TableTuning | None:
    """Tune on all ranks of torchrun, or on each of ``devices``, or here alone. None: another rank tells the result.

    device: of this process; ``cuda``: under torchrun the GPU of its local rank.
    """
    if is_of_torchrun():
        if devices:
            raise click.UsageError("torchrun starts a process for each device: give it or --devices, not both")
        return _tune_under_torchrun(order, device)
    if len(devices) < 2:
        return order.tune(devices[0] if devices else device)
    with _workers(_with_own_cores(order, devices), devices):
        return _with_own_cores(order, devices).tune(devices[0])


def is_of_torchrun() -> bool:
    """Whether this process is one of several that were started to work together."""
    return (ranks_of_torchrun() or 1) > 1


def _tune_under_torchrun(order: TuneTable, device: str) -> TableTuning | None:
    import torch

    if device == "cuda" and torch.cuda.device_count() > 1:
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"
    rank = int(os.environ["RANK"])
    with _joined("env://", rank, int(os.environ["WORLD_SIZE"])):
        if rank:
            warnings.simplefilter("ignore")  # rank 0 tells
        tuning = order.tune(device)
    return None if rank else tuning


def _with_own_cores(order: TuneTable, devices: Sequence[str]) -> TuneTable:
    """Let workers on the CPU share its cores."""
    on_cpu = devices.count("cpu")
    if order.threads is not None or on_cpu == 0:
        return order
    return replace(order, threads=cores_of_each(on_cpu))


@contextmanager
def _joined(meeting: str, rank: int, size: int) -> Iterator[None]:
    """Be a rank of a group. meeting: where the ranks find each other, as torch has it."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _workers(order: TuneTable, devices: Sequence[str]) -> Iterator[None]:
    """Join a process for each device but the first, which is this process's; they end with it."""
    spawn, size = multiprocessing.get_context("spawn"), len(devices)
    with TemporaryDirectory() as folder, ExitStack() as stack:
        meeting = (Path(folder) / "ranks").as_uri()
        for rank, device in list(enumerate(devices))[1:]:
            here, there = spawn.Pipe(duplex=False)
            worker = spawn.Process(target=_work, args=(order, device, meeting, rank, size, there), daemon=True)
            worker.start()
            stack.push(partial(_end, worker))
            there.close()
            wait([here, worker.sentinel])
            if not here.poll():  # it would be waited for in vain
                raise SharingError(f"the worker process for {device} ended before it began; see above what it said")
        stack.enter_context(_joined(meeting, 0, size))
        yield


def _end(worker: BaseProcess, kind: type[BaseException] | None, *_: object) -> None:
    """Wait until a worker has ended; after an error here only for so long that it can say what it met."""
    worker.join(None if kind is None else _LAST_WORDS_S)
    worker.terminate()


def _work(order: TuneTable, device: str, meeting: str, rank: int, size: int, ready: Connection) -> None:
    """Tune as a rank, in a process of its own, without a word but of errors. Never returns.

    Threads that torch leaves behind sometimes abort a process that ends as usual, with a word on standard error.
    """
    warnings.simplefilter("ignore")
    status = 0
    try:
        import mucudnn.bench.sources.table_tuning  # noqa: F401  # all that is slow to load

        ready.send(True)
        with _joined(meeting, rank, size):
            order.tune(device)
    except KeyboardInterrupt:
        status = 130
    except MucudnnError as error:
        click.echo(f"rank {rank}, {device}: {in_options(error)}", err=True)
        status = 2
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    finally:
        sys.stderr.flush()
        os._exit(status)
