"""Puts commands into their group: a command is the function of its file that has the file's name."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

import click


def add_commands(group: click.Group, package: str, names: Iterable[str]) -> None:
    """Add the commands that live in these files of a package."""
    for name in names:
        group.add_command(getattr(import_module(f"{package}.{name}"), name))
