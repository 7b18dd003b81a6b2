"""Jobs of ranks that end before their time, each in a process of its own; little is loaded for them."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Failing:
    """Rank 1 ends in some way while rank 0 waits for it."""

    how: str

    def __call__(self) -> None:
        if dist.get_rank() == 1:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("out of patience\nand a stack trace")
        dist.barrier()


@dataclass(frozen=True)
class Waiting:
    """Tell the number of each process, and wait for what never comes."""

    def __call__(self) -> None:
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, os.getpid())
        if dist.get_rank() == 0:
            sys.stdout.write(f"{json.dumps(told)}\n")
            sys.stdout.flush()
        signal.pause()
