"""What all commands do: check their files, show errors, guard the streams, and print and write results."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from mucudnn.cli.shared.parameters import OutputFile
from mucudnn.core.errors import DATABASE_OPTION, InvalidInputError, MucudnnError, OutputError
from mucudnn.core.files import SIDECARS, require_writable, write_csv, write_each, write_json

if TYPE_CHECKING:
    from mucudnn.bench.results.reading import ResultFolder
    from mucudnn.core.tables import Table

# One character each, so that columns stay aligned.
IN_ASCII = {"×": "x", "±": "~", "μ": "u", "µ": "u", "‖": "|", "…": ".", "→": ">", "▲": "^"}


def in_options(message: object) -> str:
    """Replace names of the Python interface in a message by command-line options."""
    return str(message).replace(DATABASE_OPTION, "--database")


def show_warning(message: Warning | str, *where: object, **_: object) -> None:
    """Print the text of a warning without its file and line."""
    click.echo(f"Warning: {in_options(message)}", err=True)


class Guarded(FileIO):
    """The descriptor of a standard stream, which takes all output after a write error, so that the command goes on.

    fault: the first write error, or None.
    """

    fault: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.fault = self.fault or error
            return len(data)


@contextmanager
def guarded_streams() -> Iterator[Guarded]:
    """Guard standard output and error in the block; yield the descriptor of standard output.

    Closed descriptors are opened on ``/dev/null``. Otherwise a file that is opened later, such as the database, would
    get one of them, and libraries would print into it. Characters that the encoding lacks are replaced by similar ones
    in ASCII.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        continue
    os.close(number)
    guards = [Guarded(number, "w", closefd=False) for number in (1, 2)]
    output, errors = (
        TextIOWrapper(BufferedWriter(guard), getattr(stream, "encoding", None), errors="nearest", line_buffering=True)
        for guard, stream in zip(guards, (sys.stdout, sys.stderr), strict=True)
    )
    with redirect_stdout(output), redirect_stderr(errors):
        try:
            yield guards[0]
        finally:
            output.flush()
            errors.flush()


def _nearest(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start]
    written = IN_ASCII.get(lacking) or lacking.encode("ascii", "backslashreplace").decode()
    return written, error.start + 1


codecs.register_error("nearest", _nearest)


class CommandError(click.ClickException):
    """An error that ends a command with a message and exit status 2."""

    exit_code = 2


class FileCommand(click.Command):
    """A command that checks its output files before it runs, so that no measured result is lost.

    Variables such as ``MUCUDNN_WORKSPACE_LIMIT`` set its options. mucudnn's errors are shown as one paragraph, without
    a traceback, and exit with status 2.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.context_settings = {**self.context_settings, "auto_envvar_prefix": "MUCUDNN"}

    def invoke(self, ctx: click.Context) -> Any:
        _check_outputs(ctx)
        try:
            return super().invoke(ctx)
        except MucudnnError as error:
            raise CommandError(in_options(error)) from error


def _check_outputs(ctx: click.Context) -> None:
    """Raise ``BadParameter`` for an output file that cannot be written, or is an input or the database."""
    values = [(param, ctx.params.get(param.name or "")) for param in ctx.command.params]

    # Files that the command reads, or keeps beside its database.
    taken = {
        f"{os.path.realpath(str(value))}{suffix}": param.get_error_hint(ctx)
        for param, value in values
        if isinstance(value, (str, Path)) and "\0" not in str(value) and not isinstance(param.type, OutputFile)
        for suffix in ("", *SIDECARS)
    }

    # Files that it writes.
    outputs = [(param, param.type, value) for param, value in values if isinstance(param.type, OutputFile) and value]
    for param, kind, value in outputs:
        for path in kind.files(value):
            try:
                require_writable(path)
            except OutputError as error:
                raise click.BadParameter(str(error), ctx, param) from error
            if hint := taken.get(os.path.realpath(path)):
                raise click.BadParameter(f"{path} is also {hint} and would be lost; name another file", ctx, param)


@dataclass(frozen=True, slots=True)
class Outputs:
    """The output files requested by ``--csv``, ``--json`` and ``--out``."""

    csv_file: Path | None = None
    json_file: Path | None = None
    out: Path | None = None

    def tell(
        self, *printed: Table | str, rows: Sequence[Mapping[str, Any]] = (), record: Mapping[str, Any] | None = None
    ) -> None:
        """Write results to the requested files, then print them, even if writing fails.

        printed: tables and texts.
        rows: the rows of the CSV file.
        record: the object of the JSON file.
        """
        from mucudnn.core.terminal import output

        try:
            write_each(
                (self.csv_file, partial(write_csv, rows=rows)),
                (self.json_file, partial(write_json, record=record or {})),
            )
        finally:
            console = output()
            for part in filter(None, printed):
                console.print(part, soft_wrap=isinstance(part, str))

    @contextmanager
    def shown(self, tables: Callable[[ResultFolder], Iterable[Table | str]]) -> Iterator[Path]:
        """Yield a result folder for a benchmark to write to; then show its results, even after an exception.

        The folder is given by ``--out``, or temporary.

        tables: makes what is printed of the folder's content.
        """
        from mucudnn.bench.results.reading import HEADER_FILE, read_folder

        with ExitStack() as stack:
            path, is_valid = self.out or Path(stack.enter_context(TemporaryDirectory(prefix="mucudnn-"))), True
            try:
                yield path
            except (InvalidInputError, OutputError):
                is_valid = False
                raise
            finally:
                if is_valid and (path / HEADER_FILE).exists():
                    folder = read_folder(path)
                    nothing = [f"nothing was measured: {reason}" for reason in folder.left_out]
                    self.tell(str(folder.header.environment), *(tables(folder) if folder.lines else nothing))
