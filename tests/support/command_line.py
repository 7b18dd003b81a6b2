"""Running the command line from tests: in this process through its real entry point, or in one of its own."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import click
from click.testing import CliRunner, Result

from mucudnn.cli.main import main

HEADING = "name,c,h,w,k,r,s,pad_h,pad_w,stride_h,stride_w\n"
TUNE = ("--batch", "2", "--algorithms", "gemm", "--time-limit", "50ms", "--threads", "1")


def one_layer(folder: Path) -> Path:
    """A table of one small layer."""
    path = folder / "layers.csv"
    path.write_text(HEADING + "only,4,8,8,4,3,3,1,1,1,1\n")
    return path


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def commands(group: click.Command = main, name: str = "mucudnn") -> Iterator[tuple[str, click.Command]]:
    """All commands with their names, as ``mucudnn bench convolutions``."""
    if isinstance(group, click.Group):
        context = click.Context(group)
        for each in group.list_commands(context):
            yield from commands(group.get_command(context, each), f"{name} {each}")
    else:
        yield name, group


def fail(*arguments: object) -> str:
    """The message of a command that must fail with status 2, as one line, without a traceback."""
    result = invoke(*arguments)
    assert result.exit_code == 2, (result.output, result.exception)
    assert "Traceback" not in result.output
    return " ".join(result.stderr.split())


def rows(path: Path) -> list[tuple[object, ...]]:
    """Measurements without their time stamps."""
    with closing(sqlite3.connect(path)) as connection:
        columns = "problem_id, algorithm, version, micro_batch_size, step_s"
        return connection.execute(f"SELECT {columns} FROM measurements ORDER BY measured_at").fetchall()
