"""Measurement of the link between the ranks that torchrun started: interleaved all-reduces of several sizes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from statistics import median
from traceback import clear_frames
from typing import Any

import torch
import torch.distributed as dist

from mucudnn.measuring.timing.timer import Clock
from mucudnn.words.errors import UnavailableError

SIZES = tuple(4**exponent for exponent in range(5, 13))  # 1 KiB to 16 MiB
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}  # by type of device
_TIMEOUT_S = 86400.0  # the other ranks wait while the first one tunes


def launched_rank() -> int:
    """Return the rank of this process from torchrun's environment variables.

    Raises ``UnavailableError`` if torchrun did not start this process.
    """
    rank = os.environ.get("RANK", "")
    if not (rank.isdecimal() and dist.is_available()):
        raise UnavailableError(
            "this process is not a rank of torchrun; start it with torchrun --nproc-per-node N -m mucudnn ..., or "
            "give the latency and the bandwidth"
        )
    return int(rank)


@contextmanager
def freeing_what_failed() -> Iterator[None]:
    """Clear the frames of an error raised in the block, which would keep the model alive.

    A model that outlives its process group may deadlock torch.
    """
    try:
        yield
    except BaseException as error:
        clear_frames(error.__traceback__)
        raise


@contextmanager
def joined(device: str, meeting: str = "env://", timeout_s: float = _TIMEOUT_S) -> Iterator[None]:
    """Join the process group of all ranks started by torchrun, and leave it at the end of the block.

    An existing group is used as it is. A process that torchrun did not start joins a new group of one rank.

    device: ``cpu`` or ``cuda``; on ``cuda`` every rank uses the GPU with its local rank. meeting: torch's
    ``init_method``, the rendezvous of the ranks; ``RANK`` and ``WORLD_SIZE`` come from the environment. timeout_s:
    longest wait for another rank, in seconds.

    Raises the errors of ``torch.distributed.init_process_group``.
    """
    if dist.is_initialized():
        yield
        return
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(_BACKENDS[kind], init_method=meeting, rank=rank, world_size=size, timeout=timeout)
    else:
        dist.init_process_group(_BACKENDS[kind], store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        with freeing_what_failed():
            yield
    finally:
        dist.destroy_process_group()


def all_reduce_times_s(
    clock: Clock, device: str = "cpu", *, sizes: Sequence[int] = SIZES, rounds: int = 11
) -> Mapping[int, float]:
    """Measure all-reduces; return seconds by size in bytes: the maximum over ranks of the median over rounds.

    All ranks of the default group must call this function. sizes: multiples of four bytes, as the data is float32.
    """
    tensors = {size: torch.zeros(size // 4, device=device) for size in sizes}
    samples: dict[int, list[float]] = {size: [] for size in sizes}
    for number in range(rounds + 1):  # the first round is a warm-up, which connects the ranks
        for size, tensor in tensors.items():
            dist.barrier()
            elapsed_s = clock.time(_all_reduce_of(tensor), 1)
            if number:
                samples[size].append(elapsed_s)
    slowest = torch.tensor([median(taken) for taken in samples.values()], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return dict(zip(sizes, slowest.tolist(), strict=True))


def _all_reduce_of(tensor: torch.Tensor) -> Callable[[], object]:
    return lambda: dist.all_reduce(tensor)


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks of the default process group, in rank order; all ranks must call this."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every
