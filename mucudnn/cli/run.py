"""``mucudnn run``: run an unchanged Python program, with its convolutions tuned as they occur."""

from __future__ import annotations

import atexit
import builtins
import importlib.util
import io
import os
import signal
import sys
import zipfile
from dataclasses import dataclass
from html import escape
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import NoReturn
from zipimport import zipimporter

import click

from mucudnn.cli.shared import options
from mucudnn.cli.shared.commands import FileCommand
from mucudnn.cli.shared.parameters import OutputFile
from mucudnn.cli.shared.ranks import of_torchrun
from mucudnn.core.config import Config
from mucudnn.core.errors import InvalidInputError, OutputError
from mucudnn.core.files import whole_text
from mucudnn.core.tables import Column, Table
from mucudnn.enabling.switch import enable_with_torch

_SIGNAL = "SIGUSR2"


@dataclass(eq=False)
class Program(BaseException):
    """A program to run, raised as an exception so that it runs outside the command's guards for streams and errors.

    arguments: the file or module, followed by its arguments.
    report: HTML file to write at the end, or None.
    """

    arguments: tuple[str, ...]
    is_module: bool
    config: Config
    report: Path | None

    def run(self) -> NoReturn:
        """Run the program as ``__main__``, and end this process in the way in which the program ends.

        ``sys.argv``, ``sys.path[0]``, exit status, traceback and signals are those of ``python PROGRAM ARGS``.
        """
        name = self.arguments[0]
        has_modules = not self.is_module and _holds_modules(name)
        enable_with_torch(lambda: self.config)
        if not of_torchrun("RANK"):
            self._tell_at_the_end()
        if not sys.flags.safe_path or has_modules:
            if self.is_module:
                sys.path[0] = str(Path.cwd())
            elif name == "-":
                sys.path[0] = ""
            else:
                sys.path[0] = str(Path(name).absolute() if has_modules else Path(name).resolve().parent)
        main = sys.modules["__main__"] = ModuleType("__main__")
        main.__dict__["__builtins__"] = builtins
        try:
            code = _code_of_module(name, main) if self.is_module else _code_of_script(name, main)
            sys.argv = [str(main.__file__) if self.is_module else name, *self.arguments[1:]]
            exec(code, main.__dict__)
        except SystemExit:
            raise
        except InvalidInputError as error:
            raise SystemExit(f"mucudnn: {error}") from None
        except BaseException as error:
            # The hook for uncaught errors, the program's or Python's, shows only the program's part of the traceback.
            traceback = error.__traceback__
            while traceback is not None and traceback.tb_frame.f_globals is not main.__dict__:
                traceback = traceback.tb_next
            hook = sys.excepthook
            sys.excepthook = lambda kind, value, _: hook(kind, value.with_traceback(traceback), traceback)
            raise
        raise SystemExit

    def _tell_at_the_end(self) -> None:
        """Print the time saved at the exit of the process, and on ``_SIGNAL`` unless the program handles it.

        At the exit, the report is written, too.
        """
        number = getattr(signal, _SIGNAL, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda *_: _tell())
        process = os.getpid()

        def end() -> None:
            if os.getpid() != process:  # a forked one
                return
            _tell()
            if self.report is not None:
                try:
                    self._write_report(self.report)
                except OutputError as error:
                    click.echo(f"mucudnn: {error}", err=True)

        atexit.register(end)

    def _write_report(self, path: Path) -> None:
        """Write a page of the status of all convolutions."""
        from mucudnn.enabling.switch import status

        title, tuned = escape(f"mucudnn run {' '.join(self.arguments)}"), status()
        frame = tuned.to_frame()
        table = Table("", [Column(str(name)) for name in frame], [*frame.astype(str).to_numpy().tolist()])
        body = f"<h1>{title}</h1>\n<pre>{escape(str(tuned))}</pre>\n{table.html()}"
        with whole_text(path) as page:
            page.write(f"<!doctype html><meta charset='utf-8'><title>{title}</title>\n{body}\n")


def _tell() -> None:
    """Print the time saved so far to standard error, in one line; nothing if the program has not imported torch."""
    if "torch" in sys.modules:
        from mucudnn.enabling.switch import status

        click.echo(f"mucudnn: {status().in_one_line()}", err=True)


def _holds_modules(name: str) -> bool:
    """Return whether a program is a folder or a zip file, of which Python runs ``__main__.py``."""
    return Path(name).is_dir() or zipfile.is_zipfile(name)


def _code_of_script(name: str, main: ModuleType) -> CodeType:
    """Return the code of a Python file, folder or zip file, or of standard input (``-``), to run as ``main``.

    Raises ``InvalidInputError`` if it cannot be read, or has no ``__main__.py``.
    """
    if name == "-":
        main.__file__ = "<stdin>"
        return compile(sys.stdin.buffer.read(), "<stdin>", "exec", dont_inherit=True)
    if _holds_modules(name):
        spec = PathFinder.find_spec("__main__", [str(Path(name).absolute())])
        return _code_of_spec(spec, f"__main__.py in {name!r}", main)
    path = str(Path.cwd() / name)
    try:
        with io.open_code(path) as file:
            text = file.read()
    except (OSError, ValueError) as error:  # ValueError: a null byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidInputError(f"{name!r} cannot be read: {reason}; name a Python file, or -m MODULE") from None
    main.__file__ = path
    return compile(text, path, "exec", dont_inherit=True)


def _code_of_module(name: str, main: ModuleType) -> CodeType:
    """Return the code of a module, or of ``__main__`` in a package, to run as ``main``.

    Raises ``InvalidInputError`` if there is no such Python module.
    """
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError:
        spec = None
    return _code_of_spec(spec, f"module {name} that can run; name one as for python -m", main)


def _code_of_spec(spec: ModuleSpec | None, wanted: str, main: ModuleType) -> CodeType:
    code: CodeType | None = None
    if spec is not None and isinstance(spec.loader, (InspectLoader, zipimporter)):
        code = spec.loader.get_code(spec.name)
    if spec is None or code is None:
        raise InvalidInputError(f"there is no {wanted}")
    main.__file__, main.__spec__, main.__loader__, main.__package__ = spec.origin, spec, spec.loader, spec.parent
    return code


@click.command(cls=FileCommand, context_settings={"allow_interspersed_args": False})
@click.argument("arguments", metavar="PROGRAM [ARGS]...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("-m", "is_module", is_flag=True, help="PROGRAM is a module, as for python -m.")
@options.config(options.workspace_limit("64MiB"), *options.MEASURING, "keep_heap")
@click.option("--report", type=OutputFile(".html"), help="Write a page of all convolutions to this file.")
def run(*, arguments: tuple[str, ...], is_module: bool, config: Config, report: Path | None) -> None:
    """Run PROGRAM, a Python file, folder or module, as python does, with every convolution tuned as it occurs.

    Nothing in the program changes: arguments, output, exit status and tracebacks are its own. At the end, and on
    SIGUSR2 (kill -USR2 PID), one line on standard error says what was gained. Options come before PROGRAM; each may
    also be set in the environment, as MUCUDNN_WORKSPACE_LIMIT=8MiB. With several ranks: torchrun --nproc-per-node 2 -m
    mucudnn run PROGRAM.
    """
    raise Program(arguments, is_module, config, report)
