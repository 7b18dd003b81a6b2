"""What ``make gpu`` runs, and that one part that fails does not stop the others; with a stand-in for Python."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import click
import pytest
from support.cuda import decoders
from support.places import TESTS

from mucudnn.bench.suites.recipe import SHIPPED
from mucudnn.cli.main import main

PYTHON = """#!/bin/sh
[ "$1" = -c ] && exit $NO_GPU
echo "$@" >> calls
echo "$MUCUDNN_DATABASE"
case "$*" in *resnet18*) exit 3 ;; esac
"""


@pytest.fixture
def out(tmp_path: Path) -> Path:
    path = tmp_path / "python"
    path.write_text(PYTHON.replace("calls", str(tmp_path / "calls")))
    path.chmod(0o755)
    return tmp_path / "out"


def run(out: Path, **variables: str) -> tuple[int, dict[str, str], list[list[str]]]:
    """The exit status, the outcome of each part, and the calls of Python."""
    environment = {**os.environ, "PYTHON": str(out.parent / "python"), "OUT": str(out), "NO_GPU": "0", **variables}
    done = subprocess.run([TESTS / "gpu" / "run.sh"], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == (out / "summary.txt").read_text()
    calls = out.parent / "calls"
    called = [line.split() for line in calls.read_text().splitlines()] if calls.exists() else []
    return done.returncode, dict(line.split(": ", 1) for line in done.stdout.splitlines()), called


def test_a_part_that_fails_does_not_stop_the_others(out: Path) -> None:
    status, outcomes, called = run(out)
    assert status == 1
    assert [name for name, outcome in outcomes.items() if outcome != "passed"] == ["network-resnet18"]
    assert outcomes["network-resnet18"] == "failed with exit status 3"
    assert len(called) == len(outcomes)
    first = [
        "doctor",
        "test_gpu_ranks",
        "test_gpu_within",
        "test_volumes",
        "decoder-limit",
        "decoder-bands",
        "decoder-clip",
        "patches",
    ]
    assert list(outcomes)[: len(first)] == first
    assert (out / "limits.log").read_text() == f"{out / 'measurements.sqlite'}\n"


def test_the_commands_are_ones_that_there_are(out: Path) -> None:
    """Their options, too; every file of tests and every recipe is among them."""
    _, _, called = run(out)
    tested = [Path(arguments[-1]).name for _, module, *arguments in called if module == "pytest"]
    files = {*tested}
    assert tested[0] == "test_gpu_ranks.py", "no GPU has passed it"
    assert files == {path.name for path in (TESTS / "gpu").glob("test_gpu*.py")}
    recipes = {arguments[2] for _, module, *arguments in called if arguments[:2] == ["bench", "recipe"]}
    assert recipes == {*SHIPPED}
    for _, module, *arguments in called:
        if module == "support.cuda.decoders":
            assert decoders.parser().parse_args(arguments).device == "cuda"
        elif module != "pytest":
            assert module == "mucudnn"
            command: click.Command = main
            while isinstance(command, click.Group):
                command = command.get_command(click.Context(command), arguments.pop(0))
            command.make_context(module, arguments)
