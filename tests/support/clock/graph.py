"""Graphs timed on a made-up clock: what runs takes the seconds that a test says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

from support.clock.machine import FakeClock, fake_machine
from support.clock.shared_machine import SharedProcessors
from torch import Tensor, nn

import mucudnn
from mucudnn.core.config import Config
from mucudnn.core.terminal import silent
from mucudnn.graph import memory_budget
from mucudnn.graph.capture import capture
from mucudnn.graph.costs import Timings
from mucudnn.graph.model import BandedModel, signature_of
from mucudnn.graph.operators import Captured
from mucudnn.graph.schedule import Schedule
from mucudnn.graph.windows import Convolution, convolutions_of
from mucudnn.kernels.registry import algorithms
from mucudnn.measuring.whole_runs import Machine, run_torch, whole_run
from mucudnn.store.database import Database

TWO = "implicit-gemm", "winograd-4x4"
_CAPTURED: WeakKeyDictionary[nn.Module, dict[Any, Captured]] = WeakKeyDictionary()


def made_up_timings(config: Config | None = None, database: Database | None = None) -> Timings:
    """Return the timings of a graph on a clock that stands still, in a database of their own."""
    return Timings(fake_machine(FakeClock(), []), database or Database(":memory:"), config or Config(), silent)


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
                (memory_budget, "capture", captured_once),
                (Machine, "current", lambda device="cpu": self.machine),
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
    schedule = model.findings[0].schedule
    return [schedule.plan, *(None if one is None else one.name for one in schedule.algorithms.values())]
