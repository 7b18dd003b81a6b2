"""``mucudnn engines``: which engines cuDNN offers for a layer, and what each needs at every micro-batch size."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mucudnn.bench.report.export import write_csv, write_each, write_json
from mucudnn.cli.shared import options
from mucudnn.cli.shared.selections import layer_of_source, named_layer
from mucudnn.terminal.files import FileCommand, NamedOrFile
from mucudnn.words.config import BatchSizePolicy
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import Operation

if TYPE_CHECKING:
    from mucudnn.kernels.cudnn.device import Device


def _parse_sizes(text: str) -> tuple[int, ...]:
    """``1,8,32`` -> (1, 8, 32), ascending. Raises ``InvalidInputError``."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(options.SIZE, part) for part in parts):
        raise InvalidInputError(f"{text!r} is no list of micro-batch sizes; write for example 1,8,32")
    return tuple(sorted({int(part) for part in parts}))


@click.command(cls=FileCommand)
@options.source
@layer_of_source
@click.option(
    "--operation",
    type=options.choice(Operation),
    default=Operation.FORWARD,
    show_default="forward",
    help="Which of the layer's three.",
)
@click.option(
    "--micro-batches",
    type=options.Text("N,...", _parse_sizes),
    help="Micro-batch sizes, as 1,8,32; default: powers of two up to the batch, and the batch itself.",
)
@options.dtype
@options.memory_format
@click.option(
    "--device-properties",
    metavar="FILE|h200",
    type=NamedOrFile(),
    help="List for a device that need not be here: h200, or a JSON file of its properties; default: the GPU.",
)
@click.option(
    "--all", "every", is_flag=True, help="All engines with many settings of their knobs, not only the offered."
)
@options.csv_file
@options.json_file
def engines(
    source: str,
    layer_name: str | None,
    operation: Operation,
    micro_batches: tuple[int, ...] | None,
    device_properties: str | None,
    every: bool,
    csv_file: Path | None,
    json_file: Path | None,
    **sizes: Any,
) -> None:
    """List cuDNN's engines for one layer of SOURCE, with the workspace that each needs for every micro-batch size.

    They are those that cuDNN's heuristics offer, best first, then its fallbacks. Barred are those that torch's settings
    forbid (torch.backends.cudnn.allow_tf32, deterministic algorithms), with the reason. With --device-properties no GPU
    is needed, only cuDNN 9.8 or later; engines that depend on cuBLASLt are not listed then. SOURCE is as for mucudnn
    tune.
    """
    from mucudnn.bench.analyses.engines import engines_record, engines_rows, engines_table, list_engines
    from mucudnn.bench.sources.layers import load_source
    from mucudnn.solver.policies import micro_batch_sizes
    from mucudnn.terminal.console import output

    if micro_batches is not None and sizes["batch"] is not None:
        raise click.UsageError("give --batch or --micro-batches, not both", click.get_current_context())
    chosen = named_layer(load_source(source, **sizes), layer_name)
    asked = micro_batches or micro_batch_sizes(BatchSizePolicy.POWER_OF_TWO, chosen.batch_size)
    device = _device(device_properties)
    found = list_engines(device, chosen.names, chosen.problem.with_operation(operation), asked, every=every)
    output().print(engines_table(found))
    write_each(
        (csv_file, lambda path: write_csv(path, engines_rows(found))),
        (json_file, lambda path: write_json(path, engines_record(found))),
    )


def _device(properties: str | None) -> Device:
    """Raises ``UnavailableError`` and ``InvalidInputError``, saying what to do instead."""
    from mucudnn.kernels.cudnn.device import current_device, described_device
    from mucudnn.kernels.cudnn.library import library
    from mucudnn.words.errors import UnavailableError

    if properties is not None:
        return described_device(properties)
    library()  # without one, no other device can be asked about either
    try:
        return current_device()
    except UnavailableError as error:
        raise UnavailableError(f"{error}; --device-properties lists the engines of a GPU that is not here") from error
