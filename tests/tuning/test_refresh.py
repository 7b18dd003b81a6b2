"""Refreshing a database: what is doubtful is measured again in quiet, verdicts turn, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
from support.clock.busy_bench import BusyBench
from support.clock.machine import ENVIRONMENT, FORWARD
from support.clock.shared_machine import SharedProcessors

from mucudnn.bench.analyses.tuning_report import refresh_in_words
from mucudnn.tuning.refresh import Refreshed, has_turned, refresh
from mucudnn.words import warning
from mucudnn.words.results import MicroConfig, WholeRun

VERSIONS = {"native": 1, "quick": 1}
QUICK = (MicroConfig("quick", 8),)


@pytest.fixture(autouse=True)
def nothing_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warning, "_said", set())


def tuned_busy() -> BusyBench:
    bench = BusyBench(SharedProcessors(others=1.0))
    with pytest.warns(RuntimeWarning, match="the machine was busy or slow"):
        assert bench.tune().problems[0].configuration.algorithms == ("native",)
    return bench


@pytest.fixture
def disturbed() -> BusyBench:
    """It was tuned under load, and is quiet now."""
    bench = tuned_busy()
    bench.processors.others = 0.0
    bench.processors.rest(2.0)
    return bench


@pytest.fixture
def known() -> BusyBench:
    """It was tuned in quiet."""
    bench = BusyBench(SharedProcessors())
    bench.tune()
    return bench


def rows(bench: BusyBench) -> int:
    (found,) = bench.database.info()
    return found.measurements + found.failures + found.verifications


def refreshed(bench: BusyBench, **how: object) -> Refreshed:
    return refresh(bench.database, bench.machine, progress=bench.progress, **how)  # type: ignore[arg-type]


def test_choices_are_those_of_a_quiet_machine(disturbed: BusyBench, known: BusyBench) -> None:
    found = refreshed(disturbed)
    assert found.doubtful == len(found.measurements) + len(found.whole_runs) + found.passed_over
    assert found.measurements
    (now,), (expected,) = disturbed.tune().problems, known.tune().problems
    assert now.configuration.algorithms == expected.configuration.algorithms == ("quick",)
    assert now.baseline_s == pytest.approx(expected.baseline_s)
    assert now.time_s == pytest.approx(expected.time_s)


def test_changes_are_reported_nothing_is_lost_and_nothing_stays_doubtful(disturbed: BusyBench) -> None:
    before, count = disturbed.database.measurements(ENVIRONMENT, FORWARD, VERSIONS), rows(disturbed)
    found = refreshed(disturbed)
    again = len(found.measurements) + len(found.whole_runs)
    assert all(one.before in before and one.now.step_s < one.before.step_s for one in found.measurements)
    assert all(not one.now.is_disturbed and one.before.is_disturbed for one in found.measurements)
    assert refresh_in_words(found).startswith(f"{again} of {found.doubtful} measured again")
    assert rows(disturbed) >= count + again
    assert refreshed(disturbed).doubtful == found.passed_over


def test_a_verdict_turns(known: BusyBench) -> None:
    """Winning runs that were rejected under load, and stored so."""
    slow = WholeRun(0.339, 0.4, 0.06, 0.7)
    problem = replace(FORWARD, c=4)
    known.tune(problem)
    for fresh in (False, True):
        known.database.add_whole_run(
            ENVIRONMENT, problem.with_operation(FORWARD.operation), [*QUICK], VERSIONS, slow, fresh=fresh
        )
    other = replace(FORWARD, c=6)
    known.database.add_whole_run(ENVIRONMENT, other, QUICK, VERSIONS, slow)
    found = refreshed(known)
    turned = [run for run in found.whole_runs if has_turned(run)]
    assert {run.problem for run in turned} == {problem, other}
    assert all(run.now.speedup == pytest.approx(2.0) for run in turned)
    assert known.database.whole_run(ENVIRONMENT, other, QUICK, VERSIONS) == turned[-1].now
    assert f"{len(turned)} verdicts changed" in refresh_in_words(found)


def test_where_nothing_is_doubtful_nothing_is_measured(known: BusyBench) -> None:
    steps, before = known.steps, rows(known)
    found = refreshed(known)
    assert (found.doubtful, found.measurements, found.whole_runs) == (0, (), ())
    assert (known.steps, rows(known)) == (steps, before)
    assert refresh_in_words(found) == f"nothing is doubtful on {ENVIRONMENT}"


def test_a_busy_machine_is_waited_for_and_then_left(disturbed: BusyBench) -> None:
    disturbed.processors.work(2.0, others=1.0)
    disturbed.told.clear()
    steps, before, now_s = disturbed.steps, rows(disturbed), disturbed.processors.seconds
    found = refreshed(disturbed)
    assert found.busy == "others take 100% of a core"
    assert found.left == found.doubtful > 0
    assert (disturbed.steps, rows(disturbed)) == (steps, before)
    assert 59 <= disturbed.processors.seconds - now_s <= 62
    assert "waiting for a quiet machine" in disturbed.told[0]
    assert f"{found.left} left as they were" in refresh_in_words(found)


def test_slow_clocks_are_not_waited_for_and_marked_again(disturbed: BusyBench, monkeypatch: pytest.MonkeyPatch) -> None:
    disturbed.database.add_rate(ENVIRONMENT, 100.0)
    slow = replace(disturbed.machine, watch=disturbed.processors.watch(rate=lambda: 50.0))
    monkeypatch.setattr(BusyBench, "machine", slow)
    disturbed.told.clear()
    found = refreshed(disturbed)
    assert not [text for text in disturbed.told if "waiting" in text]
    assert found.disturbed == len(found.measurements) + len(found.whole_runs) > 0
    assert {one.now.load for one in found.measurements} == {0.5}
    assert f"{found.disturbed} disturbed again" in refresh_in_words(found)


def test_ctrl_c_keeps_what_was_measured(disturbed: BusyBench) -> None:
    def interrupted_at(count: int) -> Callable[[int], float]:
        step_s, calls = disturbed.native.step_s, iter(range(count))

        def step(size: int) -> float:
            if next(calls, None) is None:
                raise KeyboardInterrupt
            return step_s(size)

        return step

    disturbed.native.step_s = interrupted_at(1)
    before = rows(disturbed)
    found = refreshed(disturbed)
    assert found.interrupted
    assert found.left > 0
    assert rows(disturbed) >= before


def test_everything_is_measured_again_on_demand(known: BusyBench) -> None:
    before = rows(known)
    found = refreshed(known, everything=True)
    assert found.doubtful == before
    assert len(found.measurements) + len(found.whole_runs) + found.passed_over == found.doubtful
    assert found.measurements
    assert found.whole_runs


@pytest.mark.parametrize(("days", "is_old"), [(0, True), (1, False)])
def test_what_is_older_is_measured_again_on_demand(known: BusyBench, days: int, is_old: bool) -> None:
    assert (refreshed(known, older_than=timedelta(days=days)).doubtful > 0) is is_old


def test_what_was_noisy_is_measured_again(known: BusyBench) -> None:
    noisy = replace(known.database.measurements(ENVIRONMENT, FORWARD, VERSIONS)[0], noise=0.5)
    known.database.add(ENVIRONMENT, FORWARD, 1, noisy)
    found = refreshed(known)
    assert found.doubtful == 1
    assert [one.before for one in found.measurements] + [None] * found.passed_over in ([noisy], [None])


def test_other_versions_and_environments_are_left_alone(known: BusyBench) -> None:
    (one, *_) = known.database.measurements(ENVIRONMENT, FORWARD, VERSIONS)
    known.database.add(ENVIRONMENT, FORWARD, 77, replace(one, load=0.9))
    known.database.add(replace(ENVIRONMENT, threads=99), FORWARD, 1, replace(one, load=0.9))
    found = refreshed(known)
    assert (found.doubtful, found.passed_over, found.measurements) == (1, 1, ())
