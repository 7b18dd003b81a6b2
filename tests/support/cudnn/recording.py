"""An H200 that need not be here: engines that cuDNN lists for its properties, and what was recorded of cuDNN 9.19.

``PYTHONPATH=.:tests python -m support.cudnn.recording [FILE]`` records it anew.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from support.places import DATA

from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.kernels.cudnn.backend import Engine, EngineConfig, offered_engines
from mucudnn.kernels.cudnn.descriptor import Attribute, Descriptor, DescriptorKind, operation_graph
from mucudnn.kernels.cudnn.library import Library, library

OLDEST_VERSION = 90800
H200 = DATA / "h200.json"


@dataclass(frozen=True)
class DescribedDevice:
    library: Library
    properties: Descriptor

    def engines(self, problem: ConvProblem, n: int) -> list[Engine]:
        return offered_engines(operation_graph(self.library, problem, n), self.properties)


def described_h200(library: Library) -> DescribedDevice:
    properties = Descriptor(library, DescriptorKind.DEVICEPROP)
    properties.set(Attribute.DEVICEPROP_JSON_REPRESENTATION, *H200.read_bytes())
    return DescribedDevice(library, properties.finalize())


RECORDING = DATA / "cudnn_919_h200.json.gz"
Offers = dict[ConvProblem, dict[int, list[Engine]]]
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


@lru_cache(maxsize=1)
def recorded() -> dict[str, Any]:
    return json.loads(gzip.decompress(RECORDING.read_bytes()))


@lru_cache(maxsize=1)
def recorded_offers() -> Offers:
    return {
        _problem(entry["problem"]): {int(n): [_engine(*row) for row in rows] for n, rows in entry["engines"].items()}
        for entry in recorded()["problems"]
    }


def _problem(values: dict[str, Any]) -> ConvProblem:
    pairs = {name: tuple(values[name]) for name in ("stride", "padding", "dilation")}
    kinds = {"operation": Operation(values["operation"]), "memory_format": MemoryFormat(values["memory_format"])}
    return ConvProblem(**{**values, **pairs, **kinds})


def _engine(name: str, numerical: list[int], *rest: Any) -> Engine:
    return Engine(EngineConfig.named(name), frozenset(numerical), rest[-1])


def recorded_problems() -> Iterator[ConvProblem]:
    """Every geometry with every operation, dtype and memory format, and one in the other dtypes."""
    for geometry, operation, dtype, memory_format in product(GEOMETRIES, Operation, DTYPES, MemoryFormat):
        yield replace(geometry, operation=operation, dtype=dtype, memory_format=memory_format)
    for operation, dtype in product(Operation, ("bfloat16", "float64")):
        yield replace(GEOMETRIES[0], operation=operation, dtype=dtype)


def recording(device: DescribedDevice) -> dict[str, Any]:
    """Record of a device's engines: name, numerical notes and workspace in bytes."""
    return {
        "cudnn": device.library.version_text,
        "device": json.loads(H200.read_text()),
        "problems": [
            {
                "problem": asdict(problem),
                "engines": {n: [_recorded(engine) for engine in device.engines(problem, n)] for n in MICRO_BATCH_SIZES},
            }
            for problem in recorded_problems()
        ],
    }


def _recorded(engine: Engine) -> list[object]:
    return [engine.config.name, sorted(engine.numerical_notes), engine.workspace_bytes]


if __name__ == "__main__":
    text = json.dumps(recording(described_h200(library())), separators=(",", ":"))
    Path(*sys.argv[1:2] or [RECORDING]).write_bytes(gzip.compress(text.encode(), mtime=0))
