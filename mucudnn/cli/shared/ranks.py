"""Jobs on every rank (process) of a process group: on ranks started by torchrun, or in worker processes.

With worker processes, the command itself is not a rank but monitors the workers: if a rank fails or is killed, it
reports that at once, even if other ranks wait for the failed one, and ends all ranks, as it does after Ctrl-C.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from math import inf
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, cast

import click

from mucudnn.bench.suites.shared.processes import Worker, WorkerError
from mucudnn.cli.shared.commands import show_warning
from mucudnn.core.errors import SharingError

T = TypeVar("T")

_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # variables that torchrun sets
_OTHERS_S = 2.0  # grace period for other ranks after a failure: one of them may be the cause


def of_torchrun(variable: str) -> int | None:
    """Return a number that torchrun gave to this process, a rank: its ``RANK``, the ``WORLD_SIZE``, or another one.

    Returns None if torchrun did not start this process.
    """
    is_rank = all(name in os.environ for name in _OF_TORCHRUN)
    return int(os.environ[variable]) if is_rank and variable in os.environ else None


def on_every_rank(job: Callable[[], T], ranks: int, device: str, *, timeout_s: float = 86400.0) -> T | None:
    """Run a job on every rank of a process group. Return the result of rank 0; None on other ranks.

    job: a picklable function.
    ranks: number of ranks to start, ignored under torchrun.
    device: ``cpu`` or ``cuda``, where each rank of a machine uses the GPU of its number.
    timeout_s: timeout of a rank that waits for another one.

    Raises ``SharingError``, naming the rank that failed first, if ranks were started here.
    """
    rank = of_torchrun("RANK")
    if rank is None:
        return _in_workers(job, ranks, device, timeout_s)
    from mucudnn.distributed.ranks import joined

    is_first = rank == 0
    with joined(device, timeout_s=timeout_s):
        if not is_first:
            warnings.simplefilter("ignore")  # rank 0 shows warnings
        result = job()
    return result if is_first else None


def _in_workers(job: Callable[[], T], ranks: int, device: str, timeout_s: float) -> T:
    """Run a job in a worker process for each rank. After a failure the others have ``_OTHERS_S`` seconds to end."""
    results: dict[int, Any] = {}
    failed: dict[int, WorkerError] = {}
    with TemporaryDirectory() as folder, ExitStack() as stack:
        how = (ranks, device, (Path(folder) / "ranks").as_uri(), timeout_s)
        workers = [stack.enter_context(Worker(_join, rank, *how)) for rank in range(ranks)]
        for rank, worker in enumerate(workers):
            worker.request(partial(_done, job, rank))
        left, left_s, until_s = {worker.connection: rank for rank, worker in enumerate(workers)}, None, inf
        while left and (ready := wait([*left], left_s)):
            for connection in ready:
                rank = left.pop(cast(Connection, connection))
                try:
                    results[rank] = workers[rank].answer()
                except WorkerError as error:  # Its moment is before those of ranks that fail because of this one.
                    failed[rank] = error
                    until_s = min(until_s, time.monotonic() + _OTHERS_S)
            left_s = None if until_s == inf else max(0.0, until_s - time.monotonic())
    if not failed:
        return cast(T, results[0])
    rank, first = min(failed.items(), key=lambda item: item[1].moment_s)
    if first.trace:
        click.echo(first.trace, err=True)
    if len(failed) == ranks and {str(error) for error in failed.values()} == {str(first)}:
        raise SharingError(str(first))
    raise SharingError(f"rank {rank}: {first}; all others were ended with it")


def _join(rank: int, ranks: int, device: str, meeting: str, timeout_s: float) -> ExitStack:
    """Join the process group of all ranks for as long as this process runs: a rank that leaves makes others fail."""
    warnings.showwarning = show_warning
    if rank:
        warnings.simplefilter("ignore")  # rank 0 shows warnings
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    here["TORCH_DIST_INIT_BARRIER"] = 1  # no rank may finish and leave before all have joined
    os.environ.update({name: str(value) for name, value in here.items()})
    from mucudnn.distributed.ranks import joined

    membership = ExitStack()
    membership.enter_context(joined(device, meeting, timeout_s))
    return membership


def _done(job: Callable[[], T], rank: int, _: ExitStack) -> T | None:
    result = job()
    return result if rank == 0 else None
