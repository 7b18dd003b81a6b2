"""The clock of CUDA devices, with a device that only writes down what it is asked for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mucudnn.measuring import clocks
from mucudnn.measuring.clocks import CudaClock

CACHE_BYTES = 4096


class Flushed:
    """In the place of the buffer that is written."""

    def __init__(self, log: list[str], size: int) -> None:
        self.log, self.size = log, size

    def fill_(self, value: int) -> None:
        self.log.append(f"flush {self.size}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the device was asked for, in order; of each pair of events the second is 3 ms after the first."""
    log: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("record")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return 3.0

    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: log.append("wait for all"))
    properties = SimpleNamespace(L2_cache_size=CACHE_BYTES, uuid="0-1")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda: properties)
    monkeypatch.setattr("torch.cuda._sleep", lambda cycles: log.append(f"sleep {cycles}"))
    monkeypatch.setattr(torch, "empty", lambda size, **_: Flushed(log, size))
    return log


FLUSH = f"flush {2 * CACHE_BYTES}"


def test_each_pass_is_timed_by_events_behind_a_flushed_cache_and_waited_for_once(log: list[str]) -> None:
    elapsed_s = CudaClock().time(lambda: log.append("call"), 5, calls_per_pass=2)
    assert elapsed_s == pytest.approx(3 * 0.003)
    whole = [FLUSH, "record", "call", "call", "record"]
    assert log == ["sleep 0", *whole, *whole, FLUSH, "record", "call", "record", "wait"]


def test_the_device_waits_until_all_calls_are_launched(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Launching takes a second by this clock, of the first call of all ten, and once more by accident."""
    now_s = 0.0
    monkeypatch.setattr(clocks, "_LONGEST_WAIT_S", 100.0)
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: now_s)
    durations = iter([10.0, *[1.0] * 4, *[5.0] * 5, 1.0])

    def launch() -> None:
        nonlocal now_s
        now_s += next(durations)

    clock = CudaClock()
    for calls in (1, 4, 5, 1):
        clock.time(launch, calls)
    sleeps = [int(entry.removeprefix("sleep ")) / clocks._CYCLES_PER_S for entry in log if "sleep" in entry]
    assert sleeps == [0, 2 * 4 * 10.0, 2 * 5 * 1.0, 2 * 1 * 1.0]


def test_no_first_call_makes_the_device_wait_for_long(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(100))
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: float(next(seconds)))
    clock = CudaClock()

    def call() -> None:
        pass

    for _ in range(2):
        clock.time(call, 1)
    cycles = [int(entry.removeprefix("sleep ")) for entry in log if "sleep" in entry]
    assert cycles[1] == clocks._LONGEST_WAIT_S * clocks._CYCLES_PER_S


def test_now_waits_for_what_was_started(log: list[str]) -> None:
    clock = CudaClock()
    assert clock.now() <= clock.now()
    assert log == ["wait for all"] * 2
