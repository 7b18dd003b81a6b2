"""``mucudnn bench inference``: calls of a model by PyTorch, mucudnn and other runtimes."""

from __future__ import annotations

import click

from mucudnn.bench.results.variants import Runtime
from mucudnn.cli.shared import options, parameters
from mucudnn.cli.shared.commands import FileCommand, Outputs
from mucudnn.cli.shared.options import outputs
from mucudnn.cli.shared.parameters import SOURCE
from mucudnn.core.config import Config
from mucudnn.core.problem import MemoryFormat


@click.command(cls=FileCommand)
@click.argument("source", type=SOURCE)
@options.batch(1)
@options.input_shape
@options.memory_format
@options.rounds(25, "Samples of each runtime.")
@options.option(
    "runtimes",
    parameters.several(Runtime),
    "Runtimes to compare with PyTorch, each in its own process, interleaved.",
    ",".join(Runtime),
)
@options.config(
    options.setting("fuse", True),
    options.workspace_limit("none"),
    "memory_budget",
    "time_limit",
    "database",
    cache_budget=None,
)
@options.threads
@outputs("out")
def inference(
    source: str,
    batch: int,
    input_shape: tuple[int, ...] | None,
    memory_format: MemoryFormat,
    rounds: int,
    runtimes: tuple[Runtime, ...],
    outputs: Outputs,
    config: Config,
) -> None:
    """Time inference of SOURCE by PyTorch, mucudnn and other runtimes.

    SOURCE is a network of mucudnn layers, or package.module:factory or file.py:factory, a function that returns your
    own PyTorch model (with --input 3x224x224). Calls of the whole model by PyTorch, torch.compile with frozen
    parameters, ONNX Runtime, OpenVINO, mucudnn, and mucudnn under torch.compile are interleaved: images per second, the
    memory of a call, and for models that are not compiled the share of each kind of layer in the time. With
    --memory-budget mucudnn runs the whole model in bands of rows. Runtimes that are not installed (pip install
    onnxruntime openvino onnx onnxscript) are reported and skipped. Runs on the CPU. Rows that the folder of --out
    already has are not measured again.
    """
    from torch.optim.swa_utils import update_bn

    from mucudnn.bench.sources.models import importable, seeded_model
    from mucudnn.bench.sources.networks import NETWORKS
    from mucudnn.bench.suites.inference import compare_runtimes, inference_tables
    from mucudnn.core.terminal import progress_bar

    model, x = seeded_model(source, batch, input_shape=input_shape, memory_format=memory_format)
    if source in NETWORKS:
        # With the initial statistics, mean 0 and variance 1, activations fade from layer to layer, and outputs hardly
        # depend on the convolutions, so that comparing outputs would be pointless.
        update_bn([x], model)
    # Child processes inherit the path.
    with outputs.shown(inference_tables) as folder, importable(source), progress_bar() as progress:
        compare_runtimes(
            model.eval(),
            x,
            config,
            folder,
            name=source,
            memory_format=memory_format,
            rounds=rounds,
            runtimes=runtimes,
            progress=progress,
        )
