"""Types of path parameters for commands, checked before a command runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from mucudnn.cli.shared.streams import in_options
from mucudnn.core.errors import MucudnnError, OutputError
from mucudnn.core.files import SIDECARS, beside, require_writable


class InputFile(click.Path):
    """Parameter type of an input file; pipes and devices are rejected, since it may be read more than once.

    ``~`` is the home folder. The file need not exist: the code that reads it reports a missing file.
    """

    def __init__(self, *, folder: bool = False) -> None:
        super().__init__(dir_okay=folder, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not os.fspath(value):
            self.fail("'' is empty; name a file", param, ctx)
        path = Path(os.fsdecode(super().convert(os.path.expanduser(value), param, ctx)))  # noqa: PTH111  # text for click
        if path.exists() and not path.is_file() and not path.is_dir():
            self.fail(f"{path} is not a regular file; name a file that can be read more than once", param, ctx)
        return path


class NamedOrFile(InputFile):
    """Parameter type of a built-in name or a file."""

    def __init__(self, empty: str = "'' is empty; name a file") -> None:
        super().__init__(folder=True)
        self.empty = empty

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not value:
            self.fail(self.empty, param, ctx)
        super().convert(value, param, ctx)
        return value


SOURCE = NamedOrFile(
    "'' is not a source; name a network, a table, a CSV file, package.module:factory or file.py:factory"
)


class OutputFile(click.Path):
    """Parameter type of an output file that is replaced as a whole; ``-`` is standard output.

    suffix: allowed suffix or suffixes. second: word in the name of a second file that is written beside the first.
    """

    def __init__(self, *, suffix: str | tuple[str, ...] = "", second: str = "") -> None:
        super().__init__(allow_dash=True, path_type=Path)
        self.name = "file"
        self.suffixes = (suffix,) if isinstance(suffix, str) else suffix
        self.second = second

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not os.fspath(value):
            self.fail("'' is empty; name a file", param, ctx)
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not str(path).lower().endswith(self.suffixes):
            kinds, ends = " or ".join(one.lstrip(".").upper() for one in self.suffixes), " or ".join(self.suffixes)
            self.fail(f"{str(path)!r} is not a {kinds} file; name one that ends in {ends}", param, ctx)
        return path

    def files(self, path: Path) -> list[Path]:
        """Return all files that are written for this output path."""
        return [path, beside(path, self.second)] if self.second else [path]


class ResultFolder(click.Path):
    """Parameter type of an existing folder with results."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.is_dir():
            what = "is not a folder" if path.exists() else "does not exist"
            self.fail(f"{path} {what}; name a folder that a benchmark wrote with --out", param, ctx)
        return path


class OutputFolder(click.Path):
    """Parameter type of a folder for results, created if it is missing."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)
        self.name = "DIR"


class CommandError(click.ClickException):
    """An error that ends a command with a message and exit status 2."""

    exit_code = 2


class FileCommand(click.Command):
    """A command that checks its output files before it runs, so that no measured result is lost.

    mucudnn's errors are shown as one paragraph, without a traceback, and exit with status 2.
    """

    def invoke(self, ctx: click.Context) -> Any:
        check_outputs(ctx)
        try:
            return super().invoke(ctx)
        except MucudnnError as error:
            raise CommandError(in_options(error)) from error


def check_outputs(ctx: click.Context) -> None:
    """Raise ``BadParameter`` for an output file that cannot be written, or is an input or the database."""
    given = [(param, ctx.params.get(param.name or "")) for param in ctx.command.params]
    taken = {
        f"{os.path.realpath(str(value))}{suffix}": param.get_error_hint(ctx)
        for param, value in given
        if isinstance(value, (str, Path)) and "\0" not in str(value) and not isinstance(param.type, OutputFile)
        for suffix in ("", *SIDECARS)
    }
    for param, value in given:
        if isinstance(param.type, OutputFile) and value is not None:
            for path in param.type.files(value):
                try:
                    require_writable(path)
                except OutputError as error:
                    raise click.BadParameter(str(error), ctx, param) from error
                if other := taken.get(os.path.realpath(path)):
                    raise click.BadParameter(f"{path} is also {other} and would be lost; name another file", ctx, param)
