"""``mucudnn bench track``: measure a small fixed set of layers for each version."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from mucudnn.bench.report.export import write_csv
from mucudnn.cli.shared import options, parameters
from mucudnn.terminal.files import FileCommand, OutputFolder
from mucudnn.words.errors import InvalidInputError

_TOLERANCE = 0.05
_TABLE = "history.csv"


def parse_name(text: str) -> str:
    """Return ``text`` if it can be the name of a folder. Raises ``InvalidInputError`` for other text.

    >>> parse_name("0.1.0-fe1cd7d0")
    '0.1.0-fe1cd7d0'
    """
    if re.fullmatch(r"\w[\w.+-]{0,99}", text) is None:
        raise InvalidInputError(f"{text!r} is not a folder name; use letters, digits, points and hyphens")
    return text


def machine_name(device: str, capability: str, threads: int) -> str:
    """Return a folder name for the results of a machine, made of its device, capability and number of threads.

    >>> machine_name("AMD EPYC", "AVX2", 2)
    'amd-epyc-avx2-2-threads'
    """
    return "-".join(re.findall(r"[a-z0-9]+", f"{device} {capability} {threads} threads".lower()))


@click.command(cls=FileCommand)
@click.argument("results", metavar="DIR", type=OutputFolder())
@options.option("machine", parameters.Text("NAME", parse_name), "Folder of this machine; default: from its device.")
@options.option(
    "as",
    parameters.Text("NAME", parse_name),
    "Folder name of this version; default: version and commit.",
    variable="version",
)
@options.flag("history", "Only show the history, without measuring.", "only_history")
@options.rounds(81, "Samples of PyTorch and of mucudnn; more samples detect smaller changes.")
@options.threads
@options.device
def track(
    results: Path,
    machine: str | None,
    version: str | None,
    only_history: bool,
    rounds: int,
    device: str,
) -> None:
    """Measure a fixed set of layers into DIR/MACHINE/VERSION, and show the history of the machine.

    The layers are few and small, one of each kind, and are tuned from scratch, in a few minutes. A version that has a
    folder is not measured again. The history is printed, and written to DIR/MACHINE/history.csv. Needs scipy.
    """
    from mucudnn.bench.analyses import history as tracked
    from mucudnn.bench.analyses.comparison import require_scipy
    from mucudnn.bench.folders.header import SUMMARY_FILE
    from mucudnn.bench.sources.layers import TRACKED, tracked_layers
    from mucudnn.bench.suites.convolutions.benchmark import benchmark_convolutions
    from mucudnn.bench.suites.convolutions.contest import Choices
    from mucudnn.running.environment import current_environment
    from mucudnn.terminal.console import output
    from mucudnn.words.config import Config
    from mucudnn.words.progress import progress_bar

    require_scipy()
    here = current_environment(device)
    folder = results / (machine or machine_name(here.device, here.capability, here.threads))
    out, console = folder / (version or tracked.current_version()), output()
    if (out / SUMMARY_FILE).exists():
        console.print(f"{out} was measured before; --as NAME measures into another folder", soft_wrap=True)
    elif not only_history:
        with TemporaryDirectory() as fresh, progress_bar() as progress:
            config = Config(database=Path(fresh) / "measurements.sqlite")
            benchmark_convolutions(
                *("network", tracked_layers(), config, Choices(rounds=rounds), out), device=device, progress=progress
            )
    history = tracked.read_history(folder, TRACKED, _TOLERANCE)
    console.print(tracked.versions_table(history))
    console.print(tracked.subjects_table(history))
    for text in (tracked.slower_in_words(history), *history.problems):
        if text:
            console.print(text, soft_wrap=True)
    write_csv(folder / _TABLE, tracked.history_rows(history))
