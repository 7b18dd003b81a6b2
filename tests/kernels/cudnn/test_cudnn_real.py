"""Against a real libcudnn without a GPU: ``pytest -m cudnn`` where MUCUDNN_LIBCUDNN or a package brings one.

``pip install nvidia-cudnn-cu13==9.19.0.56 nvidia-cublas`` installs the version with which the recording was made.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

import pytest
from support.cudnn.recording import OLDEST_VERSION, DescribedDevice, described_h200, recorded, recorded_offers

from mucudnn.core.errors import UnavailableError
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.kernels.cudnn import descriptor
from mucudnn.kernels.cudnn.backend import EngineConfig, configured, offered_engines
from mucudnn.kernels.cudnn.descriptor import (
    Attribute,
    Descriptor,
    DescriptorKind,
    HeuristicMode,
    NumericalNote,
    operation_graph,
)
from mucudnn.kernels.cudnn.library import CudnnError, Library, library

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
