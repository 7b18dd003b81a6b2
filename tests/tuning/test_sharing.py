"""Tuning that ranks share: real processes over gloo, on machines whose costs are known, and one on the real machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.clock.machine import ENVIRONMENT
from support.ranks import dying, scenarios
from support.ranks.group import Ranks, run_once
from support.ranks.launching import torchrun
from support.ranks.scenarios import PROBLEMS, RANKS

from mucudnn.store.database import Database

ROWS = 2 * len(PROBLEMS)  # at least: each algorithm is measured, and run whole

Found = Sequence[dict[str, Any]]  # by rank
Run = Callable[..., Found]


@pytest.fixture(scope="module")
def run(ranks: Mapping[int, Ranks], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_once(ranks[RANKS], tmp_path_factory.mktemp("scenarios"))


def steps(found: Found) -> list[int]:
    return [one["steps"] for one in found]


def only(found: Found, name: str) -> Any:
    """What is the same on all ranks."""
    values = [one[name] for one in found]
    assert all(value == values[0] for value in values), values
    return values[0]


def one_alone(run: Run) -> Any:
    """Steps that one rank alone takes; several take a few more, as each has met fewer like problems."""
    return pytest.approx(only(run(scenarios.alone), "steps"), rel=0.1)


@pytest.mark.parametrize("scenario", [scenarios.reuse, scenarios.budget, scenarios.thorough])
def test_all_ranks_choose_the_same_of_parts_that_each_measures(run: Run, scenario: Callable[..., Any]) -> None:
    found = run(scenario)
    assert len(only(found, "choices")) == len(PROBLEMS)
    assert all(steps(found)), "a rank had nothing to do"
    assert only(found, "rows") >= ROWS


def test_one_two_and_three_ranks_choose_the_same(run: Run) -> None:
    """Each time with an empty database."""
    of_two = [one["of_some"] for one in run(scenarios.some_ranks) if one["of_some"]]
    chosen = [only(found, "configurations") for found in (run(scenarios.alone), of_two, run(scenarios.reuse))]
    assert chosen == [chosen[0]] * 3
    assert len(chosen[0]) == len(PROBLEMS)


def test_together_they_measure_what_one_alone_would(run: Run) -> None:
    assert sum(steps(run(scenarios.reuse))) == one_alone(run)
    assert max(steps(run(scenarios.reuse))) < only(run(scenarios.alone), "steps") / 2


@pytest.mark.parametrize("scenario", [scenarios.reuse_again, scenarios.warm_on_one_rank])
def test_what_any_rank_knows_is_not_measured_again(run: Run, scenario: Callable[..., Any]) -> None:
    """A database of a rank's own has all rows afterwards."""
    expected, found = run(scenarios.reuse), run(scenario)
    assert steps(found) == [0] * RANKS
    assert len(only(found, "choices")) == len(PROBLEMS)
    assert only(found, "rows") == only(expected, "rows")


def test_a_rank_that_cannot_write_works_from_memory_and_says_so(run: Run) -> None:
    found = run(scenarios.read_only)
    only(found, "choices")
    assert [one["rows"] > 0 for one in found] == [True, False, True]
    (told,) = found[1]["told"]
    assert "kept in memory only" in told
    assert found[0]["told"] == found[2]["told"] == []


@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        (scenarios.other_threads, "threads is 2 on rank 1, 1 on ranks 0, 2"),
        (scenarios.other_config, "Config.max_relative_error is 1e-05 on rank 1, None on ranks 0, 2"),
        (scenarios.other_problem, "-> 7, 1x1, float32 contiguous, batch 8, limit None, 1 times' on rank 1 only"),
    ],
)
def test_what_differs_is_named_before_anything_is_measured(
    run: Run, scenario: Callable[..., Any], expected: str
) -> None:
    error = only(run(scenario), "error")
    assert expected in error
    assert "Config(share_tuning=False)" in error
    assert steps(run(scenario)) == [0] * RANKS


def test_ranks_of_another_kind_of_device_tune_for_themselves(run: Run) -> None:
    *alike, other = run(scenarios.other_kind)
    assert only(alike, "choices") != other["choices"]
    assert sum(steps(alike)) == one_alone(run)
    assert other["steps"] > max(steps(run(scenarios.reuse))) / 2, "the other processor measures all of it"


def test_a_rank_that_fails_tells_the_others(run: Run) -> None:
    """Nobody waits for it, and all that was measured is kept."""
    one, failed, other = (found["error"] for found in run(scenarios.failing))
    assert failed.startswith("ValueError: out of patience")
    assert one == other
    assert one.startswith("SharingError: tuning failed on another rank")
    assert "rank 1: ValueError: out of patience." in one
    assert only(run(scenarios.failing), "rows") > ROWS


def test_what_fits_nowhere_is_the_same_error_on_every_rank(run: Run) -> None:
    error = only(run(scenarios.infeasible), "error")
    assert error.startswith("InfeasibleError")
    assert error.count("at least 110B") == len(PROBLEMS)


def test_other_choices_on_a_rank_are_an_error_that_names_layer_and_ranks(run: Run) -> None:
    error = only(run(scenarios.disagreeing), "error")
    assert "forward 2x3x3 -> 3, 1x1" in error
    assert "3, 1x1" in error
    assert ": native 8, " in error
    assert " on rank 1, quick 8, " in error
    assert "-> 2, 1x1" not in error


def test_a_model_runs_alike_on_all_ranks(run: Run) -> None:
    found = run(scenarios.model)
    assert len(only(found, "choices")) == 5  # the gradient of the model's own input is not asked for
    assert sum(one["measured"] for one in found) == 5
    assert max(one["error"] for one in found) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(("size", "victim"), [(3, 1), (2, 0)])
def test_a_rank_that_is_killed_is_named_by_the_others(size: int, victim: int, tmp_path: Path) -> None:
    """All that was measured is kept, what the killed rank measured, too."""
    found = Ranks(size).run(dying.tune_and_die, tmp_path, victim, killed=[victim])
    survivors = [one for one in found if one is not None]
    assert len(survivors) == size - 1
    assert only(survivors, "error").startswith(f"rank {victim} ended")
    with Database(tmp_path / "all.sqlite") as database:
        (rows,) = database.info()
    of_survivors = len(PROBLEMS) * (size - 1) // size
    assert rows.environment == ENVIRONMENT
    assert rows.measurements > of_survivors * 2, "what the killed rank measured is lost"


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_after_the_timeout_of_the_group(tmp_path: Path) -> None:
    with closing(Ranks(2)) as ranks:
        found, _ = ranks.run(dying.tune_or_stay_away, tmp_path, 1)
    assert found["error"].startswith("rank 1 did not come within the timeout of the process group")
    assert found["steps"] == 0


@pytest.mark.slow
def test_a_restart_goes_on_with_what_was_measured(tmp_path: Path) -> None:
    done = torchrun("--max-restarts=1", dying.__file__, tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert len(only(found, "choices")) == len(PROBLEMS)
    assert only(found, "before") > 0
    with Database(tmp_path / "all.sqlite") as database:
        (rows,) = database.info()
        counting = [row for row in database.every_row(ENVIRONMENT) if row["kind"] == "measurement"]
    assert rows.measurements == len(counting), "something was measured twice"
