"""Ranks of a process group that run one function after the other, forked off a process that has loaded torch."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.processes import forking

LIMIT_S = 300.0  # far more than any function takes
_GRACE_S = 20.0  # for the others, once a rank has failed


class Ranks:
    """The ranks of a group, on the CPU over gloo or each on its GPU over NCCL; started when first needed."""

    def __init__(self, size: int, device: str = "cpu") -> None:
        self.size, self.device = size, device
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, work: Callable[..., Any], *given: object, killed: Collection[int] = ()) -> list[Any]:
        """Call ``work(rank, *given)`` on every rank; return the results by rank. work: a function of a module.

        killed: ranks that must end during the call, without a result (``None``). After a failure or a death the group
        is started anew when it is next needed. Raises ``AssertionError`` with the traceback of each rank that failed,
        and the name of each that ended or did not return in time.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((work, given))
        answers: dict[int, tuple[Any, str]] = {}
        deadline = time.monotonic() + LIMIT_S
        while len(answers) < self.size:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                late = [rank for rank in range(self.size) if rank not in answers]
                answers |= dict.fromkeys(late, (None, "did not return in time and was killed"))
            for pipe in ready:
                rank = self._pipes.index(pipe)
                answers[rank] = self._answer(rank)
                if answers[rank][1] and rank not in killed:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        failed = {rank: failure for rank, (_, failure) in sorted(answers.items()) if failure}
        if failed:
            self.close()
        assert failed.keys() <= {*killed}, "\n".join(f"rank {rank}: {failure}" for rank, failure in failed.items())
        return [answers[rank][0] for rank in range(self.size)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()

    def _start(self) -> None:
        context = forking()
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.size, self.device, self._folder.name, there), daemon=True
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def _answer(self, rank: int) -> tuple[Any, str]:
        """Return a rank's result and how it failed, ``""`` if it did not."""
        try:
            answer: tuple[Any, str] = self._pipes[rank].recv()
        except EOFError:
            self._processes[rank].join()
            return None, f"ended with {self._processes[rank].exitcode}"
        return answer


def _serve(rank: int, size: int, device: str, folder: str, pipe: Connection) -> None:
    os.environ |= {"MUCUDNN_DATABASE": f"{folder}/measurements.sqlite", "MUCUDNN_WATCH": "0"}
    torch.set_num_threads(1)
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    if gpus:
        torch.cuda.set_device(rank % gpus)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("nccl" if gpus >= size else "gloo", init_method=meeting, rank=rank, world_size=size)
    with suppress(EOFError):  # the tests have ended
        while True:
            work, given = pipe.recv()
            try:
                answer = work(rank, *given), ""
            except Exception:
                answer = None, traceback.format_exc()
            pipe.send(answer)


def run_once(ranks: Ranks, parent: Path) -> Callable[..., list[Any]]:
    """Return a function that runs ``scenario(rank, folder, *given)`` once for all tests, in a folder of its own."""

    @cache
    def run(scenario: Callable[..., Any], *given: object) -> list[Any]:
        folder = parent / "-".join(map(str, (scenario.__name__, *given)))
        folder.mkdir()
        return ranks.run(scenario, folder, *given)

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
