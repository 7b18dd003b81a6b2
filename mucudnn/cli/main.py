"""The command ``mucudnn``. Neither this module nor the modules of commands import torch before a command runs."""

from __future__ import annotations

import os
import sys
import warnings
from importlib import import_module
from typing import NoReturn

import click

import mucudnn
from mucudnn.cli.run import Program
from mucudnn.cli.shared.commands import CommandError, guarded_streams, show_warning
from mucudnn.cli.shared.ranks import of_torchrun
from mucudnn.core.config import unknown_variables
from mucudnn.core.errors import first_line
from mucudnn.enabling.switch import not_with_torch

COMMANDS = ("bench", "check", "database", "doctor", "layers", "report", "run", "scale", "tune")
INTERRUPTED = 130  # 128 + SIGINT, as in shells


class CommandGroup(click.Group):
    """A group of commands, each imported on demand, since importing all takes 0.1 s.

    It reports out-of-memory errors with exit status 2, and Ctrl-C with 130, without a traceback.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return getattr(import_module(f"mucudnn.cli.{cmd_name}"), cmd_name) if cmd_name in COMMANDS else None

    def invoke(self, ctx: click.Context) -> object:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = show_warning
                if unknown_variables(os.environ):  # imports all commands only if need be
                    commands = [self.get_command(ctx, name) for name in COMMANDS]
                    for group in (command for command in [*commands] if isinstance(command, click.Group)):
                        commands += group.commands.values()
                    options = {param.name or "" for command in commands if command for param in command.params}
                    for sentence in unknown_variables(os.environ, options):
                        warnings.warn(sentence, stacklevel=1)
                return super().invoke(ctx)
        except click.exceptions.Exit:  # a RuntimeError of --help, not out of memory
            raise
        except (RuntimeError, MemoryError) as error:
            from mucudnn.kernels.memory import is_out_of_memory  # imported here, since it loads torch

            if not is_out_of_memory(error):
                raise
            raise CommandError(
                f"there is not enough memory: {first_line(error)}; give a smaller --batch. All measurements are kept"
            ) from error
        except KeyboardInterrupt as interruption:
            ready = f": {interruption}" if str(interruption) else ""
            click.echo(
                f"Interrupted{ready}. All measurements are kept; run the same command again to go on from there.",
                err=True,
            )
            raise SystemExit(INTERRUPTED) from None


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120, "show_default": True},
)
@click.version_option(mucudnn.__version__, prog_name="mucudnn")
def main() -> None:
    """Faster convolutions in the memory there is: measured algorithms and micro-batches."""


def run() -> NoReturn:
    """Run the command ``mucudnn``, or the program given to ``mucudnn run``, and exit with its status.

    If standard output could not be written, the status is 2, after all files are written; a closed pipe is no error.

    A rank of torchrun exits by ``os._exit``, since a normal exit sometimes aborts: a thread of gloo frees tensors while
    Python shuts down (github.com/pytorch/pytorch/pull/179291).
    """
    not_with_torch()  # commands measure torch's own convolutions
    program, status = None, None
    with guarded_streams() as output:
        try:
            main(prog_name="mucudnn")
        except Program as asked:
            program = asked
        except SystemExit as end:
            status = end.code
            sys.stdout.flush()
            if not status and output.fault is not None and not isinstance(output.fault, BrokenPipeError):
                status, reason = CommandError.exit_code, output.fault.strerror
                kept = "all files and measurements are kept"
                click.echo(f"Error: standard output could not be written: {reason}; {kept}", err=True)
    if program is not None:
        program.run()
    if of_torchrun("RANK") is not None:
        os._exit(status if isinstance(status, int) else int(status is not None))
    raise SystemExit(status)
