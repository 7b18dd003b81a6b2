"""The command ``mucudnn``. Nothing here, nor in the modules of the commands, loads torch before a command runs."""

from __future__ import annotations

import warnings

import click

import mucudnn
from mucudnn.cli.batch import batch
from mucudnn.cli.bench import bench
from mucudnn.cli.database import database
from mucudnn.cli.doctor import doctor
from mucudnn.cli.engines import engines
from mucudnn.cli.explain import explain
from mucudnn.cli.layers import layers
from mucudnn.cli.solve import solve
from mucudnn.cli.tune import tune
from mucudnn.errors import MucudnnError

INTERRUPTED = 130  # 128 + SIGINT, as shells have it


class CommandError(click.ClickException):
    """Shown as one paragraph, without a traceback."""

    exit_code = 2


class CommandGroup(click.Group):
    """Turns mucudnn's own errors into exit status 2, and Ctrl-C into 130 and a word on what is kept."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                return super().invoke(ctx)
        except MucudnnError as error:
            raise CommandError(str(error)) from error
        except KeyboardInterrupt as interruption:
            ready = f": {interruption}" if str(interruption) else ""
            click.echo(
                f"Interrupted{ready}. All measurements are kept; run the same command again to go on from there.",
                err=True,
            )
            raise SystemExit(INTERRUPTED) from None


def _show_warning(message: Warning | str, *where: object, **_: object) -> None:
    """For people: what it says, not where in the code it is said."""
    click.echo(f"Warning: {message}", err=True)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(mucudnn.__version__, prog_name="mucudnn")
def main() -> None:
    """Faster convolutions in the memory there is: measured algorithms and micro-batches."""


for command in (layers, tune, solve, explain, batch, bench, engines, doctor, database):
    main.add_command(command)
