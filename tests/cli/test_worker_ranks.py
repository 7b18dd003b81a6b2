"""Ranks that a command starts and watches over: one that fails is named, and all of them end with the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.places import TESTS
from support.ranks.failing_jobs import Failing, Refusing, Returning

from mucudnn.cli.shared.ranks import cores_of_each, on_every_rank, ranks_here, ranks_of_torchrun
from mucudnn.words.errors import SharingError

LIMIT_S = 120
WAITING = """
from support.ranks.failing_jobs import Waiting
from mucudnn.cli.shared.ranks import on_every_rank

if __name__ == "__main__":
    on_every_rank(Waiting(), 2, "cpu")
"""


@pytest.mark.parametrize(
    ("how", "message"), [("killed", "rank 1: killed by SIGKILL;"), ("raises", "rank 1: ValueError: out of patience;")]
)
def test_the_rank_that_failed_first_is_named(how: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    """And not the one that only lost it."""
    with pytest.raises(SharingError, match=message):
        on_every_rank(Failing(how), 2, "cpu")
    assert ("raise ValueError" in capfd.readouterr().err) == (how == "raises")


def test_what_all_ranks_say_is_said_once() -> None:
    with pytest.raises(SharingError, match=r"^there is no such network$"):
        on_every_rank(Refusing(), 2, "cpu")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_the_command(how: signal.Signals, tmp_path: Path) -> None:
    """Only the command is told to end, and of a kill it knows nothing."""
    path = tmp_path / "waiting.py"
    path.write_text(WAITING)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    with subprocess.Popen(
        [sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as command:
        assert command.stdout is not None
        assert len(json.loads(command.stdout.readline())) == 2
        command.send_signal(how)
        try:
            command.communicate(timeout=LIMIT_S)  # standard output is closed once nobody has it any more
        finally:
            command.kill()
    assert command.returncode in (-how, 1)


def test_after_ctrl_c_ranks_may_return_what_is_ready() -> None:
    assert on_every_rank(Returning(), 2, "cpu", interrupted_s=LIMIT_S) == "what is ready"
    with pytest.raises(KeyboardInterrupt):
        on_every_rank(Returning(), 2, "cpu")


def test_torchrun_says_how_many_ranks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "4"}
    for name in told:
        monkeypatch.delenv(name, raising=False)
    assert (ranks_of_torchrun(), ranks_here(2)) == (None, 2)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert (ranks_of_torchrun(), ranks_here(8)) == (8, 4)


@pytest.mark.parametrize(("processes", "expected"), [(1, 8), (3, 2), (8, 1), (20, 1)])
def test_processes_share_the_cores(processes: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    assert cores_of_each(processes) == expected
