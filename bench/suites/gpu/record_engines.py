"""``python -m mucudnn.bench.suites.gpu.record_engines FILE``: records cuDNN's engines for machines without a GPU.

Tests read the record.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import click

from mucudnn.bench.report.records import Record
from mucudnn.kernels.cudnn.device import Device, described_device
from mucudnn.kernels.cudnn.engines import Engine
from mucudnn.terminal.command_files import NamedOrFile, OutputFile
from mucudnn.terminal.console import ModuleCommand
from mucudnn.terminal.whole_files import whole_file
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation

_FIRST = Operation.FORWARD
GEOMETRIES = (
    ConvProblem(_FIRST, 128, 56, 56, 256, 3, 3, padding=(1, 1)),  # conv3_1 of VGG
    ConvProblem(_FIRST, 256, 56, 56, 64, 1, 1),
    ConvProblem(_FIRST, 3, 227, 227, 96, 11, 11, stride=(4, 4)),  # odd sizes: samples are aligned to 4 bytes, or 2
    ConvProblem(_FIRST, 64, 27, 27, 192, 5, 5, padding=(2, 2), dilation=(2, 2)),
    ConvProblem(_FIRST, 64, 28, 28, 64, 3, 3, padding=(1, 0), groups=64),  # depthwise
)
DTYPES = ("float32", "float16")
MICRO_BATCH_SIZES = (1, 4, 32)

device_properties_option = click.option(
    "--device-properties",
    type=NamedOrFile("FILE|h200"),
    default="h200",
    show_default=True,
    help="As for mucudnn engines.",
)


def recorded_problems() -> Iterator[ConvProblem]:
    """Every geometry with every operation, dtype and memory format, and one in the other dtypes."""
    for geometry, operation, dtype, memory_format in product(GEOMETRIES, Operation, DTYPES, MemoryFormat):
        yield replace(geometry, operation=operation, dtype=dtype, memory_format=memory_format)
    for operation, dtype in product(Operation, ("bfloat16", "float64")):
        yield replace(GEOMETRIES[0], operation=operation, dtype=dtype)


def recording(device: Device) -> Record:
    """Record of a device's engines: name, numerical notes, behaviour notes and workspace in bytes."""
    return {
        "cudnn": device.library.version_text,
        "device": json.loads(device.properties_json),
        "problems": [
            {
                "problem": asdict(problem),
                "engines": {n: [_recorded(engine) for engine in device.engines(problem, n)] for n in MICRO_BATCH_SIZES},
            }
            for problem in recorded_problems()
        ],
    }


def _recorded(engine: Engine) -> list[object]:
    numerical, behavior = sorted(engine.numerical_notes), sorted(engine.behavior_notes)
    return [engine.config.name, numerical, behavior, engine.workspace_bytes]


@click.command(cls=ModuleCommand)
@click.argument("file", type=OutputFile())
@device_properties_option
def main(file: Path, device_properties: str) -> None:
    """Write what cuDNN offers for some problems on a device that need not be here to FILE (JSON, gzipped)."""
    text = json.dumps(recording(described_device(device_properties)), separators=(",", ":"))
    with whole_file(file) as stream:
        stream.write(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
