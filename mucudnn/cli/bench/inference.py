"""``mucudnn bench inference``: the benefit of cached filters, and a comparison with other runtimes."""

from __future__ import annotations

from dataclasses import replace

import click

from mucudnn.bench.contests.variants import Runtime
from mucudnn.cli.shared import options, parameters
from mucudnn.cli.shared.outputs import Outputs, outputs
from mucudnn.terminal.files import SOURCE, FileCommand
from mucudnn.words.config import Config
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import MemoryFormat


def parse_runtimes(text: str) -> tuple[Runtime, ...]:
    """Parse names of runtimes, ``all`` or ``none``. Raises ``InvalidInputError`` for other text.

    >>> [runtime.value for runtime in parse_runtimes("openvino, mucudnn")]
    ['openvino', 'mucudnn']
    """
    if text in ("all", "none"):
        return tuple(Runtime) if text == "all" else ()
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in [*Runtime]:
            raise InvalidInputError(f"{name!r} is not a runtime; allowed are {', '.join(Runtime)}, or all, or none")
    return tuple(map(Runtime, names))


@click.command(cls=FileCommand)
@click.argument("source", type=SOURCE)
@options.batch(1)
@options.input_shape
@options.memory_format
@options.rounds(25, "Samples of each variant.")
@options.config(
    options.setting("cache_budget", "none"),
    options.memory_bounds("none"),
    *("memory_budget", "policy", "algorithms", "max_relative_error", "deterministic", "strict"),
    *("time_limit", "database"),
)
@options.threads
@options.option(
    "runtimes",
    parameters.Text("NAME,...|none", parse_runtimes),
    f"Runtimes to compare on the whole network, each in its own process, interleaved: {', '.join(Runtime)}.",
    ",".join(Runtime),
)
@click.option(
    "--fuse/--no-fuse",
    default=True,
    help="Whether mucudnn fuses batch norm, additions and ReLUs with convolutions in that comparison.",
)
@click.option("--layers/--no-layers", default=True, help="Whether to time every convolution separately.")
@outputs("json", "out")
def inference(
    source: str,
    batch: int,
    input_shape: tuple[int, int, int] | None,
    memory_format: MemoryFormat,
    rounds: int,
    runtimes: tuple[Runtime, ...],
    fuse: bool,
    layers: bool,
    outputs: Outputs,
    config: Config,
) -> None:
    """Time inference of SOURCE: PyTorch, mucudnn, and mucudnn with cached filters, as a whole and layer by layer.

    SOURCE is a network of mucudnn layers, or package.module:factory or file.py:factory, a function that returns your
    own PyTorch model (with --input 3x224x224). Calls of the whole model by PyTorch, torch.compile with frozen
    parameters, ONNX Runtime, OpenVINO, mucudnn, and mucudnn under torch.compile are interleaved: images per second, how
    much the process grows in its first call, and for models that are not compiled the share of each kind of layer in
    the time. With --memory-budget mucudnn runs the whole model in bands of rows. Runtimes that are not installed (pip
    install 'mucudnn[runtimes]') are reported and skipped. Runs on the CPU, since only there filters are cached. Rows
    that the folder of --out already has are not measured again.
    """
    if not (layers or runtimes):
        raise click.UsageError("nothing to measure: leave out --no-layers, or name --runtimes")

    from mucudnn.bench.sources.models import importable, seeded_model, settle_statistics
    from mucudnn.bench.sources.networks import NETWORKS
    from mucudnn.bench.suites.inference.filters import benchmark_filters
    from mucudnn.bench.suites.inference.report import FILTERS, RUNTIMES, InferenceRun, inference_tables
    from mucudnn.bench.suites.inference.runtimes import compare_runtimes
    from mucudnn.words.progress import progress_bar

    model, arguments = seeded_model(source, batch, input_shape=input_shape, memory_format=memory_format)
    if source in NETWORKS:
        settle_statistics(model, arguments)
    fusing = replace(config, fuse=fuse)
    parts = [*([FILTERS] if layers else []), *(f"{RUNTIMES}: {runtime}" for runtime in runtimes)]
    with (
        outputs.shown(inference_tables) as path,
        importable(source),  # child processes inherit the path
        InferenceRun.opened(path, source, arguments[0].shape, memory_format, fusing, rounds, parts) as run,
        progress_bar() as progress,
    ):
        if layers:
            benchmark_filters(run, model.eval(), arguments, config, progress)
        if runtimes:
            compare_runtimes(run, model.eval(), arguments, fusing, runtimes=runtimes, progress=progress)
