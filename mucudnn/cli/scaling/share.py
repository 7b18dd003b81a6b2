"""``mucudnn share``: divide a batch among different devices."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import click

from mucudnn.cli.shared import options, parameters
from mucudnn.cli.shared.layer_tables import solve_stored
from mucudnn.cli.shared.outputs import Outputs, outputs
from mucudnn.cli.shared.ranks import on_every_rank
from mucudnn.terminal.files import FileCommand, InputFile
from mucudnn.words.config import Config
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.units import parse_seconds

# Parameters that only --measure allows.
_OF_MEASURE = ("loads", "rounds", "deterministic", "thorough", "time_limit", "database")


def _profiles(text: str) -> tuple[Path, ...]:
    return tuple(InputFile().convert(part.strip(), None, None) for part in text.split(","))


def _times(text: str) -> tuple[float, ...]:
    times = [parse_seconds(part) for part in text.split(",")]
    if None in times:
        raise InvalidInputError(f"{text!r} contains none; write a time for each profile, such as 3ms,5ms")
    return tuple(time for time in times if time is not None)


def _loads(text: str) -> tuple[int, ...]:
    if re.fullmatch(r"[0-9]{1,4}(,[0-9]{1,4})*", text) is None:
        raise InvalidInputError(f"{text!r} is not a list of whole numbers; write for example 0,1")
    return tuple(map(int, text.split(",")))


@click.command(cls=FileCommand)
@options.source_argument
@options.option("batch", parameters.Count(most=parameters.MOST_SOLVED), "Samples of all devices together.", 1024)
@click.option(
    "--profiles",
    type=parameters.Text("FILE,...", _profiles),
    help="Exports of mucudnn database export on each device, or databases; a file given twice is two devices.",
)
@options.option(
    "rest",
    parameters.Text("TIME,...", _times),
    "Time per sample on each device that is not convolutions, such as 3ms,5ms; default: 0.",
)
@options.option(
    "measure",
    parameters.COUNTS,
    "In place of --profiles: measure on the cores of this machine, in a rank for each of these numbers of threads.",
    variable="threads",
)
@options.option(
    "load",
    parameters.Text("N,...", _loads),
    "With --measure: number of busy processes on the cores of each rank, such as 0,1; default: 0.",
    variable="loads",
)
@options.rounds(9, "With --measure: samples of each step.")
@options.input_shape
@options.dtype
@options.memory_format
@options.config(options.workspace_limit("64MiB"), "limits_torch", *options.MEASURING)
@options.environment
@outputs("csv", "json")
def share(
    source: str,
    batch: int,
    profiles: tuple[Path, ...] | None,
    threads: tuple[int, ...] | None,
    loads: tuple[int, ...] | None,
    rounds: int,
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

    With --measure, ranks of unlike speed on this machine measure their steps, then run their shares and equal ones.
    """
    if (profiles is None) == (threads is None):
        raise click.UsageError("give either --profiles, or --measure with the threads of each rank")
    if threads is not None:
        options.refuse_given("--measure measures whole steps here: leave one of them out", "rest", "environment")
        _measure(source, batch, threads, loads, rounds, outputs, config, sizes)
        return
    assert profiles is not None
    options.refuse_given("--profiles are solved without measuring: add --measure, or leave out", *_OF_MEASURE)
    from mucudnn.bench.scaling.shares import in_words, share_out, share_record, share_rows, shares_table
    from mucudnn.bench.sources.layers import load_source

    if rest is not None and len(rest) != len(profiles):
        raise click.UsageError(f"--rest has {len(rest)} times for {len(profiles)} profiles: give one for each")
    table = load_source(source, batch=batch, **sizes)
    tunings = {path: solve_stored(path, table, config, environment)[0] for path in dict.fromkeys(profiles)}
    result = share_out([(str(path), tunings[path]) for path in profiles], batch, rest or (0.0,) * len(profiles))
    outputs.tell(shares_table(result), in_words(result), rows=share_rows(result), record=share_record(result))


def _measure(
    source: str,
    batch: int,
    threads: tuple[int, ...],
    loads: tuple[int, ...] | None,
    rounds: int,
    outputs: Outputs,
    config: Config,
    sizes: dict[str, Any],
) -> None:
    from mucudnn.bench.scaling.measured_shares import (
        Place,
        measure_shares,
        measured_in_words,
        measured_share_record,
        measured_share_rows,
        measured_shares_table,
    )

    loads = loads or (0,) * len(threads)
    if len(loads) != len(threads):
        raise click.UsageError(f"--load has {len(loads)} numbers for {len(threads)} ranks: give one for each")
    places = [Place(*pair) for pair in zip(threads, loads, strict=True)]
    result = on_every_rank(partial(measure_shares, source, sizes, places, batch, config, rounds), len(places), "cpu")
    if result is not None:
        outputs.tell(
            measured_shares_table(result),
            measured_in_words(result),
            str(result.environment),
            rows=measured_share_rows(result),
            record=measured_share_record(result),
        )
