"""What was measured in an older way: used where nothing is measured, measured again by a tuning and by a refresh."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.clock.busy_bench import BATCH, NO_LIMIT, BusyBench
from support.clock.machine import ENVIRONMENT, FORWARD
from support.clock.shared_machine import SharedProcessors

from mucudnn.database.database import Database
from mucudnn.database.selection import select_measurements
from mucudnn.enabling.workshop import Workshop
from mucudnn.tuning.refresh import refresh
from mucudnn.tuning.replay import replay
from mucudnn.tuning.tuner import Tuning
from mucudnn.words import warning
from mucudnn.words.config import BatchSizePolicy, Config
from mucudnn.words.results import METHOD, Measurement, MicroConfig, WholeRun
from mucudnn.words.task import Task

VERSIONS = {"native": 1, "quick": 1}


def chosen(tuning: Tuning) -> str:
    (algorithm,) = tuning.problems[0].configuration.algorithms
    return algorithm


def measured_in_an_older_way(database: Database | None = None) -> BusyBench:
    """Its times say that torch's own is faster, as they do not now."""
    bench = BusyBench(SharedProcessors())
    bench.database = database or bench.database
    slow, fast = (MicroConfig(name, BATCH) for name in ("quick", "native"))
    for of, step_s in ((slow, 0.2), (fast, 0.001)):
        bench.database.add(ENVIRONMENT, FORWARD, 1, Measurement(of, 0.0, step_s, 0, 0, 0.0, method=METHOD - 1))
    run = WholeRun(0.001, 0.2, 0.0, method=METHOD - 1)
    bench.database.add_whole_run(ENVIRONMENT, FORWARD, [slow], VERSIONS, run)
    return bench


def test_a_tuning_measures_again_what_was_measured_in_an_older_way() -> None:
    bench = measured_in_an_older_way()
    (tuned,) = bench.tune().problems
    assert tuned.configuration.algorithms == ("quick",)
    assert not any(measured.is_outdated for measured in tuned.measurements)
    steps = bench.steps
    assert chosen(bench.tune()) == "quick"
    assert bench.steps == steps, "that is done once"


def test_what_a_time_limit_leaves_out_is_not_chosen_by_older_times() -> None:
    bench = measured_in_an_older_way()
    (tuned,) = bench.tune(config=replace(NO_LIMIT, time_limit=1e-9)).problems
    assert {m.method for m in tuned.measurements} == {METHOD}


def test_where_nothing_newer_is_known_older_times_are_used() -> None:
    bench = measured_in_an_older_way()
    stored = select_measurements(bench.database, [Task(FORWARD, BATCH)], BatchSizePolicy.POWER_OF_TWO)
    assert chosen(replay([Task(FORWARD, BATCH)], NO_LIMIT, stored)) == "native"


def test_where_convolutions_are_met_older_times_answer_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warning, "_said", set())
    path = tmp_path / "some.sqlite"
    with Database(path) as database:
        bench = measured_in_an_older_way(database)
        workshop = Workshop(Config(database=path, workspace_limit=None), lambda _: bench.machine)
        with pytest.warns(RuntimeWarning, match=r"in another way: mucudnn database refresh"):
            found = workshop.look_up(Task(FORWARD, BATCH), torch.device("cpu"))
        assert found is not None
        assert found.configuration.is_baseline
        bench.tune()
        now = workshop.look_up(Task(FORWARD, BATCH), torch.device("cpu"))
        assert now is not None
        assert now.configuration.algorithms == ("quick",)


def test_refreshing_measures_again_what_was_measured_in_an_older_way() -> None:
    bench = measured_in_an_older_way()
    bench.processors.rest(2.0)
    found = refresh(bench.database, bench.machine)
    assert found.doubtful == 3
    assert {one.before.method for one in found.measurements} == {METHOD - 1}
    assert {one.now.method for one in (*found.measurements, *found.whole_runs)} == {METHOD}
    assert refresh(bench.database, bench.machine).doubtful == 0
    (rows,) = bench.database.info().environments
    assert rows.measurements + rows.verifications == found.doubtful + len(found.measurements) + len(found.whole_runs)
