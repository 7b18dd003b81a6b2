"""Timings of a graph's parts, each measured once: they are stored, and read again by later processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from math import inf

from torch import Tensor

from mucudnn.core import VERSION
from mucudnn.core.config import Config
from mucudnn.core.errors import say_once
from mucudnn.core.records import is_busy
from mucudnn.core.terminal import Progress
from mucudnn.graph.convolution import Convolution
from mucudnn.graph.operators import Barrier, Captured, Operator, Ref
from mucudnn.graph.schedule import Schedule
from mucudnn.kernels.algorithm import Algorithm
from mucudnn.measuring.whole_runs import Machine
from mucudnn.store.database import Database
from mucudnn.store.tuning_store import EnvironmentStore
from mucudnn.tuning.quiet import BUSY_TEXT, Quiet

Seconds = Sequence[Sequence[float]]  # samples of each call that was timed, in turns with the others


class Timings:
    """The timings of a graph: stored ones, and those that are measured now, and stored at once.

    All that are measured take ``config.time_limit`` together, or as long as they need. Disturbed ones are measured
    again on a quiet machine.
    """

    def __init__(self, machine: Machine, database: Database, config: Config, progress: Progress) -> None:
        self.machine = machine
        self.left_s = inf if config.time_limit_s is None else config.time_limit_s
        self._store = EnvironmentStore(database, machine.environment)
        self._quiet = Quiet(machine.watch, progress, at=1.0)

    def of(self, what: str, measure: Callable[[], Seconds | None], *, in_any_case: bool = False) -> Seconds | None:
        """Return the samples of all calls that ``measure`` times; None where it returns None, which is not stored.

        what: says everything that the times depend on, apart from the machine and its software. in_any_case: whether to
        measure after the time limit, too; otherwise None is returned then for what is not known.
        """
        subject, clock, watch = f"{VERSION}, {what}", self.machine.clock, self.machine.watch
        known = self._store.timing(subject)
        if known is not None and not (is_busy(known[1]) and self._quiet.is_now()):
            return known[0]
        if self.left_s <= 0 and not in_any_case:
            return None if known is None else known[0]
        self._quiet.wait()
        for _ in range(2):
            start_s, mark = clock.now(), watch.mark()
            seconds = measure()
            load = watch.since(mark).share
            self.left_s -= clock.now() - start_s
            if seconds is None or not is_busy(load) or self.left_s <= 0 or not self._quiet.wait().is_quiet:
                break
        if seconds is not None:
            self._store.add_timing(subject, seconds, load)
            if is_busy(load):
                say_once(BUSY_TEXT)
        return seconds


def key_of(captured: Captured, index: int) -> str:
    """Return what operators of equal costs have in common, as text."""
    one = captured.operators[index]
    read = [_described(captured.operators[source]) for source in (*one.sources, *one.wholes)]
    own: tuple[object, ...] = ()
    if isinstance(one, Convolution):
        own = one.problem, one.bias is not None, one.activation, one.output_padding
    elif isinstance(one, Barrier):
        own = (one.target, *one.with_each(_in_words))
    settings = [str(getattr(one, name)) for name in one.settings]
    return f"{type(one).__name__} {settings} {_described(one)} of {read} {own}"


def _described(one: Operator) -> str:
    return f"{one.dtype} {one.shape}" if isinstance(one, Barrier) else f"{one.dtype} {one.shape[1:]}"


def _in_words(value: object) -> object:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return "a result" if isinstance(value, Ref) else str(value)


def described(schedule: Schedule) -> str:
    """Return a text that differs for schedules of graphs, plans or algorithms that take other times."""
    algorithms = [
        f"{index} {one.keeps} {named(one.algorithm(segment.cut))}"
        for segment in schedule.plan.segments
        for index, one in enumerate(schedule.operators[segment.start : segment.stop], segment.start)
        if isinstance(one, Convolution)
    ]
    cuts = [(one.start, one.stop, replace(one.cut, variant=0)) for one in schedule.plan.segments]
    return f"{graph_of(schedule.captured)} {cuts} {algorithms} {schedule.arena_bytes}"


def graph_of(captured: Captured) -> str:
    """Return a text that differs for graphs whose calls take other times."""
    operators = [f"{key_of(captured, i)} {one.sources} {one.wholes}" for i, one in enumerate(captured.operators)]
    results = [one.index for one in captured.results if isinstance(one, Ref)]
    return f"{captured.samples} {operators} {results} {captured.direct_results}"


def named(algorithm: Algorithm | None) -> str:
    return "torch's" if algorithm is None else f"{algorithm.name} {algorithm.version}"


def digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()
