"""Ranks of which one, the victim, is killed while it measures or confirms, or never comes to tune.

As a script for torchrun, with a folder: rank 1 is killed while it measures, but not after a restart.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from support.clock.two_algorithms import BATCH, NO_LIMIT, Bench
from support.confirmed_net import X, confirmed, torchs, tuned_net
from support.ranks.confirming import machine, team
from support.ranks.group import error_of
from support.ranks.launching import end
from support.ranks.scenarios import PROBLEMS, Found, choices
from torch import nn

from mucudnn.core.errors import SharingError
from mucudnn.store.database import Database
from mucudnn.tuning.tuner import tune

LAST_STEP = 7  # of the victim that confirms: in the middle of the rounds
PATIENCE = timedelta(seconds=3)  # with a rank that does not come


def tune_and_die(rank: int, folder: Path, victim: int | None, group: dist.ProcessGroup | None = None) -> Found:
    """The victim kills itself when it has measured something."""

    def die(text: str, _: float) -> None:
        if rank == victim and text.endswith("quick 8"):
            os.kill(os.getpid(), signal.SIGKILL)

    bench = Bench()
    database = Database(folder / "all.sqlite")
    before = len(database.every_row(bench.machine.environment))
    of = {"database": database, "machine": bench.machine, "process_group": group}
    try:
        tuning = tune(PROBLEMS, BATCH, NO_LIMIT, progress=die, **of)
    except SharingError as error:
        return {"error": str(error), "steps": bench.steps}
    return {"choices": choices(tuning), "before": before, "steps": bench.steps}


def confirm_and_die(rank: int, folder: Path, victim: int) -> Found:
    """The victim kills itself within a step."""
    numbers, net = count(), tuned_net()

    def step(model: nn.Module) -> None:
        if next(numbers) == LAST_STEP and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        model(X).sum().backward()

    with machine(folder):
        return {"error": error_of(lambda: confirmed(net, step=step, team=team())), "torchs": len(torchs(net))}


def tune_or_stay_away(rank: int, folder: Path, victim: int) -> Found | None:
    """Tune within a group of two that has little patience; the victim only waits for the other to end."""
    group, ended = dist.new_group(timeout=PATIENCE), dist.FileStore(str(folder / "ended"), 2)
    if rank == victim:
        ended.wait(["ended"])
        return None
    try:
        return tune_and_die(rank, folder, victim, group)
    finally:
        ended.set("ended", "")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder, rank, is_first_start = Path(sys.argv[1]), dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    found = tune_and_die(rank, folder, 1 if is_first_start else None)
    if "error" in found:
        sys.exit(1)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    end()
