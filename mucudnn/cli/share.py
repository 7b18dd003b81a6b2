"""``mucudnn share``: how many samples of one batch each of several unlike devices takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mucudnn.bench.report.export import write_csv, write_each, write_json
from mucudnn.cli.shared import options
from mucudnn.cli.shared.layer_tables import solve_stored
from mucudnn.terminal.files import FileCommand, InputFile
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.units import parse_seconds


def _profiles(text: str) -> tuple[Path, ...]:
    return tuple(InputFile().convert(part.strip(), None, None) for part in text.split(","))


def _times(text: str) -> tuple[float, ...]:
    times = [parse_seconds(part) for part in text.split(",")]
    if None in times:
        raise InvalidInputError(f"{text!r} has none; write a time for each profile, as 3ms,5ms")
    return tuple(time for time in times if time is not None)


@click.command(cls=FileCommand)
@options.source_argument
@click.option(
    "--batch",
    type=options.Count(most=options.MOST_SOLVED),
    default=1024,
    show_default=True,
    help="Samples of all devices together.",
)
@click.option(
    "--profiles",
    required=True,
    type=options.Text("FILE,...", _profiles),
    help="What mucudnn database export wrote on each device (or its database); one named twice is two devices.",
)
@click.option(
    "--rest",
    type=options.Text("TIME,...", _times),
    help="Seconds of a step on each device that are not convolutions, for one sample, as 3ms,5ms; default: none.",
)
@options.input_shape
@options.dtype
@options.memory_format
@click.option(
    "--workspace-limit",
    type=options.Text("SIZE", options.parse_limit),
    default="64MiB",
    show_default=True,
    help="Most memory that any one operation may take beside its tensors: as 64MiB, or none.",
)
@options.limits_torch
@options.policy
@options.operations
@options.algorithms
@options.max_relative_error
@options.strict
@options.environment
@options.csv_file
@options.json_file
def share(
    source: str,
    batch: int,
    profiles: tuple[Path, ...],
    rest: tuple[float, ...] | None,
    input_shape: tuple[int, int, int] | None,
    dtype: str,
    memory_format: Any,
    environment: str | None,
    csv_file: Path | None,
    json_file: Path | None,
    **choices: Any,
) -> None:
    """Share a batch of SOURCE out to unlike devices, so that all of them finish together.

    The times of every device come from its exported measurements; nothing is measured. Shows the shares, and how much
    faster a step is with them than with equal ones, and than on the fastest device alone. They are the shares of
    mucudnn.distributed.UnevenBatchSampler.
    """
    from mucudnn.bench.scaling.shares import share_out
    from mucudnn.bench.scaling.shares_report import in_words, share_record, share_rows, shares_table
    from mucudnn.bench.sources.layers import load_source
    from mucudnn.terminal.console import output
    from mucudnn.words.config import Config

    if rest is not None and len(rest) != len(profiles):
        raise click.UsageError(f"--rest has {len(rest)} times for {len(profiles)} profiles: give one for each")
    config = Config(**choices)
    table = load_source(source, batch=batch, input_shape=input_shape, dtype=dtype, memory_format=memory_format)
    tunings = {path: solve_stored(path, table, config, environment).tuning for path in dict.fromkeys(profiles)}
    result = share_out([(str(path), tunings[path]) for path in profiles], batch, rest or (0.0,) * len(profiles))
    console = output()
    console.print(shares_table(result))
    console.print(in_words(result))
    write_each(
        (csv_file, lambda path: write_csv(path, share_rows(result))),
        (json_file, lambda path: write_json(path, share_record(result))),
    )
