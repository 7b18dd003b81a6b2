"""Tuning that ranks share: real processes over gloo, on machines whose costs are known, and one on the real machine.

As a script for torchrun, with a folder, rank 1 is killed while it measures, but not after a restart.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.clock.machine import ENVIRONMENT, FORWARD
from support.clock.two_algorithms import BATCH, NO_LIMIT, Bench
from support.ranks.group import Ranks, error_of, run_once
from support.ranks.launching import end, torchrun

import mucudnn
from mucudnn.core.config import Config
from mucudnn.core.errors import MucudnnError
from mucudnn.measuring import whole_runs
from mucudnn.store.database import Database
from mucudnn.tuning import tuner
from mucudnn.tuning.job import Job
from mucudnn.tuning.tuner import tune

RANKS = 3
PROBLEMS = [replace(FORWARD, k=k) for k in (1, 2, 3, 4, 5)]
ROWS = 2 * len(PROBLEMS)  # at least: each algorithm is measured, and run whole
ALONE = replace(NO_LIMIT, share_tuning=False)
PATIENCE = timedelta(seconds=3)  # with a rank that does not come

Found = Sequence[dict[str, Any]]  # by rank
Run = Callable[..., Found]


@pytest.fixture(scope="module")
def run(ranks: Mapping[int, Ranks], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_once(ranks[RANKS], tmp_path_factory.mktemp("scenarios"))


def tuned(bench: Bench, path: Path, config: Config = NO_LIMIT, **given: Any) -> dict[str, Any]:
    """Tune on a machine with known costs: what was chosen, what was measured here, and what the file has then."""
    database = given.pop("database", None) or Database(path)
    given = {"problems": PROBLEMS, "machine": bench.machine, "progress": bench.progress} | given
    try:
        tuning = tune(batch_size=BATCH, config=config, database=database, **given)
    except (MucudnnError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}", "steps": bench.steps}
    rows = len(database.every_row(bench.machine.environment))
    configurations = [f"{one.problem} {one.configuration}" for one in tuning.problems]
    choices = [f"{one.problem} {one.configuration} {one.time_s!r} {one.reason}" for one in tuning.problems]
    return {"choices": choices, "configurations": configurations, "steps": bench.steps, "rows": rows}


def steps(found: Found) -> list[int]:
    return [one["steps"] for one in found]


def only(found: Found, name: str) -> Any:
    """What is the same on all ranks."""
    values = [one[name] for one in found]
    assert all(value == values[0] for value in values), values
    return values[0]


def together(rank: int, folder: Path, config: Config = NO_LIMIT) -> dict[str, Any]:
    return tuned(Bench(), folder / "all.sqlite", config)


def alone(rank: int, folder: Path) -> dict[str, Any]:
    return tuned(Bench(), folder / f"{rank}.sqlite", ALONE)


def one_alone(run: Run) -> Any:
    """Steps that one rank alone takes; several take a few more, as each has met fewer like problems."""
    return pytest.approx(only(run(alone), "steps"), rel=0.1)


@pytest.mark.parametrize("config", [NO_LIMIT, Config(workspace_budget=300), replace(NO_LIMIT, policy="all")])
def test_all_ranks_choose_the_same_of_parts_that_each_measures(run: Run, config: Config) -> None:
    found = run(together, config)
    assert len(only(found, "choices")) == len(PROBLEMS)
    assert all(steps(found)), "a rank had nothing to do"
    assert only(found, "rows") >= ROWS


def some_ranks(rank: int, folder: Path) -> dict[str, Any]:
    """The first and the last rank tune in a group of theirs, and a third one has a backend that is not only gloo."""
    ranks, every, path = [0, RANKS - 1], list(range(RANKS)), folder / f"{rank}.sqlite"
    some, not_only_gloo = dist.new_group(ranks), dist.new_group(every, backend="cpu:gloo,cuda:gloo")
    some_not_only_gloo = dist.new_group(ranks, backend="cpu:gloo,cuda:gloo")
    of_all = tuned(Bench(), path, process_group=not_only_gloo)
    of_some = tuned(Bench(), folder / f"{rank} of some.sqlite", process_group=some) if rank in ranks else {}
    wrong = some_not_only_gloo if rank in ranks else some
    error = error_of(lambda: tune(PROBLEMS, BATCH, process_group=wrong))
    return {"of_all": of_all, "of_some": of_some, "error": error}


def test_one_two_and_three_ranks_choose_the_same(run: Run) -> None:
    """Each time with an empty database."""
    of_two = [one["of_some"] for one in run(some_ranks) if one["of_some"]]
    chosen = [only(found, "configurations") for found in (run(alone), of_two, run(together, NO_LIMIT))]
    assert chosen == [chosen[0]] * 3
    assert len(chosen[0]) == len(PROBLEMS)


def test_together_they_measure_what_one_alone_would(run: Run) -> None:
    assert sum(steps(run(together, NO_LIMIT))) == one_alone(run)
    assert max(steps(run(together, NO_LIMIT))) < only(run(alone), "steps") / 2


def warm(rank: int, folder: Path, of_all: bool) -> dict[str, Any]:
    """Tune again with the database of all ranks, or with one of its own, which has everything on rank 1 only."""
    path = folder / ("all.sqlite" if of_all else f"{rank}.sqlite")
    if of_all:
        tuned(Bench(), path)
    elif rank == 1:
        tuned(Bench(), path, ALONE)
    return tuned(Bench(), path)


@pytest.mark.parametrize("of_all", [True, False])
def test_what_any_rank_knows_is_not_measured_again(run: Run, of_all: bool) -> None:
    """A database of a rank's own has all rows afterwards."""
    expected, found = run(together, NO_LIMIT), run(warm, of_all)
    assert steps(found) == [0] * RANKS
    assert len(only(found, "choices")) == len(PROBLEMS)
    assert only(found, "rows") == only(expected, "rows")


def read_only(rank: int, folder: Path) -> dict[str, Any]:
    path = folder / f"{rank}.sqlite"
    Database(path).close()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = tuned(Bench(), path, database=Database(path, read_only=rank == 1))
    return {**found, "told": [str(one.message) for one in told]}


def test_a_rank_that_cannot_write_works_from_memory_and_says_so(run: Run) -> None:
    found = run(read_only)
    only(found, "choices")
    assert [one["rows"] > 0 for one in found] == [True, False, True]
    (told,) = found[1]["told"]
    assert "kept in memory only" in told
    assert found[0]["told"] == found[2]["told"] == []


def differing(rank: int, folder: Path, what: str) -> dict[str, Any]:
    """One thing is different on rank 1."""
    bench, other = Bench(), rank == 1
    changed = bench.machine.environment if not other else replace(bench.machine.environment, threads=2)
    given: dict[str, Any] = {
        "threads": {"machine": replace(bench.machine, environment=changed)},
        "config": {"config": replace(NO_LIMIT, max_relative_error=1e-5 if other else None)},
        "problem": {"problems": [*PROBLEMS, replace(FORWARD, k=6 + other)]},
    }[what]
    return tuned(bench, folder / f"{rank}.sqlite", **given)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("threads", "threads is 2 on rank 1, 1 on ranks 0, 2"),
        ("config", "Config.max_relative_error is 1e-05 on rank 1, auto on ranks 0, 2"),
        ("problem", "-> 7, 1x1, float32 contiguous, batch 8, limit None, 1 times' on rank 1 only"),
    ],
)
def test_what_differs_is_named_before_anything_is_measured(run: Run, what: str, expected: str) -> None:
    error = only(run(differing, what), "error")
    assert expected in error
    assert "Config(share_tuning=False)" in error
    assert steps(run(differing, what)) == [0] * RANKS


def other_kind(rank: int, folder: Path) -> dict[str, Any]:
    """The last rank has another processor, of another pace, with another instruction set and library."""
    bench = Bench()
    machine = bench.machine
    if rank == RANKS - 1:
        bench.native.step_s = lambda n: 0.001 * n
        other = replace(machine.environment, device="another", compiled="plain", library="its own")
        machine = replace(machine, environment=other)
    return tuned(bench, folder / "all.sqlite", machine=machine)


def test_ranks_of_another_kind_of_device_tune_for_themselves(run: Run) -> None:
    *alike, other = run(other_kind)
    assert only(alike, "choices") != other["choices"]
    assert sum(steps(alike)) == one_alone(run)
    assert other["steps"] > max(steps(run(together, NO_LIMIT))) / 2, "the other processor measures all of it"


def failing(rank: int, folder: Path) -> dict[str, Any]:
    """Rank 1 cannot finish what was dealt to it."""

    def fail(text: str, _: float) -> None:
        if rank == 1 and text.endswith("quick 8"):
            raise ValueError("out of patience\nand a stack trace")

    path = folder / "all.sqlite"
    error = tuned(Bench(), path, progress=fail)["error"]
    dist.barrier()
    with closing(Database(path)) as database:
        return {"error": error, "rows": len(database.every_row(ENVIRONMENT))}


def test_a_rank_that_fails_tells_the_others(run: Run) -> None:
    """Nobody waits for it, and all that was measured is kept."""
    one, failed, other = (found["error"] for found in run(failing))
    assert failed.startswith("ValueError: out of patience")
    assert one == other
    assert one.startswith("SharingError: tuning failed on another rank")
    assert "rank 1: ValueError: out of patience." in one
    assert only(run(failing), "rows") > ROWS


def infeasible(rank: int, folder: Path) -> dict[str, Any]:
    bench = Bench()
    bench.native.scratch_bytes_per_sample = 1000
    return tuned(bench, folder / f"{rank}.sqlite", Config(workspace_limit=10))


def test_what_fits_nowhere_is_the_same_error_on_every_rank(run: Run) -> None:
    error = only(run(infeasible), "error")
    assert error.startswith("InfeasibleError")
    assert error.count("at least 110B") == len(PROBLEMS)


def disagreeing(rank: int, folder: Path) -> dict[str, Any]:
    """Rank 1 chooses something else for one problem."""
    choose = tuner.choose

    def contrary(job: Job, context: Any) -> Any:
        only_native = {of: result for of, result in job.results.items() if of.algorithm == "native"}
        return choose(replace(job, results=only_native) if job.task.problem.k == 3 else job, context)

    with patch.object(tuner, "choose", contrary if rank == 1 else choose):
        return together(rank, folder)


def test_other_choices_on_a_rank_are_an_error_that_names_layer_and_ranks(run: Run) -> None:
    error = only(run(disagreeing), "error")
    for text in ("forward 2x3x3 -> 3, 1x1", "3, 1x1", ": native 8, ", " on rank 1, quick 8, "):
        assert text in error
    assert "-> 2, 1x1" not in error


def model(rank: int, folder: Path) -> dict[str, Any]:
    """A real model on the real machine, as in a script: what it computes is torch's own, whoever measured what."""
    torch.manual_seed(0)
    own = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3)).double()
    x = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    expected = own(x)
    measured: set[str] = set()
    config = Config(database=folder / "all.sqlite", algorithms="gemm", workspace_limit="1MiB")
    with patch.object(whole_runs, "prover", lambda: None):  # each rank would start one
        mucudnn.optimize(own, x, config, progress=lambda text, _: measured.add(text) if "measuring" in text else None)
    chosen = [one for module in own.modules() for one in getattr(module, "tuned", ())]
    shown = [f"{one.problem} {one.configuration} {one.time_s!r}" for one in chosen]
    return {"choices": shown, "measured": len(measured), "error": (own(x) - expected).abs().max().item()}


def test_a_model_runs_alike_on_all_ranks(run: Run) -> None:
    found = run(model)
    assert len(only(found, "choices")) == 5  # the gradient of the model's own input is not asked for
    assert sum(one["measured"] for one in found) == 5
    assert max(one["error"] for one in found) < 1e-12


def tune_and_die(rank: int, folder: Path, victim: int | None, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """The victim kills itself when it has measured something."""

    def die(text: str, _: float) -> None:
        if rank == victim and text.endswith("quick 8"):
            os.kill(os.getpid(), signal.SIGKILL)

    database = Database(folder / "all.sqlite")
    before = len(database.every_row(ENVIRONMENT))
    return {"before": before} | tuned(Bench(), folder, database=database, progress=die, process_group=group)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "victim"), [(3, 1), (2, 0)])
def test_a_rank_that_is_killed_is_named_by_the_others(size: int, victim: int, tmp_path: Path) -> None:
    """All that was measured is kept, what the killed rank measured, too."""
    found = Ranks(size).run(tune_and_die, tmp_path, victim, killed=[victim])
    survivors = [one for one in found if one is not None]
    assert len(survivors) == size - 1
    assert only(survivors, "error").startswith(f"SharingError: rank {victim} ended")
    with Database(tmp_path / "all.sqlite") as database:
        (rows,) = database.info()
    of_survivors = len(PROBLEMS) * (size - 1) // size
    assert rows.environment == ENVIRONMENT
    assert rows.measurements > of_survivors * 2, "what the killed rank measured is lost"


def tune_or_stay_away(rank: int, folder: Path, victim: int) -> dict[str, Any] | None:
    """Tune within a group of two that has little patience; the victim only waits for the other to end."""
    group, ended = dist.new_group(timeout=PATIENCE), dist.FileStore(str(folder / "ended"), 2)
    if rank == victim:
        ended.wait(["ended"])
        return None
    try:
        return tune_and_die(rank, folder, victim, group)
    finally:
        ended.set("ended", "")


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_after_the_timeout_of_the_group(tmp_path: Path) -> None:
    with closing(Ranks(2)) as ranks:
        found, _ = ranks.run(tune_or_stay_away, tmp_path, 1)
    assert found["error"].startswith("SharingError: rank 1 did not come within the timeout of the process group")
    assert found["steps"] == 0


@pytest.mark.slow
def test_a_restart_goes_on_with_what_was_measured(tmp_path: Path) -> None:
    done = torchrun("--max-restarts=1", __file__, tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert len(only(found, "choices")) == len(PROBLEMS)
    assert only(found, "before") > 0
    with Database(tmp_path / "all.sqlite") as database:
        (rows,) = database.info()
        counting = [row for row in database.every_row(ENVIRONMENT) if row["kind"] == "measurement"]
    assert rows.measurements == len(counting), "something was measured twice"


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
