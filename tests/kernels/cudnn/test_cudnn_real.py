"""Against a real libcudnn without a GPU: ``pytest -m cudnn`` where MUCUDNN_LIBCUDNN or a package brings one.

``pip install nvidia-cudnn-cu13==9.19.0.56 nvidia-cublas`` installs the version with which the recording was made;
``PYTHONPATH=.:tests python tests/kernels/cudnn/test_cudnn_real.py [FILE]`` records it anew.
"""

from __future__ import annotations

import gc
import gzip
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.places import DATA

from mucudnn.core.errors import UnavailableError
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.kernels.cudnn import descriptor
from mucudnn.kernels.cudnn.backend import Engine, EngineConfig, configured, offered_engines
from mucudnn.kernels.cudnn.descriptor import (
    Attribute,
    Descriptor,
    DescriptorKind,
    HeuristicMode,
    NumericalNote,
    operation_graph,
)
from mucudnn.kernels.cudnn.library import CudnnError, Library, library

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


pytestmark = pytest.mark.cudnn

PROBLEM = ConvProblem(Operation.FORWARD, 64, 28, 28, 64, 3, 3, padding=(1, 1))
PREFIXES: tuple[tuple[type[IntEnum], str], ...] = (
    (DescriptorKind, "CUDNN_BACKEND_{}_DESCRIPTOR"),
    (descriptor.AttributeType, "CUDNN_TYPE_{}"),
    (Attribute, "CUDNN_ATTR_{}"),
    (NumericalNote, "CUDNN_NUMERICAL_NOTE_{}"),
    (HeuristicMode, "CUDNN_HEUR_MODE_{}"),
)


@pytest.fixture(scope="module")
def cudnn() -> Library:
    try:
        found = library()
    except UnavailableError as error:
        pytest.skip(str(error))
    if found.version < OLDEST_VERSION:
        pytest.skip(f"{found.path} is cuDNN {found.version_text}; 9.8 or later is needed")
    return found


@pytest.fixture
def device(cudnn: Library) -> DescribedDevice:
    return described_h200(cudnn)


@pytest.fixture
def handed_out(cudnn: Library, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number, kept up to date: descriptors that cuDNN has made and that are not yet destroyed."""
    balance = [0]
    call, destroy = Library.call, Library.destroy

    def counted_call(self: Library, name: str, what: str, *arguments: object) -> None:
        call(self, name, what, *arguments)
        balance[0] += name == "cudnnBackendCreateDescriptor"

    def counted_destroy(self: Library, name: str, pointer: object) -> None:
        balance[0] -= name == "cudnnBackendDestroyDescriptor"
        destroy(self, name, pointer)  # type: ignore[arg-type]

    monkeypatch.setattr(Library, "call", counted_call)
    monkeypatch.setattr(Library, "destroy", counted_destroy)
    return balance


def header_numbers(cudnn: Library) -> Iterator[tuple[str, int]]:
    """``NAME = 12`` in the header beside the library."""
    header = Path(cudnn.path).parent.parent / "include" / "cudnn_graph.h"
    if not header.exists():
        pytest.skip(f"no {header} to compare with")
    for name, number in re.findall(
        r"(CUDNN_\w+)(?: \w+)?\s*=\s*(\d+)", header.read_text(encoding="utf-8", errors="replace")
    ):
        yield name, int(number)


def test_constants_are_the_headers(cudnn: Library) -> None:
    numbers = dict(header_numbers(cudnn))
    ours = {form.format(member.name): member.value for kind, form in PREFIXES for member in kind}
    ours |= {f"CUDNN_DATA_{n}": descriptor.DATA_TYPES[t] for t, n in (("float32", "FLOAT"), ("float64", "DOUBLE"))}
    ours |= {f"CUDNN_DATA_{n}": descriptor.DATA_TYPES[t] for t, n in (("float16", "HALF"), ("bfloat16", "BFLOAT16"))}
    ours["CUDNN_CROSS_CORRELATION"] = descriptor.CROSS_CORRELATION
    assert {name: numbers.get(name) for name in ours} == ours


def test_what_is_offered_equals_the_recording(device: DescribedDevice) -> None:
    if device.library.version_text != recorded()["cudnn"]:
        pytest.skip(f"this is cuDNN {device.library.version_text}, the recording of {recorded()['cudnn']}")
    differing = [
        (str(problem), n)
        for problem, by_size in recorded_offers().items()
        for n, offered in by_size.items()
        if device.engines(problem, n) != offered
    ]
    assert not differing


def test_a_plan_needs_the_workspace_that_its_engine_said(device: DescribedDevice) -> None:
    for operation in Operation:
        graph = operation_graph(device.library, PROBLEM.with_operation(operation), 8)
        for engine in offered_engines(graph, device.properties):
            plan = Descriptor(device.library, DescriptorKind.EXECUTION_PLAN)
            plan.set(Attribute.EXECUTION_PLAN_DEVICEPROP, device.properties)
            configuration = configured(graph, engine.config, device.properties)
            plan.set(Attribute.EXECUTION_PLAN_ENGINE_CONFIG, configuration).finalize()
            assert plan.numbers(Attribute.EXECUTION_PLAN_WORKSPACE_SIZE) == (engine.workspace_bytes,)


def test_every_descriptor_is_destroyed(device: DescribedDevice, handed_out: list[int]) -> None:
    device.engines(PROBLEM, 8)
    graph = operation_graph(device.library, PROBLEM, 8)
    with pytest.raises(CudnnError):
        configured(graph, EngineConfig(99999), device.properties)
    del graph
    gc.collect()
    assert handed_out == [0]


def test_errors_have_cudnns_own_words(cudnn: Library) -> None:
    with pytest.raises(CudnnError, match=r"finalize TENSOR: CUDNN_STATUS_BAD_PARAM.*: \S") as caught:
        Descriptor(cudnn, DescriptorKind.TENSOR).finalize()
    assert not caught.value.is_unsupported


if __name__ == "__main__":
    text = json.dumps(recording(described_h200(library())), separators=(",", ":"))
    Path(*sys.argv[1:2] or [RECORDING]).write_bytes(gzip.compress(text.encode(), mtime=0))
