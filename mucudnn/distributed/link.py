"""The process group of the ranks that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from traceback import clear_frames
from typing import Any

import torch
import torch.distributed as dist

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}  # by type of device
_TIMEOUT_S = 86400.0  # the other ranks wait while the first one tunes


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


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks of the default process group, in rank order; all ranks must call this."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every
