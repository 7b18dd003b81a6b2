"""Recipes on a machine whose costs are known: what is measured, where it goes on, and what is judged."""

from __future__ import annotations

from functools import partial
from math import nan
from pathlib import Path
from statistics import median

import pytest
from pandas import DataFrame
from support.clock.known_machine import MadeUpMachine

from mucudnn.bench.recipes import runs
from mucudnn.bench.recipes.benchmarks import Place
from mucudnn.bench.recipes.criteria import Criterion
from mucudnn.bench.recipes.judging import judge
from mucudnn.bench.recipes.recipe_file import read_recipe
from mucudnn.bench.recipes.running import Outcome, run_recipe
from mucudnn.bench.suites.convolutions.benchmark import benchmark_convolutions
from mucudnn.bench.suites.solver import benchmark_division
from mucudnn.words.errors import InvalidInputError

HEADING = "name,n,c,h,w,k,r,s,pad_h,pad_w,stride_h,stride_w\n"
LAYERS = HEADING + "first,8,4,8,8,4,3,3,1,1,1,1\nsecond,8,4,8,8,8,3,3,1,1,1,1\n"
GRID = '[mutable]\npolicy = ["power-of-two"]\nworkspace_limit = ["400B"]\n'


class Kitchen:
    def __init__(self, folder: Path, made_up: MadeUpMachine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.made_up, self.patch = folder, made_up, monkeypatch
        (folder / "layers.csv").write_text(LAYERS)

    def cook(self, accept: str, grid: str = GRID, more: str = "", top: str = "") -> Outcome:
        for function in (benchmark_convolutions, benchmark_division):
            self.patch.setattr(runs, function.__name__, partial(function, **self.made_up.own))
        path = self.folder / "recipe.toml"
        fixed = f'[fixed]\ntable = "{self.folder / "layers.csv"}"\noperations = ["forward"]\nrounds = 3\n{more}'
        path.write_text(f"{top}{fixed}{grid}[accept]\n{accept}")
        return run_recipe(read_recipe(path), self.folder / "out", Place())

    def rows(self) -> bytes:
        (folder,) = (path for path in (self.folder / "out").iterdir() if path.is_dir())
        return (folder / "rows.jsonl").read_bytes()


@pytest.fixture
def kitchen(tmp_path: Path, made_up_machine: MadeUpMachine, monkeypatch: pytest.MonkeyPatch) -> Kitchen:
    return Kitchen(tmp_path, made_up_machine, monkeypatch)


def values(outcome: Outcome) -> list[float | None]:
    return [one.value for one in outcome.judgements]


def test_criteria_are_judged_by_what_was_measured(kitchen: Kitchen) -> None:
    """Under 400 bytes the undivided is small, 121 ms, ours quick in two halves, 82 ms; torch takes 160 ms."""
    outcome = kitchen.cook(
        'speedup = [{ at_least = 1.9 }, { over = "undivided", at_least = 1.4 }, { of = "undivided", at_least = 1.4 }]\n'
        'share_of_limit = { at_most = 1.0 }\nworkspace = { at_most = "399B" }\nfailures = { at_most = 0 }\n'
        'time = [{ at_most = "82ms" }, { at_most = "81ms", layer = "first" }]\n'
    )
    assert values(outcome) == pytest.approx([160 / 82, 121 / 82, 160 / 121, 1.0, 400, 0, 0.082, 0.082])
    assert [one.passed for one in outcome.judgements] == [True, True, False, True, False, True, True, False]
    assert not outcome.passed
    assert outcome.judgements[0].place.endswith("mucudnn, power-of-two, 400 B")


def test_a_later_run_measures_what_is_missing_and_judges_by_its_own_criteria(kitchen: Kitchen) -> None:
    whole = kitchen.cook("speedup = { at_least = 1.9 }\n")
    spent_s = kitchen.made_up.clock.seconds
    assert (whole.passed, kitchen.cook("speedup = { at_least = 2.1 }\n").passed) == (True, False)
    assert kitchen.made_up.clock.seconds == spent_s
    with pytest.raises(InvalidInputError, match="workspace_limit was"):
        kitchen.cook("speedup = { at_least = 1.9 }\n", grid=GRID.replace("400B", "800B"))
    (folder,) = (path for path in (kitchen.folder / "out").iterdir() if path.is_dir())
    lines = (folder / "rows.jsonl").read_text().splitlines(keepends=True)
    (folder / "rows.jsonl").write_text("".join(lines[:3]) + lines[3][:40])
    again = kitchen.cook("speedup = { at_least = 1.9 }\n")
    assert values(again) == pytest.approx(values(whole))
    assert len(again.rows) == len(whole.rows) == 6


def test_what_cannot_be_judged_does_not_pass(kitchen: Kitchen) -> None:
    outcome = kitchen.cook('error = { at_most = 1, layer = "third" }\nspeedup = { of = "mucudnn-wd", at_least = 0 }\n')
    assert [one.passed for one in outcome.judgements] == [False, False]
    path = kitchen.folder / "recipe.toml"
    line = 1 + next(n for n, text in enumerate(path.read_text().splitlines()) if text.startswith("error"))
    assert str(outcome.judgements[0]) == f"{path}, line {line}: no measurement to judge this by"


def test_one_budget_for_all_is_beside_a_limit_for_each(kitchen: Kitchen) -> None:
    """Both problems are alike: with 400 bytes each a division does what the limit does; in all, one has it."""
    grid = GRID + 'workspace_budget = ["400B each", "400B"]\n'
    outcome = kitchen.cook('workspace = { of = "mucudnn-wd", at_most = "400B" }\n', grid)
    divided = outcome.rows[outcome.rows["contestant"] == "mucudnn-wd"]
    by_budget = {budget: sorted(group["configuration"]) for budget, group in divided.groupby("limit_bytes")}
    assert by_budget[800] == ["quick 4×2", "quick 4×2"]
    assert divided.groupby("limit_bytes")["workspace_bytes"].sum().le([400, 800]).all()
    assert outcome.passed


def test_the_program_of_a_division_is_solved_again_and_again(kitchen: Kitchen) -> None:
    """There are two problems alike, each with ``small``, and with ``quick`` in micro-batches of several sizes."""
    grid = '[mutable]\nworkspace_budget = ["800B each", "100B", "0B"]\n'
    accept = 'gap = { at_most = 0 }\nworkspace = { at_most = "1600B" }\noptions = { at_least = 99 }\n'
    outcome = kitchen.cook(accept, grid, top='benchmark = "program"\n')
    by_budget = outcome.rows.set_index("limit_bytes")
    assert list(by_budget.index) == [1600, 100, 0]
    assert by_budget.loc[0, "workspace_bytes"] == 0
    assert by_budget.loc[100, "workspace_bytes"] <= 100
    assert set(by_budget["problems"]) == {2}
    assert set(map(len, by_budget["samples_s"])) == {3}
    assert [one.passed for one in outcome.judgements] == [True, True, False]
    before = kitchen.rows()
    kitchen.cook(accept, grid, top='benchmark = "program"\n')
    assert kitchen.rows() == before


def test_a_budget_that_suffices_for_nothing_is_told(kitchen: Kitchen) -> None:
    kitchen.made_up.native.internal_bytes_per_sample, kitchen.made_up.small.unsupported = 50, "not here"
    outcome = kitchen.cook(
        "failures = { at_most = 0 }\n", '[mutable]\nworkspace_budget = ["10B"]\n', top='benchmark = "program"\n'
    )
    assert [one.value for one in outcome.judgements] == [1]
    assert "budget" in outcome.rows["failure"][0]


def row(contestant: str, samples: list[float], turns: int = 1, **more: object) -> dict[str, object]:
    chosen = {"policy": None, "limit_bytes": nan, "folder": "net", "count": 1.0, "workspace_bytes": 0.0}
    return {
        "contestant": contestant,
        "turns": turns,
        "samples_s": samples,
        "time_s": median(samples or [nan]),
        **chosen,
        **more,
    }


def test_a_speedup_fails_only_where_its_samples_surely_say_so() -> None:
    for at_least, passed in ((0.9, True), (1.1, True), (1.6, False)):
        ours = [1.0, 1.5, 1.0, 1.5, 1.0, 1.5, 1.0, 1.5, 1.2]
        rows = DataFrame([row("torch", [1.2] * 9), row("mucudnn", ours)])
        judgement = judge(Criterion("speedup", "mucudnn", at_least=at_least, over="torch"), rows)
        assert judgement.found is not None
        assert judgement.found.low < judgement.value == 1.0 < judgement.found.high == pytest.approx(1.2)
        assert judgement.passed is passed


def test_the_worst_of_all_networks_counts_and_layers_count_as_often_as_they_occur() -> None:
    rows = DataFrame(
        [
            row("torch", [3.0], 1, folder="a"),
            row("mucudnn", [1.0], 1, folder="a"),
            row("torch", [2.0], 1, folder="b", count=3.0),
            row("mucudnn", [1.0], 1, folder="b", count=3.0),
            row("torch", [1.0], 2, folder="b"),
            row("mucudnn", [2.0], 2, folder="b"),
        ]
    )
    judgement = judge(Criterion("speedup", "mucudnn", at_least=1.0, over="torch"), rows)
    assert (judgement.value, judgement.place) == (pytest.approx(7 / 5), "b, mucudnn")


def test_what_failed_under_a_limit_is_no_rival_under_another() -> None:
    rows = DataFrame(
        [
            row("undivided", [2.0], 1, limit_bytes=2.0),
            row("mucudnn", [2.0], 1, limit_bytes=2.0),
            row("undivided", [], 1, limit_bytes=1.0),
            row("mucudnn", [9.0], 1, limit_bytes=1.0),
        ]
    )
    judgement = judge(Criterion("speedup", "mucudnn", at_least=1.0, over="undivided"), rows)
    assert (judgement.value, judgement.passed) == (1.0, True)
