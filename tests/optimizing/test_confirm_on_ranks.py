"""Steps that ranks run together: real processes over gloo, on a machine where one rank's convolutions are slow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.ranks import confirming
from support.ranks.dying import confirm_and_die
from support.ranks.group import Ranks, run_once

from mucudnn.distributed.fingerprint import Fingerprint
from mucudnn.distributed.team import Team
from mucudnn.optimizing.in_place import Place, Spent
from mucudnn.optimizing.steps import StepTimes
from mucudnn.words.problem import Operation

pytestmark = pytest.mark.slow

OF_FIRST = ["first backward_filter", "first forward"]
NOT_CONFIRMED = "the tuned choices could not be confirmed in the model's own step: "

Found = Sequence[dict[str, Any]]  # by rank
Run = Callable[..., Found]


@pytest.fixture(scope="module")
def run(ranks: Mapping[int, Ranks], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_once(ranks[confirming.RANKS], tmp_path_factory.mktemp("scenarios"))


def same(found: Found) -> dict[str, Any]:
    """What is the same on all ranks."""
    first, *others = found
    assert all(other == first for other in others), found
    return first


def test_what_is_slow_on_one_rank_is_put_back_on_all(run: Run) -> None:
    found = same(run(confirming.slow_on_one_rank))
    assert found["torchs"] == OF_FIRST
    assert "is_withdrawn=False" in found["found"]
    assert found["passes"] == 3 + 2 * 5 + 2 * 5, "warming up, and two phases that are clear"


def test_a_step_is_as_slow_as_its_slowest_rank(run: Run) -> None:
    found = same(run(confirming.slow_step_on_one_rank))
    assert len(found["torchs"]) == 5
    assert "is_withdrawn=True" in found["found"]


def test_ranks_of_other_kinds_judge_for_themselves_after_as_many_steps(run: Run) -> None:
    first, other = run(confirming.other_kind)
    assert (first["torchs"], other["torchs"]) == ([], OF_FIRST)
    assert first["passes"] == other["passes"]


def test_a_users_step_may_wait_for_other_ranks(run: Run) -> None:
    found = same(run(confirming.with_data_parallel))
    assert found["torchs"] == OF_FIRST
    assert found["is_restored"]
    assert not found["told"]


@pytest.mark.parametrize("number", [0, 20])
def test_where_one_ranks_step_fails_all_warn_and_keep_what_was_tuned(run: Run, number: int) -> None:
    """The later one fails after torch's own was put back."""
    other, failed = run(confirming.failing, number)
    assert other["told"] == [f"{NOT_CONFIRMED}rank 1: RuntimeError: no memory"]
    assert failed["told"] == [f"{NOT_CONFIRMED}RuntimeError: no memory"]
    assert other["found"] == failed["found"] == "None"
    assert other["torchs"] == failed["torchs"] == []
    assert (other["passes"], failed["passes"]) == (number + 1, number)


def test_a_step_of_one_rank_only_is_refused_on_all(run: Run) -> None:
    error = same(run(confirming.step_on_one_rank))["error"]
    assert error == "SharingError: step is given on rank 0, None on rank 1; give it on all ranks, or on none"


def test_another_verdict_is_an_error_that_names_layer_and_ranks(run: Run) -> None:
    found = same(run(confirming.other_verdict))
    assert found["error"].startswith("SharingError: the ranks chose differently: first, forward 3x8x8 -> 4, 3x3")
    assert "'native', micro_batch_size=2),) on rank 0" in found["error"]
    assert "'gemm', micro_batch_size=2),) on rank 1" in found["error"]
    assert not found["torchs"], "what was tuned runs on"


def test_unasked_they_confirm_and_keep_it_and_need_it_on_all_ranks(run: Run) -> None:
    found = same(run(confirming.kept))
    runs = [found[name] for name in ("first", "again", "third")]
    assert [(one["is_kept"], one["passes"] > 0) for one in runs] == [(False, True), (True, False), (False, True)]
    assert all(one["torchs"] == OF_FIRST for one in runs)
    assert found["rows"] == 1, "one rank writes for all"


def test_a_real_model_runs_alike_on_all_ranks(run: Run) -> None:
    found = same(run(confirming.optimized))
    assert len(found["layers"]) == 5
    assert found["error"] == "none"


def test_a_rank_that_is_killed_in_a_step_is_named_and_what_was_tuned_runs_on(tmp_path: Path) -> None:
    first, _, last = Ranks(3).run(confirm_and_die, tmp_path, 1, killed=[1])
    for one in (first, last):
        assert one["error"].startswith("SharingError: rank 1 ended")
        assert one["torchs"] == 0


class Said(Team):
    """What each rank says, as one of them hears it."""

    def __init__(self, said: Sequence[Any], rank: int) -> None:
        super().__init__(rank, len(said))
        self.said = said

    def gather(self, message: Any) -> list[Any]:
        return [*self.said]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_step_has_the_slowest_ranks_time_the_median_of_convolutions_and_the_largest_load(rank: int) -> None:
    place, rare = (Place(name, None, 8, (Operation.FORWARD,)) for name in ("a", "b"))
    loads = (0.1, None, 0.3, 0.2)
    convolutions = [{place: Spent(2, s)} for s in (0.01, 0.09, 0.02, 1.0)]
    convolutions[1][rare] = Spent(1, 0.5)
    said = [StepTimes(s, of, load) for s, of, load in zip((2.0, 3.0, 1.0, 9.0), convolutions, loads, strict=True)]
    team = Said([asdict(Fingerprint(kind, "here", {}, {})) for kind in ("x", "x", "x", "y")], rank)
    team.meet(Fingerprint("x", "here", {}, {}))
    team.said = said
    seen = StepTimes.of_ranks(said[rank], team)
    assert seen == StepTimes(3.0, {place: Spent(2, 0.02), rare: Spent(1, 0.5)}, 0.3)
