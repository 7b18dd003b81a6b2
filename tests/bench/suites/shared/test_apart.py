"""Contestants in processes of their own: what they tell and how long calls take, and each way to fail."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
from support import own_jobs

from mucudnn.bench.suites.shared.apart import OwnProcess
from mucudnn.bench.suites.shared.processes import OwnProcessError
from mucudnn.measuring.turns import Stop, Timer

LONG_S = 120.0


def started(job: Callable[[], Any], ready_s: float = LONG_S, sample_s: float = LONG_S) -> OwnProcess[str]:
    return OwnProcess(job, ready_s=ready_s, sample_s=sample_s)


@pytest.fixture(autouse=True)
def no_process_is_left() -> Any:
    before = multiprocessing.active_children()  # ranks of other tests
    yield
    assert [one for one in multiprocessing.active_children() if one not in before] == []


def test_it_tells_what_it_found_and_times_as_many_calls_as_asked(capfd: pytest.CaptureFixture[str]) -> None:
    with started(own_jobs.talking) as process:
        assert process.found == "ready"
        assert 0 < process.time(process.call, 1000) < 1000 * process.time(process.call, 1000)
        with pytest.raises(TypeError, match="timed by the process"):
            process.call()
    said = capfd.readouterr()
    assert said.out == ""
    assert "what a library says" in said.err


def test_a_failed_preparation_is_reported_with_its_reason() -> None:
    for job, ready_s, words in (
        (own_jobs.refusing, LONG_S, "^no such library$"),
        (own_jobs.raising, LONG_S, "^KeyError: 'an operator"),
        (own_jobs.hanging, 0.1, "getting ready took longer than 100 ms and was killed"),
    ):
        with pytest.raises(OwnProcessError, match=words):
            started(job, ready_s=ready_s)


def test_a_timer_keeps_the_failure_of_a_call() -> None:
    for job, sample_s, words in (
        (own_jobs.raising_in_a_call, LONG_S, "^KeyError: 'an operator"),
        (own_jobs.killed_in_a_call, LONG_S, "^killed by SIGKILL$"),
        (own_jobs.exiting_in_a_call, LONG_S, "^ended with exit status 7$"),
        (own_jobs.hanging_in_a_call, 0.1, "a sample of 1 calls took longer than 100 ms"),
    ):
        with started(job, sample_s=sample_s) as process:
            timer = Timer(process.call, process)
            timer.sample()
            assert timer.stop is Stop.FAILED
            with pytest.raises(OwnProcessError, match=words):
                raise timer.error or AssertionError
            with pytest.raises(OwnProcessError):
                process.time(process.call, 1)  # and it stays failed
