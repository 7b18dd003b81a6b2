"""Commands in their group, each the function of its file that has the file's name; how they show warnings."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

import click

from mucudnn.words.errors import DATABASE_OPTION


def add_commands(group: click.Group, package: str, names: Iterable[str]) -> None:
    """Add the commands that live in these files of a package."""
    for name in names:
        group.add_command(getattr(import_module(f"{package}.{name}"), name))


def show_warning(message: Warning | str, *where: object, **_: object) -> None:
    """Print what a warning says, and not where in the code it is said."""
    click.echo(f"Warning: {in_options(message)}", err=True)


def in_options(message: object) -> str:
    """Name the command line's options in a message of the package."""
    return str(message).replace(DATABASE_OPTION, "--database")
