"""``mucudnn bench network``: all convolutions of a network, PyTorch against mucudnn."""

from __future__ import annotations

import click

from mucudnn.cli.shared import options, parameters
from mucudnn.cli.shared.outputs import Outputs, outputs
from mucudnn.terminal.files import FileCommand
from mucudnn.words.config import Config
from mucudnn.words.problem import MemoryFormat


@click.command(cls=FileCommand)
@options.source
@options.dtype
@options.memory_formats
@options.option("rounds", parameters.Count(), "Samples of each variant; default: 15.")
@options.config(options.memory_bounds("none"), *options.MEASURING)
@options.threads
@options.device
@outputs("json", "out")
def network(
    source: str,
    batch: int | None,
    input_shape: tuple[int, int, int] | None,
    dtype: str,
    memory_formats: tuple[MemoryFormat, ...],
    rounds: int | None,
    device: str,
    outputs: Outputs,
    config: Config,
) -> None:
    """Benchmark all convolutions of SOURCE, each counted as often as it occurs.

    PyTorch and mucudnn run on contiguous and on channels_last tensors: tuned first, then measured. On CUDA also PyTorch
    with torch.backends.cudnn.benchmark, which times 10 engines or (limit 0) all of them. Layers that seem slower than
    with PyTorch are measured once more. SOURCE is as for mucudnn tune.
    """
    from mucudnn.bench.sources.layers import load_source
    from mucudnn.bench.suites.convolutions.benchmark import benchmark_convolutions
    from mucudnn.bench.suites.convolutions.contest import ROUNDS, Choices
    from mucudnn.bench.suites.convolutions.report import network_tables
    from mucudnn.words.progress import progress_bar

    table = load_source(source, batch=batch, input_shape=input_shape, dtype=dtype)
    asked = Choices(memory_formats=memory_formats, rounds=rounds or ROUNDS)
    with outputs.shown(network_tables) as folder, progress_bar() as progress:
        benchmark_convolutions("network", table, config, asked, folder, device=device, progress=progress)
