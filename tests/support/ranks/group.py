"""Ranks of a process group that run one function after the other, forked off a process that has loaded torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, cast

import torch
import torch.distributed as dist
from support.processes import forking

from mucudnn.bench.suites.shared.processes import Worker, WorkerError

LIMIT_S = 300.0  # far more than any function takes
_GRACE_S = 20.0  # for the others, once a rank has failed


class _Forked(Worker):
    _context = forking()


class Ranks:
    """The ranks of a group, on the CPU over gloo or each on its GPU over NCCL; started when first needed."""

    def __init__(self, size: int, device: str = "cpu") -> None:
        self.size, self.device = size, device
        self._running = ExitStack()
        self._workers: list[Worker] = []

    def run(self, work: Callable[..., Any], *given: object, killed: Collection[int] = ()) -> list[Any]:
        """Call ``work(rank, *given)`` on every rank; return the results by rank. work: a function of a module.

        killed: ranks that must end during the call, without a result (``None``). After a failure or a death the group
        is started anew when it is next needed. Raises ``AssertionError`` with the traceback of each rank that failed,
        and the name of each that ended or did not return in time.
        """
        if not self._workers:
            folder = self._running.enter_context(TemporaryDirectory())
            for rank in range(self.size):
                worker = _Forked(_join, rank, self.size, self.device, folder)
                self._workers.append(self._running.enter_context(worker))
        for rank, worker in enumerate(self._workers):
            worker.request(partial(_call, work, rank, given))
        left = {worker.connection: rank for rank, worker in enumerate(self._workers)}
        results: dict[int, Any] = {}
        failed: dict[int, str] = {}
        deadline = time.monotonic() + LIMIT_S
        while left:
            ready = wait([*left], max(0.0, deadline - time.monotonic()))
            if not ready:
                failed |= dict.fromkeys(left.values(), "did not return in time and was killed")
                break
            for connection in ready:
                rank = left.pop(cast(Connection, connection))
                try:
                    results[rank] = self._workers[rank].answer()
                except WorkerError as error:
                    failed[rank] = error.trace or str(error)
                    if rank not in killed:
                        deadline = min(deadline, time.monotonic() + _GRACE_S)
        if failed:
            self.close()
        messages = (f"rank {rank}: {failure}" for rank, failure in sorted(failed.items()))
        assert failed.keys() <= {*killed}, "\n".join(messages)
        return [results.get(rank) for rank in range(self.size)]

    def close(self) -> None:
        self._workers = []
        self._running.close()


def _join(rank: int, size: int, device: str, folder: str) -> None:
    os.environ |= {"MUCUDNN_DATABASE": f"{folder}/measurements.sqlite", "MUCUDNN_WATCH": "0"}
    torch.set_num_threads(1)
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    if gpus:
        torch.cuda.set_device(rank % gpus)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("nccl" if gpus >= size else "gloo", init_method=meeting, rank=rank, world_size=size)


def _call(work: Callable[..., Any], rank: int, given: tuple[object, ...], _: None) -> Any:
    return work(rank, *given)


def run_once(ranks: Ranks, parent: Path) -> Callable[..., list[Any]]:
    """Return a function that runs ``scenario(rank, folder, *given)`` once for all tests, in a folder of its own."""

    @cache
    def run(scenario: Callable[..., Any], *given: object) -> list[Any]:
        return ranks.run(scenario, Path(mkdtemp(dir=parent)), *given)

    return run


def error_of(call: Callable[[], object]) -> str:
    """Return the error of a call in words that can be sent and compared, ``none`` without one."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


_GROUPS_OF_ONE: list[object] = []


@contextmanager
def group_of_one() -> Iterator[None]:
    """Be the only rank of a group.

    Free models that synchronize over the group before its end: torch deadlocks, now and then, on those that outlive it.
    The group itself is kept, since its threads may hold the last work: one that freed the group would join itself,
    which ends the process.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    _GROUPS_OF_ONE.append(dist.group.WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()
