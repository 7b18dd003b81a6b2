"""Files that commands read and write: a parameter's type says which, and all are checked before the command runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Hashable, Iterator
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import click

from mucudnn.terminal.whole_files import SIDECARS, beside, is_stream, require_writable
from mucudnn.words.errors import OutputError


class FileType(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """A path; the subclasses say what a command does with the file. ``shown`` stands for it in --help."""

    def __init__(self, shown: str = "FILE") -> None:
        self.name = shown

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if fault := _fault(os.fspath(value)):
            self.fail(f"{os.fspath(value)!r} {fault}", param, ctx)
        return Path(value)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return self.name

    def files(self, value: Any) -> Iterator[Path]:
        """Yield all files that a value stands for."""
        yield value


class InputFile(FileType):
    """A file that is read. Refuses what has no end (``/dev/zero``), and pipes, which are read once only."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        if _is_no_file(path):
            self.fail(f"{path} is no file that can be read again; name a file", param, ctx)
        return path

    def files(self, value: Any) -> Iterator[Path]:
        if value.exists():
            yield value


class InputFiles(InputFile):
    """Files that are read, separated by commas: a tuple."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        return tuple(InputFile.convert(self, part.strip(), param, ctx) for part in value.split(","))

    def files(self, value: Any) -> Iterator[Path]:
        for each in value:
            yield from super().files(each)


class NamedOrFile(InputFile):
    """Text that names something built in, or a file."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        super().convert(value, param, ctx)
        return value

    def files(self, value: Any) -> Iterator[Path]:
        yield from super().files(Path(value))


class SourceFile(NamedOrFile):
    """A source of layers, as text: see ``load_source``. ``package.module:factory`` stands for the modules' files, and
    ``file.py:factory`` for the file.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not value:
            self.fail(
                "'' is no source; name a network, a table, a CSV file, package.module:factory or file.py:factory",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)

    def files(self, value: Any) -> Iterator[Path]:
        yield from super().files(value)
        place, colon, _ = value.rpartition(":")
        if colon:
            yield from [Path(place)] if place.endswith(".py") else _module_files(place)


class DatabaseFile(InputFile):
    """An SQLite file, which need not be there yet, and what SQLite puts beside it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(os.path.expanduser(os.fspath(value)), param, ctx)  # noqa: PTH111  # keeps a last slash
        if path.is_dir():
            self.fail(f"{path} is a directory; name a file", param, ctx)
        return path

    def files(self, value: Any) -> Iterator[Path]:
        for path in {value, Path(os.path.realpath(value))}:
            yield from (Path(f"{path}{sidecar}") for sidecar in ("", *SIDECARS))


class OutputFile(FileType):
    """A file that is written as a whole.

    suffix: how its name ends, one way or several. second: word for what is written beside it.
    """

    def __init__(self, shown: str = "FILE", *, suffix: str | tuple[str, ...] = "", second: str = "") -> None:
        super().__init__(shown)
        self.suffixes = (suffix,) if isinstance(suffix, str) else suffix
        self.second = second

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if os.fspath(value) == "-":
            self.fail("'-' is no file; name /dev/stdout to print it", param, ctx)
        path = super().convert(value, param, ctx)
        if not str(path).lower().endswith(self.suffixes):
            kinds, ends = " or ".join(one.lstrip(".").upper() for one in self.suffixes), " or ".join(self.suffixes)
            self.fail(f"{str(path)!r} is not a {kinds} file; name one that ends in {ends}", param, ctx)
        return path

    def files(self, value: Any) -> Iterator[Path]:
        yield value
        if self.second:
            yield beside(value, self.second)


class InputFolder(FileType):
    """A folder of results that is read. or_file: whether it may be a file, too, which a benchmark wrote."""

    def __init__(self, shown: str = "DIR", *, or_file: bool = False) -> None:
        super().__init__(shown)
        self.or_file = or_file

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        if self.or_file and path.is_file():
            return path
        if not path.is_dir():
            other = ", or its file of --json" if self.or_file else ""
            self.fail(f"{path} is no folder; name one that a benchmark wrote with --out{other}", param, ctx)
        return path

    def files(self, value: Any) -> Iterator[Path]:
        if value.is_file():
            yield value
        with suppress(OSError):  # a folder that cannot be listed is told of where it is read
            yield from value.iterdir()


class OutputFolder(FileType):
    """A folder of results, which need not be there yet. No other output of the command may be in it."""

    def __init__(self, shown: str = "DIR") -> None:
        super().__init__(shown)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(os.fspath(value).rstrip("/") or os.fspath(value), param, ctx)
        if path.exists() and not path.is_dir():
            self.fail(f"{path} is a file; name a folder", param, ctx)
        return path


class FileCommand(click.Command):
    """A command whose files are checked before it runs: nothing is measured whose result could not be written."""

    def invoke(self, ctx: click.Context) -> Any:
        check_files(ctx)
        return super().invoke(ctx)


def check_files(ctx: click.Context) -> None:
    """Refuse an output that cannot be written, or that is another file of the command.

    Others are inputs, the database and other outputs; files are told apart by what they are, not by their names.
    Raises ``BadParameter``.
    """
    outputs = list(_given(ctx, OutputFile))
    if not outputs:
        return  # what follows has a price
    taken = dict(_kept(ctx))
    folders = [os.path.realpath(folder) for _, folder in _given(ctx, OutputFolder)]
    for param, path in outputs:
        if os.path.realpath(path.parent) in folders:
            raise click.BadParameter(f"{path} is in the folder of the results; name a file elsewhere", ctx, param)
        try:
            require_writable(path)
            identity = None if is_stream(path) else _identity(path)
        except (OutputError, OSError) as error:
            raise click.BadParameter(str(error), ctx, param) from error
        if identity in taken:
            raise click.BadParameter(f"{path} is {taken[identity]}, which would be lost; name another file", ctx, param)
        if identity is not None:
            taken[identity] = f"what {param.get_error_hint(ctx)} writes"


def _given(ctx: click.Context, kind: type[FileType]) -> Iterator[tuple[click.Parameter, Path]]:
    """Yield the parameters of a kind that have a value, each with all of its files."""
    for param in ctx.command.params:
        value = ctx.params.get(param.name or "")
        if isinstance(param.type, kind) and value is not None:
            for each in value if param.nargs == -1 else (value,):
                yield from ((param, path) for path in param.type.files(each))


def _kept(ctx: click.Context) -> Iterator[tuple[Hashable, str]]:
    """Yield the identity of each file that no output may replace, and what it is, in words."""
    from mucudnn.database.database import default_path

    read = (*_given(ctx, InputFile), *_given(ctx, InputFolder))
    yield from ((_identity(path), f"what {param.get_error_hint(ctx)} reads") for param, path in read)
    databases = (*DatabaseFile().files(default_path()), *(path for _, path in _given(ctx, DatabaseFile)))
    yield from ((_identity(path), "the database or part of it") for path in databases)


def _identity(path: Path) -> Hashable:
    """Return what is equal for all names of one file, through links of both kinds, also before there is one."""
    real = Path(os.path.realpath(path))
    for known, rest in ((real, ""), (real.parent, real.name)):
        with suppress(OSError):
            found = known.stat()
            return found.st_dev, found.st_ino, rest
    return real


def _fault(text: str) -> str | None:
    """Return the reason why this can be no path; ``None``: it can be one."""
    if not text:
        return "is empty; name a file"
    if "\0" in text:
        return "has a zero byte, which no name of a file has"
    if text.endswith("/") and not Path(text).is_dir():
        return "ends in /, as a folder does; name a file"
    try:
        os.fsencode(text)
        Path(text).exists()
    except UnicodeEncodeError:
        return "has half a character, which no name of a file has"
    except OSError as error:
        return f"cannot be looked for: {error.strerror}"
    return None


def _is_no_file(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def _module_files(name: str) -> Iterator[Path]:
    """Yield the files that importing a module runs, found without importing it."""
    folders, full = [str(Path.cwd()), *sys.path], ""
    for part in name.split("."):
        full = f"{full}.{part}" if full else part
        spec = PathFinder.find_spec(full, folders)
        if spec is None:
            return
        if spec.origin is not None:
            yield Path(spec.origin)
        folders = spec.submodule_search_locations or []
