"""Tuning on a machine that others use: it waits for quiet, measures again, and says what remains doubtful."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
from support.clock.machine import ENVIRONMENT, FORWARD, FakeAlgorithm
from support.clock.shared_machine import SharedClock, SharedProcessors
from support.clock.two_algorithms import BATCH, NO_LIMIT, Bench

from mucudnn.core import errors
from mucudnn.core.config import Config
from mucudnn.core.records import Comparison, Configuration, Failure, FailureKind, Measurement, MicroConfig, Task
from mucudnn.measuring import quiet
from mucudnn.measuring.load import Watch
from mucudnn.measuring.whole_runs import Machine
from mucudnn.store.database import Database
from mucudnn.store.tuning_store import EnvironmentStore
from mucudnn.tuning.choose import run_whole
from mucudnn.tuning.job import Context, Job
from mucudnn.tuning.tuner import Tuning

VERSIONS = {"native": 1, "quick": 1}


class BusyBench(Bench):
    """Torch at 20 ms a sample, ``quick`` at 10 ms. While others work: torch at 40 ms, quick at 80 ms."""

    def __init__(self, processors: SharedProcessors) -> None:
        super().__init__()
        self.processors, self.clock, self.told = processors, SharedClock(processors), list[str]()
        self.native = FakeAlgorithm("native", self.clock, self._linear(0.02, 0.04))
        self.quick = FakeAlgorithm("quick", self.clock, self._linear(0.01, 0.08))

    def _linear(self, quiet_s: float, busy_s: float) -> Callable[[int], float]:
        return lambda size: size * (busy_s if self.processors.is_busy() else quiet_s)

    @property
    def machine(self) -> Machine:
        return replace(super().machine, watch=self.processors.watch())

    def progress(self, text: str, fraction: float) -> None:
        self.told.append(text)


@pytest.fixture(autouse=True)
def nothing_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_said", set())


def chosen(tuning: Tuning) -> str:
    (algorithm,) = tuning.problems[0].configuration.algorithms
    return algorithm


def busy_bench(**changes: float) -> BusyBench:
    return BusyBench(SharedProcessors(others=1.0, **changes))  # type: ignore[arg-type]


def tuned_busy(bench: BusyBench) -> Tuning:
    with pytest.warns(
        RuntimeWarning, match="other programs were running: .* the next tuning on a quiet machine measures"
    ):
        return bench.tune()


def test_a_quiet_machine_is_not_waited_for() -> None:
    bench = BusyBench(SharedProcessors())
    assert chosen(bench.tune()) == "quick"
    assert not [text for text in bench.told if "waiting" in text]
    assert all(m.load == 0.0 for m in bench.database.measurements(ENVIRONMENT, FORWARD, VERSIONS) if m.samples > 2)


def test_what_is_measured_under_load_is_marked_and_said() -> None:
    bench = busy_bench()
    tuning = tuned_busy(bench)
    assert chosen(tuning) == "native", "as it looks while others work"
    loads = [m.load for m in bench.database.measurements(ENVIRONMENT, FORWARD, VERSIONS)]
    assert max(load for load in loads if load is not None) == pytest.approx(1.0)
    assert any(text.startswith("waiting for a quiet machine: others take 100% of a core") for text in bench.told)


def test_waiting_ends() -> None:
    bench = busy_bench()
    machine_s = bench.processors.seconds
    tuned_busy(bench)
    waits = sum("waiting" in text for text in bench.told)
    assert 0 < waits <= 1 + quiet.MOST_WAITED_S / 0.5
    assert bench.processors.seconds - machine_s > quiet.MOST_WAITED_S


def test_what_was_disturbed_is_measured_again_in_the_same_run() -> None:
    bench = busy_bench(busy_from_s=0.2, quiet_from_s=3.0)
    assert chosen(bench.tune()) == "quick"
    results = bench.database.measurements(ENVIRONMENT, FORWARD, VERSIONS)
    assert not any(m.is_disturbed for m in results)


def test_a_verdict_under_load_is_not_believed_when_it_is_quiet() -> None:
    bench = busy_bench()
    assert chosen(tuned_busy(bench)) == "native"
    bench.processors.others = 0.0
    bench.processors.rest(2.0)
    assert bench.database.info()[0].busy > 0
    assert chosen(bench.tune()) == "quick"
    steps = bench.steps
    assert chosen(bench.tune()) == "quick"
    assert bench.steps == steps, "all is known, and nothing is doubtful"


@pytest.mark.parametrize("is_watched", [True, False], ids=["under load", "load unknown"])
def test_stored_results_are_believed_unless_it_is_quiet(is_watched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = busy_bench()
    tuned_busy(bench)
    steps, rows = bench.steps, bench.database.info()[0]
    bench.processors.work(1.0)
    if not is_watched:
        blind = Watch(clock=bench.processors.now, sleep=bench.processors.rest)
        monkeypatch.setattr(BusyBench, "machine", replace(bench.machine, watch=blind))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert chosen(bench.tune()) == "native"
    assert bench.steps == steps
    assert bench.database.info()[0] == rows


def test_what_was_passed_over_under_load_is_looked_at_again() -> None:
    bench = busy_bench()
    hopeless = Failure(MicroConfig("quick", BATCH), "2.0 times the fastest in like problems", FailureKind.HOPELESS)
    bench.database.add_failure(ENVIRONMENT, FORWARD, 1, hopeless)
    slow = Measurement(MicroConfig("native", BATCH), 0.0, 0.32, 0, 0, 0.0, load=0.9)
    bench.database.add(ENVIRONMENT, FORWARD, 1, slow)
    bench.processors.others = 0.0
    assert chosen(bench.tune()) == "quick"


def test_a_stored_verdict_under_load_is_not_believed_though_measurements_are() -> None:
    bench, stored = BusyBench(SharedProcessors()), Database(":memory:")
    bench.tune()
    for result in bench.database.measurements(ENVIRONMENT, FORWARD, VERSIONS):
        stored.add(ENVIRONMENT, FORWARD, 1, result)
    runs = bench.database.whole_runs(ENVIRONMENT, FORWARD, VERSIONS)
    for parts in runs:
        stored.add_whole_run(ENVIRONMENT, FORWARD, parts, VERSIONS, Comparison(0.3, 0.5, 0.06, 0.7))
    bench.database, steps = stored, bench.steps
    assert chosen(bench.tune()) == "quick"
    assert bench.steps == steps, "measurements are believed"
    now = stored.whole_runs(ENVIRONMENT, FORWARD, VERSIONS)
    assert [run.speedup for run in now.values()] == pytest.approx([run.speedup for run in runs.values()])


def test_whole_runs_under_load_are_made_again_once() -> None:
    bench = busy_bench(quiet_from_s=3.0)
    watch, one = bench.machine.watch, Configuration((MicroConfig("quick", 8),), 1.0, 0)
    waiting, store = quiet.Quiet(watch, bench.progress), EnvironmentStore(bench.database, ENVIRONMENT)
    machine = replace(bench.machine, watch=watch)
    context = Context(NO_LIMIT, machine, store, waiting, bench.progress, {}, versions=VERSIONS)
    job = Job(Task(FORWARD, BATCH), 0.0, (), (), {})
    outcome = run_whole(job, [one], context)[one]
    assert any("waiting for a quiet machine" in text for text in bench.told), "after the first time"
    assert isinstance(outcome, Comparison)
    assert (outcome.load, outcome.speedup) == (0.0, pytest.approx(2.0))
    assert not waiting.disturbed
    assert run_whole(job, [], context) == {}


def test_whole_runs_have_the_load_of_their_turns() -> None:
    bench = busy_bench()
    one = Configuration((MicroConfig("quick", 8),), 1.0, 0)
    (busy,) = bench.machine.compare(FORWARD, BATCH, [one], keeps_workspace=True)
    bench.processors.rest(10.0)
    bench.processors.others = 0.0
    (calm,) = bench.machine.compare(FORWARD, BATCH, [one], keeps_workspace=True)
    assert isinstance(busy, Comparison)
    assert isinstance(calm, Comparison)
    assert (busy.load, calm.load) == (1.0, 0.0)


def test_the_time_limit_is_that_of_both_passes() -> None:
    bench = busy_bench(quiet_from_s=3.0)
    bench.processors.work(0.5)
    bench.tune(config=Config(workspace_limit=None, time_limit=0.3))
    found = bench.database.measurements(ENVIRONMENT, FORWARD, VERSIONS)
    assert {m.micro_config.algorithm for m in found} == {"native"}, "which is measured even if time is over"
    assert not any(m.is_disturbed for m in found)


def test_more_threads_than_cores_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = BusyBench(SharedProcessors(threads=4))
    watch = bench.processors.watch(cores=lambda: 2.0)
    monkeypatch.setattr(BusyBench, "machine", replace(bench.machine, watch=watch))
    with pytest.warns(RuntimeWarning, match=r"torch uses 4 threads, .* torch.set_num_threads\(2\)"):
        bench.tune()
    bench.tune(FORWARD.with_operation(FORWARD.operation))


def test_many_tunings_are_warned_of_once() -> None:
    bench = busy_bench()
    tuned_busy(bench)
    bench.tune(replace(FORWARD, c=4))  # warnings are errors
