"""``mucudnn engines``: list cuDNN's engines for a layer, with the workspace of each at every micro-batch size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from mucudnn.cli.shared import options, parameters
from mucudnn.cli.shared.layer_tables import named_layer
from mucudnn.cli.shared.outputs import Outputs, outputs
from mucudnn.terminal.files import FileCommand, NamedOrFile
from mucudnn.words.config import BatchSizePolicy
from mucudnn.words.problem import Operation

if TYPE_CHECKING:
    from mucudnn.kernels.cudnn.device import Device


@click.command(cls=FileCommand)
@options.source
@options.layer_of_source
@options.option("operation", parameters.choice(Operation), "Operation of the layer.", "forward")
@options.option(
    "micro-batches",
    parameters.COUNTS,
    "Micro-batch sizes, such as 1,8,32; default: powers of two up to the batch, and the batch itself.",
)
@options.dtype
@options.memory_format
@click.option(
    "--device-properties",
    metavar="FILE|h200",
    type=NamedOrFile(),
    help="List for a GPU that may be absent: h200, or a JSON file of its properties; default: this machine's.",
)
@options.flag("all", "List all engines, with many settings of their knobs, not only the offered ones.", "every")
@outputs("csv", "json")
def engines(
    source: str,
    layer_name: str | None,
    operation: Operation,
    micro_batches: tuple[int, ...] | None,
    device_properties: str | None,
    every: bool,
    outputs: Outputs,
    **sizes: Any,
) -> None:
    """List cuDNN's engines for one layer of SOURCE, with the workspace that each needs for every micro-batch size.

    Engines that cuDNN's heuristics offer come first, best first, then its fallbacks. Engines that PyTorch's settings
    forbid (torch.backends.cudnn.allow_tf32, deterministic algorithms) are marked as barred, with the reason. With
    --device-properties no GPU is needed, only cuDNN 9.8 or later, but engines that depend on cuBLASLt are not listed.
    SOURCE is as for mucudnn tune.
    """
    from mucudnn.bench.analyses.engines import engines_record, engines_rows, engines_table, list_engines
    from mucudnn.bench.sources.layers import load_source
    from mucudnn.solver.policies import micro_batch_sizes

    if micro_batches is not None and sizes["batch"] is not None:
        raise click.UsageError("give --batch or --micro-batches, not both", click.get_current_context())
    chosen = named_layer(load_source(source, **sizes), layer_name)
    asked = tuple(sorted({*(micro_batches or ())})) or micro_batch_sizes(
        BatchSizePolicy.POWER_OF_TWO, chosen.batch_size
    )
    device = _device(device_properties)
    found = list_engines(device, chosen.names, chosen.problem.with_operation(operation), asked, every=every)
    outputs.tell(engines_table(found), rows=engines_rows(found), record=engines_record(found))


def _device(properties: str | None) -> Device:
    """Return the GPU whose engines are listed: described by ``properties``, or else the current one.

    Raises ``UnavailableError`` if there is no GPU, and ``InvalidInputError`` for invalid properties.
    """
    from mucudnn.kernels.cudnn.device import current_device, described_device
    from mucudnn.kernels.cudnn.library import library
    from mucudnn.words.errors import UnavailableError

    if properties is not None:
        return described_device(properties)
    library()  # raises if cuDNN is missing
    try:
        return current_device()
    except UnavailableError as error:
        raise UnavailableError(f"{error}; --device-properties lists the engines of a GPU that is not here") from error
