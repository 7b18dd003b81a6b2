"""The commands of ``mucudnn bench``, one file each; the benchmarks themselves are in the top folder ``bench``.

To add a command, add a file whose function has the file's name, and a line in ``COMMANDS``.
"""

from __future__ import annotations

from importlib import import_module

import click

COMMANDS = (
    "budgets",
    "compare",
    "convolutions",
    "data_parallel",
    "inference",
    "lengths",
    "metrics",
    "readme",
    "recipe",
    "training",
)


@click.group()
def bench() -> None:
    """Benchmark mucudnn against PyTorch, interleaved in one run; compare numerical results."""


for name in COMMANDS:
    bench.add_command(getattr(import_module(f"{__name__}.{name}"), name))
