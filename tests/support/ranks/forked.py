"""Ranks that are forked off a process which has loaded torch, so that many of them begin at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist


def fork_ranks(folder: Path, size: int, work: Callable[[int], None]) -> None:
    """Run ``work`` of each rank, and wait for all of them; one that exits with a status ends with it."""
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            meeting = f"file://{folder}/ranks"
            dist.init_process_group(
                "gloo", init_method=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=60)
            )
            try:
                work(rank)
            except SystemExit:
                os._exit(1)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
