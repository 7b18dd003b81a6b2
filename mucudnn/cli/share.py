"""``mucudnn share``: divide a batch among different devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mucudnn.cli.shared import options, parameters
from mucudnn.cli.shared.layer_tables import solve_stored
from mucudnn.cli.shared.outputs import Outputs, outputs
from mucudnn.terminal.files import FileCommand, InputFile
from mucudnn.words.config import Config
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.units import parse_seconds


def _profiles(text: str) -> tuple[Path, ...]:
    return tuple(InputFile().convert(part.strip(), None, None) for part in text.split(","))


def _times(text: str) -> tuple[float, ...]:
    times = [parse_seconds(part) for part in text.split(",")]
    if None in times:
        raise InvalidInputError(f"{text!r} contains none; write a time for each profile, such as 3ms,5ms")
    return tuple(time for time in times if time is not None)


@click.command(cls=FileCommand)
@options.source_argument
@options.option("batch", parameters.Count(most=parameters.MOST_SOLVED), "Samples of all devices together.", 1024)
@click.option(
    "--profiles",
    required=True,
    type=parameters.Text("FILE,...", _profiles),
    help="Exports of mucudnn database export on each device, or databases; a file given twice is two devices.",
)
@options.option(
    "rest",
    parameters.Text("TIME,...", _times),
    "Time per sample on each device that is not convolutions, such as 3ms,5ms; default: 0.",
)
@options.input_shape
@options.dtype
@options.memory_format
@options.config(options.workspace_limit("64MiB"), "limits_torch", *options.SOLVING)
@options.environment
@outputs("csv", "json")
def share(
    source: str,
    batch: int,
    profiles: tuple[Path, ...],
    rest: tuple[float, ...] | None,
    environment: str | None,
    outputs: Outputs,
    config: Config,
    **sizes: Any,
) -> None:
    """Divide a batch of SOURCE among different devices such that all of them finish together.

    Times come from exported measurements of each device; nothing is measured. Shows the share of each device, and how
    much faster a step is than with equal shares and than on the fastest device alone. Use the shares with
    mucudnn.distributed.UnevenBatchSampler.
    """
    from mucudnn.bench.scaling.shares import in_words, share_out, share_record, share_rows, shares_table
    from mucudnn.bench.sources.layers import load_source

    if rest is not None and len(rest) != len(profiles):
        raise click.UsageError(f"--rest has {len(rest)} times for {len(profiles)} profiles: give one for each")
    table = load_source(source, batch=batch, **sizes)
    tunings = {path: solve_stored(path, table, config, environment)[0] for path in dict.fromkeys(profiles)}
    result = share_out([(str(path), tunings[path]) for path in profiles], batch, rest or (0.0,) * len(profiles))
    outputs.tell(shares_table(result), in_words(result), rows=share_rows(result), record=share_record(result))
