"""Contestants in processes of their own: what they tell and how long calls take, each way to fail, and their end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from time import monotonic
from typing import Any

import psutil
import pytest

from mucudnn.bench.suites.shared.apart import Entrant, Ready, contestant
from mucudnn.bench.suites.shared.processes import Worker, WorkerError
from mucudnn.core.errors import UnavailableError
from mucudnn.measuring.turns import Stop


def answering() -> Ready[str]:
    """Gets ready, and does nothing in a call."""
    return Ready(lambda: None, "ready")


def refusing() -> Ready[str]:
    raise UnavailableError("no such library")


def raising() -> Ready[str]:
    raise KeyError("an operator\nthat nobody knows")


def hanging() -> Ready[str]:
    time.sleep(600)
    return answering()


def raising_in_a_call() -> Ready[str]:
    return Ready(raising, "ready")


def killed_in_a_call() -> Ready[str]:
    return Ready(lambda: os.kill(os.getpid(), signal.SIGKILL), "ready")


def exiting_in_a_call() -> Ready[str]:
    return Ready(lambda: os._exit(7), "ready")


def hanging_in_a_call() -> Ready[str]:
    return Ready(lambda: time.sleep(600), "ready")


def starting_another() -> Ready[int]:
    return Ready(lambda: time.sleep(600), subprocess.Popen(["sleep", "600"]).pid)


def talking() -> Ready[str]:
    print("what a library says")  # noqa: T201
    return answering()


class ClosedUntilTheEnd:
    """A worker's connection, whose other end has read that it is closed, and ended, when ``close`` returns."""

    def __init__(self, worker: Worker) -> None:
        self._connection, self._process = worker.connection, worker._process

    def close(self) -> None:
        self._connection.close()
        self._process.join()


LONG_S = 120.0


@pytest.fixture(autouse=True)
def no_process_is_left() -> Any:
    before = multiprocessing.active_children()  # ranks of other tests
    yield
    assert [one for one in multiprocessing.active_children() if one not in before] == []


def test_it_tells_what_it_found_and_times_as_many_calls_as_asked(capfd: pytest.CaptureFixture[str]) -> None:
    with contestant(talking) as worker:
        entrant = Entrant(worker)
        assert (entrant.result, entrant.failure) == ("ready", None)
        assert 0 < entrant.time(print, 1000) < 1000 * entrant.time(print, 1000)
        entrant.timer.sample()
        assert len(entrant.samples_s) == 1
    said = capfd.readouterr()
    assert said.out == ""
    assert "what a library says" in said.err


@pytest.mark.usefixtures("forked")
def test_a_failed_preparation_is_kept_with_its_reason(capfd: pytest.CaptureFixture[str]) -> None:
    for job, ready_s, reason, is_traced in (
        (refusing, LONG_S, "no such library", False),
        (raising, LONG_S, "KeyError: 'an operator\\nthat nobody knows'", True),
        (hanging, 0.1, "getting ready took longer than 100 ms and was killed", False),
    ):
        with contestant(job) as worker:
            entrant = Entrant(worker, ready_s=ready_s)
            entrant.timer.sample()
            assert (entrant.failure, entrant.result, entrant.samples_s) == (reason, None, [])
        assert ("Traceback" in capfd.readouterr().err) == is_traced


@pytest.mark.usefixtures("forked")
def test_a_failure_of_a_call_is_kept() -> None:
    for job, sample_s, reason in (
        (raising_in_a_call, LONG_S, "KeyError: 'an operator\\nthat nobody knows'"),
        (killed_in_a_call, LONG_S, "killed by SIGKILL"),
        (exiting_in_a_call, LONG_S, "ended with exit status 7"),
        (hanging_in_a_call, 0.1, "a sample of 1 calls took longer than 100 ms and was killed"),
    ):
        with contestant(job) as worker:
            entrant = Entrant(worker, sample_s=sample_s)
            entrant.timer.sample()
            assert (entrant.timer.stop, entrant.failure) == (Stop.FAILED, reason)
            with pytest.raises(WorkerError):
                entrant.time(print, 1)  # and it stays failed


@pytest.mark.usefixtures("forked")
def test_processes_that_it_started_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for way in ("timeout", "end", "ended before it is looked at again"):
        with contestant(starting_another) as worker:
            entrant = Entrant(worker, sample_s=0.1 if way == "timeout" else LONG_S)
            other = psutil.Process(entrant.result)
            if way == "timeout":
                entrant.timer.sample()
                assert "took longer" in str(entrant.failure)
            elif way != "end":
                monkeypatch.setattr(worker, "connection", ClosedUntilTheEnd(worker))
        until_s = monotonic() + LONG_S
        while other.is_running() and other.status() != psutil.STATUS_ZOMBIE:
            assert monotonic() < until_s


def test_one_that_ends_while_it_is_asked_for_its_children_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(pid: int) -> None:
        raise psutil.NoSuchProcess(pid)

    worker = Worker(str)
    monkeypatch.setattr(psutil, "Process", gone)
    worker.end()
