"""Ranks of commands: those of torchrun, and those that a command starts and watches over; ``mucudnn tune`` on them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from support.command_line import one_layer, rows
from support.places import TESTS
from support.ranks.launching import torchrun

from mucudnn.cli.shared import options
from mucudnn.cli.shared.ranks import on_every_rank
from mucudnn.core.errors import SharingError


@dataclass(frozen=True)
class Failing:
    """Rank 1 ends in some way while rank 0 waits for it."""

    how: str

    def __call__(self) -> None:
        if dist.get_rank() == 1:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("out of patience\nand a stack trace")
        dist.barrier()


@dataclass(frozen=True)
class Waiting:
    """Tell the number of each process, and wait for what never comes."""

    def __call__(self) -> None:
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, os.getpid())
        if dist.get_rank() == 0:
            sys.stdout.write(f"{json.dumps(told)}\n")
            sys.stdout.flush()
        signal.pause()


pytestmark = pytest.mark.slow

TUNE = ("--batch", "2", "--algorithms", "gemm", "--threads", "1")
LIMIT_S = 120


def test_under_torchrun_one_rank_prints_and_the_database_has_all(tmp_path: Path, database: Path) -> None:
    result = tmp_path / "result.json"
    done = torchrun("-m", "mucudnn", "tune", one_layer(tmp_path), *TUNE, "--json", result, ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("│ only") == 3, "each operation once"
    assert len(json.loads(result.read_text())["problems"]) == 3
    assert {problem for problem, *_ in rows(database)} == {1, 2, 3}


def test_the_gpu_of_a_number_is_the_current_one_while_a_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command itself is told the type alone."""
    current = ["cuda:0"]

    @contextmanager
    def made_current(device: torch.device) -> Iterator[None]:
        current.append(str(device))
        yield
        current.pop()

    @click.command()
    @options.device
    def command(device: str) -> None:
        click.echo(f"{device} is {current[-1]}")

    monkeypatch.setattr("mucudnn.running.devices.device_named", torch.device)
    monkeypatch.setattr("mucudnn.running.devices.made_current", made_current)
    assert CliRunner().invoke(command, ["--device", "cuda:1"]).output == "cuda is cuda:1\n"
    assert CliRunner().invoke(command, ["--device", "cuda"]).output == "cuda is cuda:0\n"


@pytest.mark.parametrize(
    ("how", "message"), [("killed", "rank 1: killed by SIGKILL;"), ("raises", "rank 1: ValueError: out of patience;")]
)
def test_the_rank_that_failed_first_is_named(how: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    """And not the one that only lost it."""
    with pytest.raises(SharingError, match=message):
        on_every_rank(Failing(how), 2, "cpu")
    assert ("raise ValueError" in capfd.readouterr().err) == (how == "raises")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_the_command(how: signal.Signals) -> None:
    """Only the command is told to end, and of a kill it knows nothing."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    with subprocess.Popen(
        [sys.executable, __file__], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as command:
        assert command.stdout is not None
        assert len(json.loads(command.stdout.readline())) == 2
        command.send_signal(how)
        try:
            command.communicate(timeout=LIMIT_S)  # standard output is closed once nobody has it any more
        finally:
            command.kill()
    assert command.returncode in (-how, 1)


if __name__ == "__main__":  # of test_ranks_end_with_the_command
    on_every_rank(Waiting(), 2, "cpu")
