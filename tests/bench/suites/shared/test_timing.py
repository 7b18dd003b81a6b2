"""Calls in turns, and torch under its settings: in threads of their own, with nothing left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import sleep
from typing import Any

import torch
from support.clock.machine import FakeClock, TickingClock

from mucudnn.bench.results.variants import TORCH
from mucudnn.bench.suites.shared.timing import Contestant, torch_variants, try_in_turns
from mucudnn.measuring.turns import Rounds, here


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

    cells = try_in_turns([Contestant(lambda: run("a")), Contestant(lambda: run("b"))], Rounds(3, 3, 0.0), clock)
    rounds = [order[:4], order[4:6], order[6:]]
    assert ["".join(sorted(each)) for each in rounds] == ["aabb", "ab", "ab"]  # the first of each does not count
    assert cells == [(1.0, 5.0, 1.0), (2.0, 2.0, 2.0)]


def test_what_the_clock_does_beside_short_calls_counts_as_their_time() -> None:
    class Slow(FakeClock):
        def time(self, function: Callable[[], object], calls: int, calls_per_pass: int = 1) -> float:
            sleep(0.01)  # as emptying caches
            return 1e-6

    (samples,) = try_in_turns([Contestant(lambda: None)], Rounds(2, 50, 0.02), Slow())
    assert not isinstance(samples, Exception)
    assert len(samples) == 2


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
    try_in_turns([Contestant(lambda: clock.advance(1.0), elsewhere)], Rounds(2, 2, 0.0), clock)
    assert read_in == {"elsewhere"}


def test_on_the_cpu_torch_is_as_the_user_has_it() -> None:
    with torch_variants("cpu") as variants:
        assert variants == {TORCH: here}


def test_a_contestant_that_fails_does_not_stop_the_others() -> None:
    def fail() -> None:
        raise RuntimeError("no memory")

    failed, timed = try_in_turns([Contestant(fail), Contestant(lambda: None)], Rounds(2, 2, 0.0), TickingClock())
    assert str(failed) == "no memory"
    assert timed == (1.0, 1.0)
