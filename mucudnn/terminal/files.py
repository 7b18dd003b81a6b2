"""Types of path parameters for commands, and atomic replacement of output files, which never overwrites a database."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, TextIO

import click

from mucudnn.terminal.streams import in_options
from mucudnn.words.errors import MucudnnError, OutputError

SIDECARS = ("-wal", "-shm", "-journal")  # of an SQLite file
_SQLITE = b"SQLite format 3\0"
_STANDARD_OUTPUT = ("-", "/dev/stdout")


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


@contextmanager
def whole_text(path: Path) -> Iterator[TextIO]:
    """Open a UTF-8 text stream whose content replaces the file as in ``whole_file``; line ends are kept as written."""
    with whole_file(path) as stream:
        text = TextIOWrapper(stream, encoding="utf-8", errors="backslashreplace", newline="", write_through=True)
        try:
            yield text
        finally:
            text.detach()


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a stream whose content replaces the file at the end of the block; after an exception the file is unchanged.

    A link stays a link: its target is replaced. Mode and owner are kept. Devices, pipes and standard output are written
    to directly.

    Raises ``OutputError`` for files that ``require_writable`` rejects, and if writing fails.
    """
    with _explained(path):
        _require_replaceable(path)
        with _stream(path) if is_stream(path) else _replacing(path) as stream:
            yield stream


def require_writable(path: Path) -> None:
    """Check that a file can be written, without changing it.

    Raises ``OutputError`` if the file cannot be written, or is a database or a part of one.
    """
    with _explained(path):
        _require_replaceable(path)
        if not is_stream(path):
            with _folder_beside(path):
                pass


def is_stream(path: Path) -> bool:
    """Whether the path is a device, a pipe or standard output, so that writing replaces nothing."""
    return str(path) in _STANDARD_OUTPUT or (path.exists() and not path.is_file())


def beside(path: Path, what: str) -> Path:
    """Return the name of a second file beside ``path``. For a stream, return the stream, which takes both contents.

    >>> str(beside(Path("memory.csv"), "curve"))
    'memory-curve.csv'
    """
    return path if is_stream(path) and not path.is_dir() else path.with_name(f"{path.stem}-{what}{path.suffix}")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"{path} cannot be written: {reason}; fix that, or name another file") from error


def _require_replaceable(path: Path) -> None:
    """Raise ``OutputError`` for folders, databases, Python files and files in a missing folder."""
    if is_stream(path) and not path.is_dir():
        return
    target = Path(os.path.realpath(path))
    if path.is_dir():
        raise OutputError(f"{path} is a folder; name a file")
    for folder in (path.parent, target.parent):
        if not folder.is_dir():
            raise OutputError(f"the folder {folder} does not exist; create it, or name another file")
    if target.suffix == ".py":
        raise OutputError(f"{path} is a Python file; name another one")
    if target.exists() and not os.access(target, os.W_OK):
        raise OutputError(f"{path} cannot be written; change its permissions, or name another file")
    if _is_database(target):
        raise OutputError(f"{path} is an SQLite database, which would be lost; name another file")
    for sidecar in SIDECARS:
        database = Path(str(target).removesuffix(sidecar))
        if database != target and _is_database(database):  # a sidecar may have the only copy of rows
            raise OutputError(f"{target} belongs to the database {database}, which would lose rows; name another file")


def _is_database(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return stream.read(len(_SQLITE)) == _SQLITE
    except (FileNotFoundError, PermissionError):  # a file that is writable but not readable is no database
        return False


def _folder_beside(path: Path) -> TemporaryDirectory[str]:
    """Create a temporary folder beside the file, from which a new file can be moved onto it by renaming."""
    parent = Path(os.path.realpath(path)).parent
    return TemporaryDirectory(prefix=".mucudnn-", dir=parent, ignore_cleanup_errors=True)


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    with _folder_beside(path) as folder:
        new = Path(folder) / "new"
        with new.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())  # network file systems report a full disk only here
        if path.exists():
            found = path.stat()
            with suppress(PermissionError):  # only root can change the owner
                os.chown(new, found.st_uid, found.st_gid)
            new.chmod(stat.S_IMODE(found.st_mode))
        new.replace(os.path.realpath(path))


@contextmanager
def _stream(path: Path) -> Iterator[BinaryIO]:
    """Open a pipe, device or standard output directly; it is no error if the reader of a pipe stops early."""
    if str(path) in _STANDARD_OUTPUT:  # opening it again would truncate a file that it is redirected to
        sys.stdout.flush()
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    else:
        with suppress(BrokenPipeError), path.open("wb") as stream:
            yield stream
