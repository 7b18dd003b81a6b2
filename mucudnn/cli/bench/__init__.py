"""Holds the commands of ``mucudnn bench``, one file each; what they run lives in the top folder ``bench``.

A new one is a file here, whose function has the file's name, and a line in ``COMMANDS``.
"""

from __future__ import annotations

import click

from mucudnn.cli.shared.commands import add_commands

COMMANDS = (
    "compare",
    "data_parallel",
    "deepbench",
    "errors",
    "inference",
    "limits",
    "memory",
    "metrics",
    "network",
    "numerics",
    "solver",
    "track",
    "training",
)


@click.group()
def bench() -> None:
    """Measure torch against mucudnn, in turns in one run; how long the solvers take; what differs in the numbers."""


add_commands(bench, __name__, COMMANDS)
