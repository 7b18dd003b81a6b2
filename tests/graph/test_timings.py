"""What a graph's tuning times: once, again where it was disturbed, until the time limit; on a made-up clock."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import pytest
import torch
from support.clock.machine import FakeClock, fake_machine
from support.clock.shared_machine import SharedClock, SharedProcessors
from torch import Tensor, nn

import mucudnn
from mucudnn.bench.sources.networks.large_images import DnCNN
from mucudnn.core.config import Config
from mucudnn.core.errors import DatabaseError, InfeasibleError
from mucudnn.core.terminal import silent
from mucudnn.graph import fitting
from mucudnn.graph.capture import capture
from mucudnn.graph.model import BandedModel, signature_of
from mucudnn.graph.operators.convolution import Convolution, convolutions_of
from mucudnn.graph.operators.operator import Captured
from mucudnn.graph.schedule import Schedule
from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.kernels.registry import algorithms
from mucudnn.measuring.heap import settle_heap
from mucudnn.measuring.timings import Timings
from mucudnn.measuring.whole_runs import Machine, run_torch, whole_run
from mucudnn.store.database import Database

TWO = "implicit-gemm", "winograd-4x4"
_CAPTURED: WeakKeyDictionary[nn.Module, dict[Any, Captured]] = WeakKeyDictionary()


class CountingClock(FakeClock):
    """A clock by which each call takes about a millisecond, and which counts what it times."""

    timed = 0

    def now(self) -> float:
        self.advance(2**-10)  # sums of which are exact
        return self.seconds

    def time(self, function: Callable[[], object], calls: int, calls_per_pass: int = 1) -> float:
        self.timed += 1
        return super().time(function, calls, calls_per_pass) * calls


@dataclass
class MadeUpRuns:
    """A machine on which graphs are tuned.

    seconds_of: of a convolution in a call of the graph, by the name of its algorithm, None for torch's own. asked: what
    was timed of the graph, in order, with whether it was known. ends_at: the beginning of what is not timed any more,
    since the time is up; ended: whether that came. reverses: the algorithms.
    """

    database: Path
    seconds_of: Callable[[Convolution, str | None], float] = lambda one, name: 0.001
    config: dict[str, Any] = field(default_factory=dict)
    ends_at: str | None = None
    reverses: bool = False
    ended: bool = False

    def __post_init__(self) -> None:
        self.clock, self.asked = CountingClock(), list[str]()
        every = list(algorithms("cpu"))
        self.machine = replace(
            fake_machine(self.clock, []),
            algorithms=every[::-1] if self.reverses else every,
            whole_run=whole_run,
            run_torch=run_torch,
            watch=SharedProcessors().watch(),
        )

    def optimize(self, model: nn.Module, x: Tensor, **config: Any) -> nn.Module:
        """Return the model as a graph. Once it has been optimized, nothing of it may be changed."""
        names = TWO[::-1] if self.reverses else TWO
        given = {"database": self.database, "algorithms": names} | self.config | config
        of, runs = Timings.of, self

        def spy(self: Timings, what: str, measure: Callable[[], Any], **how: Any) -> Any:
            def measured() -> Any:
                runs.asked.append(what)
                return measure()

            if runs.ends_at is not None and what.startswith(runs.ends_at):
                self.left_s, runs.ended = 0.0, True
            return of(self, what, measured, **how)

        with ExitStack() as stack:
            for where, name, put in (
                (fitting, "capture", captured_once),
                (Machine, "current", lambda *_: self.machine),
                (Timings, "of", spy),
                (Schedule, "operator_times", lambda schedule, arguments: self.operator_times(schedule)),
            ):
                stack.enter_context(mock.patch.object(where, name, put))
            return mucudnn.optimize(model, x, Config(**given), progress=False)

    def operator_times(self, schedule: Schedule) -> dict[int, float]:
        self.clock.timed += 1
        self.clock.advance(0.01)
        seconds = dict.fromkeys(range(len(schedule.operators)), 0.001)
        for index, one in convolutions_of(schedule.operators).items():
            algorithm = schedule.algorithms[index]
            seconds[index] = self.seconds_of(one, None if algorithm is None else algorithm.name)
        return seconds


def captured_once(model: nn.Module, arguments: tuple[Any, ...]) -> Captured:
    """Return a copy of the graph of a model, which is captured once: that takes most of the time of a test."""
    known = _CAPTURED.setdefault(model, {})
    signature = signature_of(arguments)
    if signature not in known:
        known[signature] = capture(model, arguments)
    return copy.deepcopy(known[signature], {id(one): one for one in (*model.parameters(), *model.buffers())})


def choices_of(model: nn.Module) -> list[object]:
    """Return the plan of a graph, and the algorithm of each convolution."""
    assert isinstance(model, BandedModel)
    schedule = model.tuned_graphs.findings[0].schedule
    return [schedule.plan, *(None if one is None else one.name for one in schedule.algorithms.values())]


WAYS = [{"fuse": True}, {"memory_budget": "40KiB"}]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    if reason := loaded_build().why_not_compiled:
        pytest.skip(f"only compiled algorithms run bands: {reason}")
    return tmp_path / "db.sqlite"


@pytest.fixture(scope="module")
def net() -> tuple[nn.Module, Tensor]:
    return DnCNN(4, 8).eval(), torch.randn(1, 1, 32, 24)


def is_right(tuned: nn.Module, model: nn.Module, x: Tensor) -> bool:
    with torch.no_grad():
        return torch.allclose(tuned(x).double(), copy.deepcopy(model).double()(x.double()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_is_stored_is_not_measured_again(way: dict[str, Any], stored: Path, net: tuple[nn.Module, Tensor]) -> None:
    model, x = net
    first, second, elsewhere = (MadeUpRuns(stored) for _ in range(3))
    of_first, of_second = (runs.optimize(model, x, **way) for runs in (first, second))
    assert first.clock.timed > 0
    assert {one.split(":")[0] for one in first.asked} >= {"operator by itself", "calls in turns"}
    assert (second.clock.timed, second.asked) == (0, [])
    assert choices_of(of_second) == choices_of(of_first)
    assert is_right(of_second, model, x)
    elsewhere.machine = replace(elsewhere.machine, environment=replace(elsewhere.machine.environment, threads=7))
    elsewhere.optimize(model, x, **way)
    assert elsewhere.asked == first.asked, "another number of threads has times of its own"


def test_other_sizes_and_settings_are_measured(stored: Path, net: tuple[nn.Module, Tensor]) -> None:
    """A graph with one more layer, another size, kept filters or a kept heap is not what was timed."""
    model, x = net
    MadeUpRuns(stored).optimize(model, x, fuse=True)
    for other, given, config in (
        (DnCNN(5, 8).eval(), x, {}),
        (model, torch.randn(1, 1, 32, 40), {}),
        (model, x, {"cache_budget": None}),
        (model, x, {"keep_heap": True}),
    ):
        runs = MadeUpRuns(stored)
        runs.optimize(other, given, fuse=True, **config)
        settle_heap(False)
        assert sum(one.startswith(("calls in turns", "convolutions in place")) for one in runs.asked) >= 2


def test_convolutions_of_equal_sizes_and_other_filters_are_timed_apart(stored: Path) -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8))
    runs = MadeUpRuns(stored)
    runs.optimize(model.eval(), torch.randn(1, 8, 12, 12), fuse=True)
    of_torch = [one for one in runs.asked if one.startswith("operator by itself: Conv") and " by " not in one[20:]]
    assert len(of_torch) == 3


def test_new_weights_take_what_is_stored_and_give_their_own_values(stored: Path, net: tuple[nn.Module, Tensor]) -> None:
    """Times do not depend on values; prepared filters and the check of the result do."""
    model, x = copy.deepcopy(net)
    tuned = MadeUpRuns(stored).optimize(model, x, fuse=True, cache_budget=None)
    assert isinstance(tuned, BandedModel)
    with torch.no_grad():
        model.noise[0].weight.mul_(3.0)
        with pytest.warns(RuntimeWarning, match=r"noise\.0\.weight have changed"):
            assert torch.equal(tuned(x), model(x))
    runs, model = MadeUpRuns(stored), copy.deepcopy(model)
    again = runs.optimize(model, x, fuse=True, cache_budget=None)
    assert runs.asked == []
    assert is_right(again, model, x)
    run = Schedule.run
    with mock.patch.object(Schedule, "run", lambda self, given: run(self, given) + 1):
        with pytest.warns(UserWarning, match="its graph gives other values"):
            wrong = runs.optimize(model, x, fuse=True, cache_budget=None, confirm=None)
        assert not isinstance(wrong, BandedModel)


class Shared:
    """A graph's timings on a machine that others use; what is timed takes a second, twice as long meanwhile."""

    def __init__(self, database: Database, **how: float) -> None:
        self.processors, self.measured = SharedProcessors(**how), 0  # type: ignore[arg-type]
        machine = replace(fake_machine(SharedClock(self.processors), []), watch=self.processors.watch())
        self.timings = Timings(machine, database, Config(), silent)

    def timed(self) -> float:
        def measure() -> list[list[float]]:
            self.measured += 1
            seconds = 2.0 if self.processors.is_busy() else 1.0
            self.processors.work(seconds)
            return [[seconds]]

        samples = self.timings.of("a call", measure)
        assert samples is not None
        return samples[0][0]


def test_disturbed_timings_are_measured_again_on_a_quiet_machine() -> None:
    with Database(":memory:") as database:
        with pytest.warns(RuntimeWarning, match="other programs were running"):
            assert Shared(database, others=1.0).timed() == 2.0
        busy, quiet, third = Shared(database, others=1.0), Shared(database), Shared(database, others=1.0)
        assert (busy.timed(), busy.measured) == (2.0, 0), "it would be disturbed again"
        assert (quiet.timed(), quiet.measured) == (1.0, 1)
        assert (third.timed(), third.measured) == (1.0, 0)
        database.add_timing(quiet.timings.machine.environment, "another", [[1.0]], None)
        assert database.info()[0].timings == 2


def test_a_timing_is_repeated_at_once_where_the_disturbance_ends() -> None:
    with Database(":memory:") as database:
        shared = Shared(database, others=1.0, quiet_from_s=4.5)
        assert (shared.timed(), shared.measured) == (1.0, 2)


STEPS = ["operator by itself", "convolutions in place", "convolutions in bands", "calls in turns"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_time_limit_ends_each_step(
    step: str, way: dict[str, Any], stored: Path, net: tuple[nn.Module, Tensor]
) -> None:
    """What is not known then is estimated; the first plan within the budget is compared with the model alone."""
    model, x = net
    runs = MadeUpRuns(stored, ends_at=step)
    tuned = runs.optimize(model, x, time_limit="60s", **way)
    assert isinstance(tuned, BandedModel)
    assert is_right(tuned, model, x)
    (found,) = tuned.tuned_graphs.findings
    assert found.budget_bytes is None or found.needed_bytes <= found.budget_bytes
    assert [one for one in runs.asked if one.startswith(step)] == (runs.asked[-1:] if step == STEPS[-1] else [])
    assert runs.asked[-1].startswith("calls in turns")
    assert found.whole_run is not None
    assert runs.ended or (step, way) != (STEPS[2], WAYS[1]), "bands are timed within a small budget"
    assert len(found.whole_run.time_samples_s) <= 2 or not runs.ended
    later = MadeUpRuns(stored)
    later.optimize(model, x, **way)
    known = {one for one in runs.asked if not one.startswith("calls in turns")}
    assert not known & {*later.asked}, "it goes on with what is missing"


def test_all_timings_take_the_time_of_one_problem() -> None:
    timings = Timings(fake_machine(FakeClock(), []), Database(":memory:"), Config(time_limit="10s"), silent)
    clock: Any = timings.machine.clock

    def measure() -> list[list[float]]:
        clock.advance(4.0)
        return [[4.0]]

    assert [timings.of(str(number), measure) is not None for number in range(5)] == [True, True, True, False, False]
    assert timings.of("3", measure, in_any_case=True) == [[4.0]]
    assert timings.of("1", measure) == [[4.0]], "what is stored is known after the limit, too"


@pytest.mark.parametrize("budget", [None, "40KiB"])
def test_ties_are_decided_in_the_same_way_in_each_run(
    budget: str | None, tmp_path: Path, stored: Path, net: tuple[nn.Module, Tensor]
) -> None:
    """Whatever the order of the algorithms: by this clock all are equally fast."""
    model, x = net
    way = {"fuse": True} if budget is None else {"memory_budget": budget}
    found = []
    for reverses in (False, True):
        runs = MadeUpRuns(tmp_path / f"{reverses}.sqlite", reverses=reverses)
        found.append(choices_of(runs.optimize(model, x, **way)))
    assert found[0] == found[1]


def by(name: str | None) -> Callable[[Any, str | None], float]:
    return lambda one, used: 0.001 if used == name else 0.01


@pytest.mark.parametrize("name", [*TWO, None])
def test_the_fastest_in_place_is_chosen(name: str | None, stored: Path, net: tuple[nn.Module, Tensor]) -> None:
    model, x = net
    tuned = MadeUpRuns(stored, by(name)).optimize(model, x, fuse=True)
    used = choices_of(tuned)[1:]
    assert used[1:-1] == [name] * len(used[1:-1]), "the first and the last layer have other sizes"


def test_the_smallest_budget_is_enough_and_one_byte_less_is_not(stored: Path, net: tuple[nn.Module, Tensor]) -> None:
    model, x = net
    runs = MadeUpRuns(stored)
    with pytest.raises(InfeasibleError) as caught:
        runs.optimize(model, x, memory_budget=1)
    least = caught.value.smallest_feasible_bytes
    assert least is not None
    with pytest.raises(InfeasibleError) as again:
        runs.optimize(model, x, memory_budget=least - 1)
    assert again.value.smallest_feasible_bytes == least
    assert runs.asked == []
    for limit in (None, "1ms"):
        tuned = MadeUpRuns(stored).optimize(model, x, memory_budget=least, time_limit=limit)
        assert isinstance(tuned, BandedModel)
        assert tuned.tuned_graphs.findings[0].needed_bytes <= least
        assert is_right(tuned, model, x)


def test_a_file_that_cannot_be_written_ends_no_tuning(stored: Path, net: tuple[nn.Module, Tensor]) -> None:
    model, x = net
    Database(stored).close()
    with (
        mock.patch.object(Database, "commit", side_effect=DatabaseError("it is full")),
        pytest.warns(UserWarning, match="its measurements are not stored: it is full"),
    ):
        tuned = MadeUpRuns(stored).optimize(model, x, fuse=True)
    assert is_right(tuned, model, x)
