"""``mucudnn bench lengths``: calls of a model on inputs of many lengths, by PyTorch, mucudnn and other runtimes."""

from __future__ import annotations

import click

from mucudnn.bench.results.variants import LengthRuntime
from mucudnn.cli.shared import options, parameters
from mucudnn.cli.shared.commands import FileCommand, Outputs
from mucudnn.cli.shared.options import outputs
from mucudnn.cli.shared.parameters import SOURCE
from mucudnn.core.config import Config


@click.command(cls=FileCommand)
@click.argument("source", type=SOURCE, required=False)
@options.batch(1)
@options.input_shape
@options.option("lengths", parameters.count(), "Number of random lengths.", 200)
@options.option("least", parameters.count(), "Least length; default: half of the sample's last size, the greatest.")
@options.option("tuned", parameters.count(), "Lengths that are tuned by themselves, for the bound.", 10)
@options.option(
    "runtimes",
    parameters.several(LengthRuntime),
    "Runtimes to compare with PyTorch, each in its own process, interleaved.",
    ",".join(LengthRuntime),
)
@options.flag("once", "In place of SOURCE: 9504 geometries of transposed convolutions, each called once.")
@options.config(options.workspace_limit("none"), "time_limit")
@options.threads
@outputs("out")
def lengths(
    *,
    source: str | None,
    batch: int,
    input_shape: tuple[int, ...] | None,
    lengths: int,
    least: int | None,
    tuned: int,
    runtimes: tuple[LengthRuntime, ...],
    once: bool,
    outputs: Outputs,
    config: Config,
) -> None:
    """Time inference of SOURCE on inputs of many lengths.

    SOURCE is a network of mucudnn layers, or package.module:factory or file.py:factory, a function that returns your
    own PyTorch model (with --input 1x8000). The last size of its input varies at random, the same for all: PyTorch,
    torch.compile for each length and for all lengths at once, ONNX Runtime and OpenVINO with a dynamic size,
    mucudnn.enable(), which tunes as it goes, from an empty database, and mucudnn with some lengths tuned by themselves.
    The table has the time of all calls, that of a call after the first 20, and the growth of the process. Runtimes that
    are not installed are reported and skipped. Runs on the CPU. Rows that the folder of --out already has are not
    measured again.
    """
    if once == (source is not None):
        raise click.UsageError("give either SOURCE or --once")

    from torch.optim.swa_utils import update_bn

    from mucudnn.bench.sources.models import importable, seeded_model
    from mucudnn.bench.sources.networks import NETWORKS
    from mucudnn.bench.suites.lengths import compare_geometries, compare_lengths, lengths_tables, random_lengths
    from mucudnn.core.terminal import progress_bar

    if source is None:
        with outputs.shown(lengths_tables) as folder, progress_bar() as progress:
            compare_geometries(config, folder, progress=progress)
        return
    model, x = seeded_model(source, batch, input_shape=input_shape)
    if source in NETWORKS:  # with the initial statistics, outputs would hardly depend on the convolutions
        update_bn([x], model)
    # Child processes inherit the path.
    with outputs.shown(lengths_tables) as folder, importable(source), progress_bar() as progress:
        compare_lengths(
            model,
            x,
            random_lengths(lengths, x.shape[-1], least),
            config,
            folder,
            name=source,
            tuned=tuned,
            runtimes=runtimes,
            progress=progress,
        )
