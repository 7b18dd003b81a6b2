"""Runs a job on every rank of a process group: on those that torchrun has started, or in a process for each.

The command itself is no rank then: it watches over them. So a rank that fails or is killed is named at once, whatever
the others wait for, and all of them end with it and with Ctrl-C.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import inf
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar, cast

import click

from mucudnn.bench.contests.child_process import end_with_parent, how_it_ended
from mucudnn.cli.shared.commands import show_warning
from mucudnn.cli.shared.launch import ranks_of_torchrun
from mucudnn.words.errors import MucudnnError, SharingError, first_line

T = TypeVar("T")

_OTHERS_S = 2.0  # how long others may take to end after the first that failed: one of them may be the reason
_END_S = 5.0


def on_every_rank(job: Callable[[], T], ranks: int, device: str) -> T | None:
    """Run a job on every rank, inside of their process group. Returns what rank 0 returns; ``None`` on others.

    job: as it can be pickled. ranks: how many to start; torchrun's own are as many as they are. device: ``cpu`` or
    ``cuda``, where each rank of a machine has the GPU of its number.

    Raises ``SharingError`` that names the rank that failed first, if it was started here.
    """
    if ranks_of_torchrun() is None:
        return _in_workers(job, ranks, device)
    from mucudnn.distributed.link import joined

    with joined(device):
        result = job()
    return result if os.environ["RANK"] == "0" else None


@dataclass(frozen=True, slots=True)
class _Done:
    """Result of rank 0; ``None`` of the others, which have the same."""

    result: object


@dataclass(frozen=True, slots=True)
class _Failed:
    """Failure of a rank. moment_s: by the clock that all processes have. trace: empty for errors in our words."""

    moment_s: float
    reason: str
    trace: str = ""


def _in_workers(job: Callable[[], T], ranks: int, device: str) -> T:
    with TemporaryDirectory() as folder, ExitStack() as stack:
        meeting = (Path(folder) / "ranks").as_uri()
        outcomes = _outcomes([stack.enter_context(_worker(job, rank, ranks, device, meeting)) for rank in range(ranks)])
    failed = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, _Failed)}
    if failed:
        raise _blame(failed, ranks)
    return cast(T, cast(_Done, outcomes[0]).result)


@contextmanager
def _worker(
    job: Callable[[], object], rank: int, ranks: int, device: str, meeting: str
) -> Iterator[tuple[Connection, BaseProcess]]:
    """Start a rank, which ends at the end. Yields where it tells its outcome."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_work, args=(job, rank, ranks, device, meeting, there), daemon=True)
    process.start()
    there.close()
    try:
        yield here, process
    finally:
        process.terminate()
        process.join(_END_S)
        process.kill()
        process.join()


def _outcomes(workers: Sequence[tuple[Connection, BaseProcess]]) -> dict[int, _Done | _Failed]:
    """Wait for all ranks, or after a failure for those that end soon."""
    outcomes: dict[int, _Done | _Failed] = {}
    left = {rank: told for rank, (told, _) in enumerate(workers)}
    left_s: float | None = None
    until_s = inf
    while left and (ready := wait([*left.values()], left_s)):
        for rank in [rank for rank, told in left.items() if told in ready]:
            outcomes[rank] = _outcome(left.pop(rank), workers[rank][1])
            if isinstance(outcomes[rank], _Failed):
                until_s = min(until_s, time.monotonic() + _OTHERS_S)
        left_s = None if until_s == inf else max(0.0, until_s - time.monotonic())
    return outcomes


def _outcome(told: Connection, process: BaseProcess) -> _Done | _Failed:
    try:
        return cast(_Done | _Failed, told.recv())
    except EOFError:
        return _Failed(0.0, how_it_ended(process))  # before all others: they have only lost it


def _blame(failed: Mapping[int, _Failed], ranks: int) -> MucudnnError:
    """Return the error of the rank that failed first, without naming it where all have met the same."""
    rank, first = min(failed.items(), key=lambda item: item[1].moment_s)
    if first.trace:
        click.echo(first.trace, err=True)
    reasons = {outcome.reason for outcome in failed.values()}
    if len(failed) == ranks and reasons == {first.reason}:
        return SharingError(first.reason)
    return SharingError(f"rank {rank}: {first.reason}; all others were ended with it")


def _work(job: Callable[[], object], rank: int, ranks: int, device: str, meeting: str, told: Connection) -> None:
    """Be a rank. Never returns: threads that torch leaves behind sometimes abort a process that ends as usual."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends its ranks
    end_with_parent()
    warnings.showwarning = show_warning
    if rank:
        warnings.simplefilter("ignore")  # rank 0 tells
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    here["TORCH_DIST_INIT_BARRIER"] = 1  # none is done, and gone, before all have joined
    os.environ.update({name: str(value) for name, value in here.items()})
    try:
        from mucudnn.distributed.link import joined

        with joined(device, meeting):
            told.send(_told(job, is_first=rank == 0))  # and only then leave the group, which others would notice
        status = 0
    except Exception:
        traceback.print_exc()
        status = 1
    os._exit(status)


def _told(job: Callable[[], object], is_first: bool) -> _Done | _Failed:
    try:
        result = job()
    except MucudnnError as error:
        return _Failed(time.monotonic(), str(error))
    except Exception as error:
        return _Failed(time.monotonic(), f"{type(error).__name__}: {first_line(error)}", traceback.format_exc())
    return _Done(result if is_first else None)
