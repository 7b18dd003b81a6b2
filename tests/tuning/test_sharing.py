"""Tuning that ranks share: real processes over gloo, on machines whose costs are known, and one on the real machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.clock.machine import ENVIRONMENT
from support.clock.two_algorithms import BATCH
from support.ranks.launching import found_by_scenarios, run, script, torchrun
from support.ranks.scenarios import PROBLEMS

from mucudnn.database.database import Database
from mucudnn.tuning.tuner import tune
from mucudnn.words.errors import InvalidInputError

RANKS = 3
ROWS = 2 * len(PROBLEMS)  # at least: each algorithm is measured, and run whole

Found = Sequence[dict[str, Any]]  # by rank


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    return found_by_scenarios("scenarios", tmp_path_factory.mktemp("scenarios"), RANKS)


def steps(found: Found) -> list[int]:
    return [one["steps"] for one in found]


def only(found: Found, name: str) -> Any:
    """What is the same on all ranks."""
    values = [one[name] for one in found]
    assert all(value == values[0] for value in values), values
    return values[0]


def one_alone(scenarios: dict[str, Found]) -> Any:
    """Steps that one rank alone takes; several take a few more, as each has met fewer like problems."""
    return pytest.approx(only(scenarios["alone"], "steps"), rel=0.1)


@pytest.mark.parametrize("name", ["reuse", "budget", "thorough"])
def test_all_ranks_choose_the_same_of_parts_that_each_measures(scenarios: dict[str, Found], name: str) -> None:
    assert len(only(scenarios[name], "choices")) == len(PROBLEMS)
    assert all(steps(scenarios[name])), "a rank had nothing to do"
    assert only(scenarios[name], "rows") >= ROWS


def test_one_two_and_three_ranks_choose_the_same(scenarios: dict[str, Found]) -> None:
    """Each time with an empty database."""
    of_two = [one["of_some"] for one in scenarios["some_ranks"] if one["of_some"]]
    chosen = [only(found, "configurations") for found in (scenarios["alone"], of_two, scenarios["reuse"])]
    assert chosen == [chosen[0]] * 3
    assert len(chosen[0]) == len(PROBLEMS)


def test_together_they_measure_what_one_alone_would(scenarios: dict[str, Found]) -> None:
    assert sum(steps(scenarios["reuse"])) == one_alone(scenarios)
    assert max(steps(scenarios["reuse"])) < only(scenarios["alone"], "steps") / 2


@pytest.mark.parametrize("name", ["reuse_again", "warm_on_one_rank"])
def test_what_any_rank_knows_is_not_measured_again(scenarios: dict[str, Found], name: str) -> None:
    """A database of a rank's own has all rows afterwards."""
    assert steps(scenarios[name]) == [0] * RANKS
    assert len(only(scenarios[name], "choices")) == len(PROBLEMS)
    assert only(scenarios[name], "rows") == only(scenarios["reuse"], "rows")


def test_each_for_itself_if_the_config_says_so(scenarios: dict[str, Found]) -> None:
    assert only(scenarios["alone"], "steps") > 0


def test_a_rank_that_cannot_write_works_from_memory_and_says_so(scenarios: dict[str, Found]) -> None:
    found = scenarios["read_only"]
    only(found, "choices")
    assert [one["rows"] > 0 for one in found] == [True, False, True]
    (told,) = found[1]["told"]
    assert "kept in memory only" in told
    assert found[0]["told"] == found[2]["told"] == []


def test_a_file_in_a_network_folder_is_written_by_one_rank_when_all_have_measured(
    scenarios: dict[str, Found],
) -> None:
    found = scenarios["network_folder"]
    assert only(found, "configurations") == only(scenarios["reuse"], "configurations")
    assert only(found, "rows_while_measuring") == [0]
    assert only(found, "rows") == only(scenarios["reuse"], "rows")
    for one in found:
        (told,) = one["told"]
        assert "network folder (nfs4)" in told


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("other_threads", "threads is 2 on rank 1, 1 on ranks 0, 2"),
        ("other_config", "Config.max_relative_error is 1e-05 on rank 1, None on ranks 0, 2"),
        ("other_problem", "-> 7, 1x1, float32 contiguous, batch 8, limit None, 1 times' on rank 1 only"),
    ],
)
def test_what_differs_is_named_before_anything_is_measured(
    scenarios: dict[str, Found], name: str, expected: str
) -> None:
    error = only(scenarios[name], "error")
    assert expected in error
    assert "Config(share_tuning=False)" in error
    assert steps(scenarios[name]) == [0] * RANKS


def test_ranks_of_another_kind_of_device_tune_for_themselves(scenarios: dict[str, Found]) -> None:
    *alike, other = scenarios["other_kind"]
    assert only(alike, "choices") != other["choices"]
    assert sum(steps(alike)) == one_alone(scenarios)
    assert other["steps"] > max(steps(scenarios["reuse"])) / 2, "the other processor measures all of it"


def test_a_rank_that_fails_tells_the_others(scenarios: dict[str, Found]) -> None:
    """Nobody waits for it, and all that was measured is kept."""
    one, failed, other = (found["error"] for found in scenarios["failing"])
    assert failed.startswith("ValueError: out of patience")
    assert one == other
    assert one.startswith("SharingError: tuning failed on another rank")
    assert "rank 1: ValueError: out of patience." in one
    assert only(scenarios["failing"], "rows") > ROWS


def test_a_rank_that_fails_before_it_tunes_tells_the_others(scenarios: dict[str, Found]) -> None:
    one, failed, other = (found["error"] for found in scenarios["mixed_fates"])
    assert failed.startswith("RuntimeError: Given groups=1")
    assert "rank 1: RuntimeError: Given groups=1" in one == other


def test_what_fits_nowhere_is_the_same_error_on_every_rank(scenarios: dict[str, Found]) -> None:
    error = only(scenarios["infeasible"], "error")
    assert error.startswith("InfeasibleError")
    assert error.count("at least 110B") == len(PROBLEMS)


def test_other_choices_on_a_rank_are_an_error_that_names_layer_and_ranks(scenarios: dict[str, Found]) -> None:
    error = only(scenarios["disagreeing"], "error")
    assert "forward 2x3x3 -> 3, 1x1" in error
    assert "configuration is native 8 on rank 1, quick 8 on ranks 0, 2" in error
    assert "-> 2, 1x1" not in error


def test_another_group_than_the_default_one(scenarios: dict[str, Found]) -> None:
    found = scenarios["some_ranks"]
    assert len(only([one["of_all"] for one in found], "choices")) == len(PROBLEMS)
    first, middle, last = (one["of_some"] for one in found)
    assert middle == {}
    assert len(only([first, last], "choices")) == len(PROBLEMS)
    assert first["steps"] + last["steps"] == one_alone(scenarios)
    assert "this process is not a member of process_group" in found[1]["error"]
    assert "backend='gloo'" in found[0]["error"]


def test_a_model_runs_alike_on_all_ranks(scenarios: dict[str, Found]) -> None:
    found = scenarios["model"]
    assert len(only(found, "choices")) == 5  # the gradient of the model's own input is not asked for
    assert sum(one["measured"] for one in found) == 5
    assert max(one["error"] for one in found) < 1e-12


def test_one_rank_compares_filters_to_cache_and_all_keep_the_same(scenarios: dict[str, Found]) -> None:
    found = scenarios["cached_filters"]
    assert "winograd-2x2" in only(found, "kept")
    assert [one["compared"] > 0 for one in found] == [True, False, False]


def test_a_group_needs_an_initialised_one() -> None:
    with pytest.raises(InvalidInputError, match="process_group is 'ranks'; call"):
        tune(PROBLEMS, BATCH, process_group="ranks")  # type: ignore[arg-type]


KILLED = {"3,1": (0, 2), "2,0": (1,)}  # survivors, by the number of ranks and the killed one
ABSENT = "2,1,absent"


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each case of a rank that is lost."""
    folder = tmp_path_factory.mktemp("lost")
    done = run(script("dying"), folder, *KILLED, ABSENT)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("case", "survivors"), KILLED.items())
def test_a_rank_that_is_killed_is_named_by_the_others(lost: Path, case: str, survivors: Sequence[int]) -> None:
    """All that was measured is kept, what the killed rank measured, too."""
    size, victim = map(int, case.split(","))
    found = [json.loads((lost / case / f"{rank}.json").read_text()) for rank in survivors]
    assert only(found, "error").startswith(f"rank {victim} ended")
    assert not (lost / case / f"{victim}.json").exists()
    with Database(lost / case / "all.sqlite") as database:
        (rows,) = database.info()
    of_survivors = len(PROBLEMS) * (size - 1) // size
    assert rows.environment == ENVIRONMENT
    assert rows.measurements > of_survivors * 2, "what the killed rank measured is lost"


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_after_the_timeout_of_the_group(lost: Path) -> None:
    found = json.loads((lost / ABSENT / "0.json").read_text())
    assert found["error"].startswith("rank 1 did not come within the timeout of the process group")
    assert found["steps"] == 0


@pytest.mark.slow
def test_a_restart_goes_on_with_what_was_measured(tmp_path: Path) -> None:
    done = torchrun("--max-restarts=1", script("dying"), tmp_path, 1, ranks=2)
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert len(only(found, "choices")) == len(PROBLEMS)
    assert only(found, "before") > 0
    with Database(tmp_path / "all.sqlite") as database:
        (rows,) = database.info()
        counting = [row for row in database.rows_that_count(ENVIRONMENT) if row["kind"] == "measurement"]
    assert rows.measurements == len(counting), "something was measured twice"
