"""Calls in turns, and torch under its settings: in threads of their own, with nothing left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from time import sleep
from typing import Any

import torch
from support.clock.machine import FakeClock, TickingClock

from mucudnn.bench.results.variants import TORCH
from mucudnn.bench.suites.shared.timing import time_in_turns, torch_variants
from mucudnn.measuring.turns import Rounds, Timer, here


def settings() -> tuple[object, ...]:
    cudnn = torch.backends.cudnn
    return cudnn.benchmark, cudnn.benchmark_limit, cudnn.enabled, cudnn.deterministic, cudnn.allow_tf32


def test_every_round_runs_each_once() -> None:
    clock, order = FakeClock(), ""
    costs = {"a": iter([9.0, 1.0, 5.0, 1.0]), "b": iter([9.0, 2.0, 2.0, 2.0])}

    def run(name: str) -> None:
        nonlocal order
        order += name
        clock.advance(next(costs[name]))

    timers = [Timer(partial(run, name), clock, clock.every_round) for name in costs]
    time_in_turns(timers, Rounds(3, 3, 0.0))
    rounds = [order[:4], order[4:6], order[6:]]
    assert ["".join(sorted(each)) for each in rounds] == ["aabb", "ab", "ab"]  # the first of each does not count
    assert [timer.samples_s for timer in timers] == [[1.0, 5.0, 1.0], [2.0, 2.0, 2.0]]


def test_what_the_clock_does_beside_short_calls_counts_as_their_time() -> None:
    class Slow(FakeClock):
        def time(self, function: Callable[[], object], calls: int, calls_per_pass: int = 1) -> float:
            sleep(0.01)  # as emptying caches
            return 1e-6

    clock = Slow()
    timer = Timer(lambda: None, clock, clock.every_round)
    time_in_turns([timer], Rounds(2, 50, 0.02))
    assert len(timer.samples_s) == 2


def test_the_clock_is_read_where_the_call_is_made() -> None:
    read_in = set()

    class Watched(FakeClock):
        def now(self) -> float:
            read_in.add(threading.current_thread().name)
            return self.seconds

    def elsewhere(function: Callable[[], Any], /) -> Any:
        thread = threading.Thread(target=function, name="elsewhere")
        thread.start()
        thread.join()

    clock = Watched()
    timer = Timer(lambda: clock.advance(1.0), clock, clock.every_round, runner=elsewhere)
    time_in_turns([timer], Rounds(2, 2, 0.0))
    assert read_in == {"elsewhere"}


def test_on_the_cpu_torch_is_as_the_user_has_it() -> None:
    with torch_variants("cpu") as variants:
        assert variants == {TORCH: here}


def test_a_contestant_that_fails_does_not_stop_the_others() -> None:
    def fail() -> None:
        raise RuntimeError("no memory")

    clock = TickingClock()
    failing, timed = (Timer(call, clock, clock.every_round) for call in (fail, lambda: None))
    time_in_turns([failing, timed], Rounds(2, 2, 0.0))
    assert str(failing.error) == "no memory"
    assert timed.samples_s == [1.0, 1.0]
