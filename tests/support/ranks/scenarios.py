"""What every rank of a group of three does in tests of shared tuning."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from support.clock.machine import FORWARD
from support.clock.two_algorithms import BATCH, NO_LIMIT, Bench
from support.ranks.group import error_of

import mucudnn
from mucudnn.core.config import Config
from mucudnn.core.errors import MucudnnError
from mucudnn.store.database import Database
from mucudnn.tuning import tuner
from mucudnn.tuning.job import Job
from mucudnn.tuning.result import Tuning
from mucudnn.tuning.tuner import tune

RANKS = 3
PROBLEMS = [replace(FORWARD, k=k) for k in (1, 2, 3, 4, 5)]
Found = Mapping[str, Any]


def tuned(bench: Bench, path: Path | None, config: Config = NO_LIMIT, **given: Any) -> Found:
    """Tune on a machine with known costs: what was chosen, what was measured here, and what the file has then."""
    database = given.pop("database", None) or (bench.database if path is None else Database(path))
    told: list[str] = []
    given = {"problems": PROBLEMS, "machine": bench.machine, "progress": lambda text, _: told.append(text)} | given
    try:
        tuning = tune(batch_size=given.pop("batch_size", BATCH), config=config, database=database, **given)
    except MucudnnError as error:
        return {"error": str(error), "steps": bench.steps}
    finally:
        rows = [] if path is None else database.every_row(bench.machine.environment)
    configurations = [f"{one.problem} {one.configuration}" for one in tuning.problems]
    return {"choices": choices(tuning), "configurations": configurations, "steps": bench.steps, "rows": len(rows)}


def choices(tuning: Tuning) -> Sequence[str]:
    return [f"{one.problem} {one.configuration} {one.time_s!r} {one.reason}" for one in tuning.problems]


def of(bench: Bench) -> dict[str, Any]:
    return {"machine": bench.machine, "database": bench.database}


def reuse(rank: int, folder: Path) -> Found:
    return tuned(Bench(), folder / "all.sqlite")


def reuse_again(rank: int, folder: Path) -> Found:
    return tuned(Bench(), folder.parent / "reuse" / "all.sqlite")


def alone(rank: int, folder: Path) -> Found:
    return tuned(Bench(), folder / f"{rank}.sqlite", replace(NO_LIMIT, share_tuning=False))


def warm_on_one_rank(rank: int, folder: Path) -> Found:
    path = folder / f"{rank}.sqlite"
    if rank == 1:
        tuned(Bench(), path, replace(NO_LIMIT, share_tuning=False))
    return tuned(Bench(), path)


def budget(rank: int, folder: Path) -> Found:
    return tuned(Bench(), folder / "all.sqlite", Config(workspace_budget=300))


def thorough(rank: int, folder: Path) -> Found:
    return tuned(Bench(), folder / "all.sqlite", replace(NO_LIMIT, thorough=True))


def read_only(rank: int, folder: Path) -> Found:
    path = folder / f"{rank}.sqlite"
    Database(path).close()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = tuned(Bench(), path, database=Database(path, read_only=rank == 1))
    return {**found, "told": [str(one.message) for one in told]}


def other_threads(rank: int, folder: Path) -> Found:
    return with_another(rank, threads=2)


def other_config(rank: int, folder: Path) -> Found:
    return tuned(Bench(), None, replace(NO_LIMIT, max_relative_error=1e-5 if rank == 1 else None))


def other_problem(rank: int, folder: Path) -> Found:
    return tuned(Bench(), None, problems=[*PROBLEMS, replace(FORWARD, k=6 + (rank == 1))])


def with_another(rank: int, **environment: Any) -> Found:
    bench = Bench()
    changed = replace(bench.machine.environment, **environment) if rank == 1 else bench.machine.environment
    return tuned(bench, None, machine=replace(bench.machine, environment=changed))


def other_kind(rank: int, folder: Path) -> Found:
    """The last rank has another processor, of another pace, with another instruction set and library."""
    bench = Bench()
    machine = bench.machine
    if rank == RANKS - 1:
        bench.native.step_s = lambda n: 0.001 * n
        machine = replace(
            machine, environment=replace(machine.environment, device="another", compiled="plain", library="its own")
        )
    return tuned(bench, folder / "all.sqlite", machine=machine)


def failing(rank: int, folder: Path) -> Found:
    """Rank 1 cannot finish what was dealt to it."""

    def fail(text: str, _: float) -> None:
        if rank == 1 and text.endswith("quick 8"):
            raise ValueError("out of patience\nand a stack trace")

    bench, path = Bench(), folder / "all.sqlite"
    error = error_of(
        lambda: tune(PROBLEMS, BATCH, NO_LIMIT, database=Database(path), machine=bench.machine, progress=fail)
    )
    dist.barrier()
    with closing(Database(path)) as database:
        return {"error": error, "rows": len(database.every_row(bench.machine.environment))}


def infeasible(rank: int, folder: Path) -> Found:
    bench = Bench()
    bench.native.scratch_bytes_per_sample = 1000
    return {"error": error_of(lambda: tune(PROBLEMS, BATCH, Config(workspace_limit=10), **of(bench)))}


def disagreeing(rank: int, folder: Path) -> Found:
    """Rank 1 chooses something else for one problem."""
    choose = tuner.choose

    def contrary(job: Job, context: Any) -> Any:
        only_native = {of: result for of, result in job.results.items() if of.algorithm == "native"}
        return choose(replace(job, results=only_native) if job.task.problem.k == 3 else job, context)

    with patch.object(tuner, "choose", contrary if rank == 1 else choose):
        return tuned(Bench(), None)


def some_ranks(rank: int, folder: Path) -> Found:
    """The first and the last rank tune in a group of theirs, and a third one has a backend that is not only gloo."""
    ranks, every = [0, RANKS - 1], list(range(RANKS))
    some, not_only_gloo = dist.new_group(ranks), dist.new_group(every, backend="cpu:gloo,cuda:gloo")
    some_not_only_gloo = dist.new_group(ranks, backend="cpu:gloo,cuda:gloo")
    of_all = tuned(Bench(), None, process_group=not_only_gloo)
    of_some = tuned(Bench(), None, process_group=some) if rank in ranks else {}
    wrong = some_not_only_gloo if rank in ranks else some
    error = error_of(lambda: tune(PROBLEMS, BATCH, process_group=wrong))
    return {"of_all": of_all, "of_some": of_some, "error": error}


def model(rank: int, folder: Path) -> Found:
    """A real model on the real machine, as in a script: what it computes is torch's own, whoever measured what."""
    torch.manual_seed(0)
    own = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3)).double()
    x = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    expected = own(x)
    measured: set[str] = set()
    config = Config(database=folder / "all.sqlite", algorithms="gemm", workspace_limit="1MiB")
    mucudnn.optimize(own, x, config, progress=lambda text, _: measured.add(text) if "measuring" in text else None)
    chosen = [one for module in own.modules() for one in getattr(module, "tuned", ())]
    shown = [f"{one.problem} {one.configuration} {one.time_s!r}" for one in chosen]
    return {"choices": shown, "measured": len(measured), "error": (own(x) - expected).abs().max().item()}
