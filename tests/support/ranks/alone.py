"""A process group of this process alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def group_of_one() -> Iterator[None]:
    """Be the only rank of a group.

    Free models that synchronize over the group before its end: torch deadlocks, now and then, on those that outlive it.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
