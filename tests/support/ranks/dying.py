"""Ranks of which one is killed while it measures or confirms, or never comes to tune: a script.

Arguments: a folder; then cases, each the number of ranks and the one that is killed, as 3,1 or 3,1,confirming, or that
does not come, as 2,1,absent: they are forked off here. Under torchrun it is the rank that is killed, but not after a
restart.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from support.clock.two_algorithms import BATCH, NO_LIMIT, Bench
from support.confirmed_net import X, confirmed, torchs, tuned_net
from support.ranks.confirming import machine, team
from support.ranks.forked import fork_ranks
from support.ranks.launching import end
from support.ranks.scenarios import PROBLEMS, choices, error_of
from torch import nn

from mucudnn.database.database import Database
from mucudnn.tuning.tuner import tune
from mucudnn.words.errors import SharingError

ABSENT, CONFIRMING = "absent", "confirming"
LAST_STEP = 7  # of the victim that confirms: in the middle of the rounds
PATIENCE = timedelta(seconds=3)  # with a rank that does not come


def tune_and_die(rank: int, folder: Path, victim: int, group: dist.ProcessGroup | None = None) -> None:
    """Write what became of the rank; the victim kills itself when it has measured something."""

    def die(text: str, _: float) -> None:
        if rank == victim and text.endswith("quick 8"):
            os.kill(os.getpid(), signal.SIGKILL)

    bench, path = Bench(), folder / "all.sqlite"
    database = Database(path)
    before = len(database.rows_that_count(bench.machine.environment))
    of = {"database": database, "machine": bench.machine, "process_group": group}
    try:
        tuning = tune(PROBLEMS, BATCH, NO_LIMIT, progress=die, **of)
        found = {"choices": choices(tuning), "before": before, "steps": bench.steps}
    except SharingError as error:
        found = {"error": str(error), "steps": bench.steps}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    if "error" in found:
        raise SystemExit(1)


def confirm_and_die(rank: int, folder: Path, victim: int) -> None:
    """Write what became of a model that is confirmed; the victim kills itself within a step."""
    numbers, net = count(), tuned_net()

    def step(model: nn.Module) -> None:
        if next(numbers) == LAST_STEP and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        model(X).sum().backward()

    with machine(folder):
        found = {"error": error_of(lambda: confirmed(net, step=step, team=team())), "torchs": len(torchs(net))}
    (folder / f"{rank}.json").write_text(json.dumps(found))


def tune_or_stay_away(rank: int, folder: Path, victim: int, size: int) -> None:
    """Tune within a group that has little patience; the victim only waits for the others to end."""
    group, ended = dist.new_group(timeout=PATIENCE), dist.FileStore(str(folder / "ended"), size)
    if rank == victim:
        ended.wait([str(other) for other in range(size) if other != victim])
        return
    try:
        tune_and_die(rank, folder, victim, group)
    finally:
        ended.set(str(rank), "")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        is_first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        tune_and_die(dist.get_rank(), Path(sys.argv[1]), int(sys.argv[2]) if is_first_start else -1)
        dist.destroy_process_group()
        end()
    else:
        for case in sys.argv[2:]:
            ranks, victim, *fate = case.split(",")
            place = Path(sys.argv[1]) / case
            place.mkdir()
            works = {ABSENT: partial(tune_or_stay_away, size=int(ranks)), CONFIRMING: confirm_and_die}
            work = works[fate[0]] if fate else tune_and_die
            fork_ranks(place, int(ranks), partial(work, folder=place, victim=int(victim)))
