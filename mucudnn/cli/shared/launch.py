"""Tells what torchrun has told this process, and how many cores each of several processes has."""

from __future__ import annotations

import os

_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun tells each process


def ranks_of_torchrun() -> int | None:
    """Return how many ranks torchrun has started; ``None``: this process is none of them."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in _OF_TORCHRUN) else None


def rank_of_torchrun() -> int | None:
    """Return the rank that torchrun has given this process; ``None``: it has started none."""
    return None if ranks_of_torchrun() is None else int(os.environ["RANK"])


def ranks_here(ranks: int) -> int:
    """Return how many of so many ranks are on this machine."""
    return ranks if ranks_of_torchrun() is None else int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def cores_of_each(processes: int) -> int:
    """Return how many cores each of so many processes has to itself, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // processes)
