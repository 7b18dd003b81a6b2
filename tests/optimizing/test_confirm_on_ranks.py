"""Steps that ranks run together: real processes over gloo, on a machine where one rank's convolutions are slow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.ranks import confirming
from support.ranks.dying import confirm_and_die
from support.ranks.group import Ranks, run_once

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


@pytest.mark.parametrize(("slow", "put_back"), [(0, OF_FIRST), (1, [])])
def test_what_is_slow_on_rank_0_is_put_back_on_all(run: Run, slow: int, put_back: list[str]) -> None:
    found = same(run(confirming.slow_on_one_rank, slow))
    assert found["torchs"] == put_back
    assert "is_withdrawn=False" in found["found"]


@pytest.mark.parametrize(("slow", "put_back"), [(0, 5), (1, 0)])
def test_a_step_that_is_slower_on_rank_0_has_torchs_own_on_all(run: Run, slow: int, put_back: int) -> None:
    found = same(run(confirming.slow_step_on_one_rank, slow))
    assert len(found["torchs"]) == put_back
    assert f"is_withdrawn={put_back > 0}" in found["found"]


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


def test_a_real_model_runs_alike_on_all_ranks(run: Run) -> None:
    found = same(run(confirming.optimized))
    assert len(found["layers"]) == 5
    assert found["error"] == "none"


def test_a_rank_that_is_killed_in_a_step_is_named_and_what_was_tuned_runs_on(tmp_path: Path) -> None:
    first, _, last = Ranks(3).run(confirm_and_die, tmp_path, 1, killed=[1])
    for one in (first, last):
        assert one["error"].startswith("SharingError: rank 1 ended")
        assert one["torchs"] == 0
