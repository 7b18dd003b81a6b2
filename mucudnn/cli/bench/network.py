"""``mucudnn bench network``: all convolutions of a network, torch against mucudnn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mucudnn.cli.shared import options
from mucudnn.cli.shared.results import shown
from mucudnn.terminal.files import FileCommand
from mucudnn.words.problem import MemoryFormat


@click.command(cls=FileCommand)
@options.source
@options.dtype
@options.memory_formats
@click.option("--rounds", type=options.Count(), help="Samples of each variant; default: 15.")
@options.choices(workspace_limit="none")
@options.threads
@options.device
@options.json_file
@options.out_folder
def network(
    source: str,
    batch: int | None,
    input_shape: tuple[int, int, int] | None,
    dtype: str,
    memory_formats: tuple[MemoryFormat, ...],
    rounds: int | None,
    threads: int | None,
    device: str,
    json_file: Path | None,
    out: Path | None,
    **choices: Any,
) -> None:
    """All convolutions of SOURCE, each counted as often as it occurs.

    Torch on contiguous and on channels_last tensors, mucudnn on contiguous and on channels_last: tuned first, then
    measured. On CUDA also torch with torch.backends.cudnn.benchmark, which times 10 engines or (limit 0) all of them.
    What seems slower than torch's is measured once more. SOURCE is whatever mucudnn tune takes.
    """
    from mucudnn.bench.sources.layers import load_source
    from mucudnn.bench.suites.convolutions.benchmark import benchmark_convolutions
    from mucudnn.bench.suites.convolutions.choices import ROUNDS, Choices
    from mucudnn.bench.suites.convolutions.report import network_tables
    from mucudnn.terminal.console import progress_bar
    from mucudnn.words.config import Config

    config = Config(**choices)
    options.use_threads(threads)
    table = load_source(source, batch=batch, input_shape=input_shape, dtype=dtype)
    asked = Choices(memory_formats=memory_formats, rounds=rounds or ROUNDS)
    with shown(out, network_tables, json_file) as folder, progress_bar() as progress:
        benchmark_convolutions("network", table, config, asked, folder, device=device, progress=progress)
