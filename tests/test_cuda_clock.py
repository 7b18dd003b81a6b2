"""The clock of CUDA devices, with a device that only writes down what it is asked for."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch

from mucudnn.bench import cuda_clock
from mucudnn.bench.cuda_clock import CudaClock, throttling
from mucudnn.bench.timer import Stop, Timer

CACHE_BYTES = 4096


class Flushed:
    """In the place of the buffer that is written."""

    def __init__(self, log: list[str], size: int) -> None:
        self.log, self.size = log, size

    def fill_(self, value: int) -> None:
        self.log.append(f"flush {self.size}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the device was asked for, in order; every event is 3 ms after the last."""
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
    monkeypatch.setattr(torch, "empty", lambda size, **_: Flushed(log, size))
    monkeypatch.setattr(cuda_clock, "_throttle_reasons", lambda: "0x0000000000000001\n")
    return log


def test_a_sample_is_timed_by_events_behind_a_flushed_cache(log: list[str]) -> None:
    elapsed_s = CudaClock().time(lambda: log.append("call"), 2)
    assert elapsed_s == pytest.approx(0.003)
    flush, *rest = log
    assert int(flush.removeprefix("flush ")) > CACHE_BYTES
    assert rest == ["record", "call", "call", "record", "wait"]


def test_now_waits_for_what_was_started(log: list[str]) -> None:
    clock = CudaClock()
    assert clock.now() <= clock.now()
    assert log == ["wait for all"] * 2


def test_lack_of_memory_ends_a_timer(log: list[str]) -> None:
    def fail() -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    timer = Timer(fail, CudaClock())
    timer.sample()
    assert timer.stop is Stop.FAILED
    assert not timer.samples_s


def test_throttled_clocks_are_told_once_in_a_while(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_clock, "_throttle_reasons", lambda: "0x0000000000000044\n")
    clock = CudaClock()
    with pytest.warns(UserWarning, match=r"throttled \(power cap, hardware thermal slowdown\): what is measured now"):
        clock.time(lambda: None, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clock.time(lambda: None, 1)


@pytest.mark.parametrize("reasons", ["0x0000000000000000", "0x0000000000000003", "[N/A]", "", "Unknown Error"])
def test_nothing_is_said_without_a_reason(reasons: str) -> None:
    assert throttling(reasons) == ""
