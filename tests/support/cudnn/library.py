"""A libcudnn that computes nothing: it keeps the protocol of descriptors, and remembers what it was asked."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from mucudnn.kernels.cudnn.descriptor import Attribute, AttributeType, DescriptorKind

BAD_PARAM, NOT_SUPPORTED = 2000, 3000
_NAMES = {BAD_PARAM: b"CUDNN_STATUS_BAD_PARAM", NOT_SUPPORTED: b"CUDNN_STATUS_NOT_SUPPORTED"}
_C_TYPES: dict[int, Any] = {
    AttributeType.INT64: ctypes.c_int64,
    AttributeType.FLOAT: ctypes.c_float,
    AttributeType.DOUBLE: ctypes.c_double,
    AttributeType.HANDLE: ctypes.c_void_p,
    AttributeType.VOID_PTR: ctypes.c_void_p,
    AttributeType.BACKEND_DESCRIPTOR: ctypes.c_void_p,
    AttributeType.CHAR: ctypes.c_char,
}
Content = dict[int, list[Any]]


class Function:
    """Callable, and takes ``argtypes`` and ``restype``, as what ctypes gives."""

    def __init__(self, body: Callable[..., object]) -> None:
        self.body = body

    def __call__(self, *arguments: object) -> object:
        return self.body(*arguments)


@dataclass
class FakeEngine:
    """``refused``: settings that are none."""

    number: int
    numerical: list[int] = field(default_factory=list)
    refused: tuple[tuple[tuple[int, int], ...], ...] = ()

    def content(self) -> Content:
        return {Attribute.ENGINE_GLOBAL_INDEX: [self.number], Attribute.ENGINE_NUMERICAL_NOTE: self.numerical}

    def configured(self, knobs: tuple[tuple[int, int], ...]) -> Content:
        choices = [
            {Attribute.KNOB_CHOICE_KNOB_TYPE: [kind], Attribute.KNOB_CHOICE_KNOB_VALUE: [value]}
            for kind, value in knobs
        ]
        return {
            Attribute.ENGINECFG_ENGINE: [self.content()],
            Attribute.ENGINECFG_KNOB_CHOICES: choices,
            Attribute.ENGINECFG_WORKSPACE_SIZE: [workspace_of(self.number, knobs)],
        }


def workspace_of(number: int, knobs: tuple[tuple[int, int], ...]) -> int:
    return 1000 * number + sum(value for _, value in knobs)


@dataclass
class FakeDescriptor:
    kind: int
    content: Content = field(default_factory=dict)
    finalized: bool = False


class FakeCudnn:
    """Give it to ``ctypes.CDLL``'s place. ``proposed``: heuristic mode -> (engine number, knobs), best first."""

    def __init__(
        self,
        engines: tuple[FakeEngine, ...] = (),
        proposed: Mapping[int, list[tuple[int, tuple[tuple[int, int], ...]]]] | None = None,
        version: int = 91900,
    ) -> None:
        self.engines = {engine.number: engine for engine in engines}
        self.proposed = proposed or {}
        self.calls: list[str] = []
        self.made: list[FakeDescriptor] = []
        self.alive: dict[int, FakeDescriptor] = {}
        self.refused: dict[str, tuple[int, bytes]] = {}  # function -> status and text
        self.unsaid_bytes = 0  # that plans need beyond the workspace of their engine configurations
        self.refused_modes: dict[int, int] = {}  # heuristic mode -> status
        self.executing: Callable[[int], object] = lambda handle: None  # called inside each execution
        self.streams: list[tuple[int, int]] = []  # (handle, stream) as they were set
        self.executed: list[tuple[int, Content, Content]] = []  # handle, plan, variant pack
        self._addresses: Iterator[int] = count(0x1000, 16)
        self._text = b""
        for name in ("Create", "Destroy", "SetStream"):
            setattr(self, f"cudnn{name}", self._function(f"cudnn{name}"))
        for name in ("CreateDescriptor", "DestroyDescriptor", "Finalize", "SetAttribute", "GetAttribute", "Execute"):
            setattr(self, f"cudnnBackend{name}", self._function(f"cudnnBackend{name}"))
        self.cudnnGetVersion = Function(lambda: version)
        self.cudnnGetCudartVersion = Function(lambda: 13000)
        self.cudnnGetErrorString = Function(lambda status: _NAMES.get(status, b"CUDNN_STATUS_%d" % status))
        self.cudnnGetLastErrorString = Function(self._last_error)

    def kinds(self) -> list[DescriptorKind]:
        """Of all descriptors that were ever made."""
        return [DescriptorKind(descriptor.kind) for descriptor in self.made]

    def _function(self, name: str) -> Function:
        def call(*arguments: object) -> int:
            self.calls.append(name)
            if name in self.refused:
                status, self._text = self.refused[name]
                return status
            return int(getattr(self, f"_{name}", lambda *_: 0)(*arguments))

        return Function(call)

    def _last_error(self, text: ctypes.Array[ctypes.c_char], size: int) -> None:
        text.value = self._text[: size - 1]

    def _fail(self, text: bytes, status: int = BAD_PARAM) -> int:
        self._text = text
        return status

    def _cudnnCreate(self, handle: Any) -> int:  # noqa: N802
        handle._obj.value = next(self._addresses)
        return 0

    def _cudnnSetStream(self, handle: int, stream: int) -> int:  # noqa: N802
        self.streams.append((handle, stream))
        return 0

    def _cudnnBackendExecute(self, handle: int, plan: Any, pack: Any) -> int:  # noqa: N802
        self.executing(handle)
        descriptors = [self.alive[pointer.value] for pointer in (plan, pack)]
        if not all(descriptor.finalized for descriptor in descriptors):
            return self._fail(b"executes what is not finalized")
        self.executed.append((handle, *(descriptor.content for descriptor in descriptors)))
        return 0

    def _cudnnBackendCreateDescriptor(self, kind: int, pointer: Any) -> int:  # noqa: N802
        pointer._obj.value = next(self._addresses)
        self.alive[pointer._obj.value] = made = FakeDescriptor(kind)
        self.made.append(made)
        return 0

    def _cudnnBackendDestroyDescriptor(self, pointer: ctypes.c_void_p) -> int:  # noqa: N802
        del self.alive[pointer.value or 0]  # KeyError: destroyed twice
        return 0

    def _cudnnBackendSetAttribute(self, pointer: Any, attribute: int, kind: int, n: int, data: Any) -> int:  # noqa: N802
        descriptor = self.alive[pointer.value]
        if descriptor.finalized:
            return self._fail(b"set after finalize")
        values = list((_C_TYPES.get(kind, ctypes.c_int) * n).from_address(data.value))
        if kind == AttributeType.BACKEND_DESCRIPTOR:
            if not all(self.alive[value].finalized for value in values):
                return self._fail(b"refers to what is not finalized")
            values = [self.alive[value].content for value in values]
        descriptor.content[attribute] = values
        return 0

    def _cudnnBackendFinalize(self, pointer: Any) -> int:  # noqa: N802
        descriptor = self.alive[pointer.value]
        content = descriptor.content
        if descriptor.kind == DescriptorKind.ENGINEHEUR:
            (mode,) = content[Attribute.ENGINEHEUR_MODE]
            if mode in self.refused_modes:
                return self._fail(b"no list of mode %d" % mode, self.refused_modes[mode])
            found = [self.engines[number].configured(knobs) for number, knobs in self.proposed.get(mode, [])]
            content[Attribute.ENGINEHEUR_RESULTS] = found
        elif descriptor.kind == DescriptorKind.ENGINE:
            (number,) = content[Attribute.ENGINE_GLOBAL_INDEX]
            if number not in self.engines:
                return self._fail(b"no such engine", NOT_SUPPORTED)
            content.update(self.engines[number].content())
        elif descriptor.kind == DescriptorKind.ENGINECFG:
            (number,) = content[Attribute.ENGINECFG_ENGINE][0][Attribute.ENGINE_GLOBAL_INDEX]
            chosen = content.get(Attribute.ENGINECFG_KNOB_CHOICES, [])
            knobs = tuple(
                (choice[Attribute.KNOB_CHOICE_KNOB_TYPE][0], choice[Attribute.KNOB_CHOICE_KNOB_VALUE][0])
                for choice in chosen
            )
            if knobs in self.engines[number].refused:
                return self._fail(b"", NOT_SUPPORTED)
            content.update(self.engines[number].configured(knobs))
        elif descriptor.kind == DescriptorKind.EXECUTION_PLAN:
            return self._planned(descriptor)
        descriptor.finalized = True
        return 0

    def _planned(self, plan: FakeDescriptor) -> int:
        (configuration,) = plan.content[Attribute.EXECUTION_PLAN_ENGINE_CONFIG]
        (said,) = configuration[Attribute.ENGINECFG_WORKSPACE_SIZE]
        plan.content[Attribute.EXECUTION_PLAN_WORKSPACE_SIZE] = [said + self.unsaid_bytes]
        plan.finalized = True
        return 0

    def _cudnnBackendGetAttribute(  # noqa: N802
        self, pointer: Any, attribute: int, kind: int, most: int, found: Any, data: Any
    ) -> int:
        values = self.alive[pointer.value].content[attribute]
        found._obj.value = len(values)
        if data is None:
            return 0
        array = (_C_TYPES.get(kind, ctypes.c_int) * most).from_address(data.value)
        for index, value in enumerate(values[:most]):
            if kind == AttributeType.BACKEND_DESCRIPTOR:
                target = self.alive[array[index]]
                target.content, target.finalized = dict(value), True
            else:
                array[index] = value
        return 0
