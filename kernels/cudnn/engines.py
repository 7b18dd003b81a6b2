"""The engine configurations that cuDNN offers for a convolution, with their notes and workspace."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.torch_settings import TorchSettings
from mucudnn.kernels.cudnn import PREFIX
from mucudnn.kernels.cudnn.constants import (
    Attribute,
    AttributeType,
    DescriptorKind,
    HeuristicMode,
    NumericalNote,
)
from mucudnn.kernels.cudnn.descriptor import Descriptor
from mucudnn.kernels.cudnn.library import CudnnError, Library

_MOST_KNOBS = 64  # per engine; cuDNN 9.19 has 44 types of knobs
_MOST_NOTES = 32  # per engine; cuDNN 9.19 has 10
_TRANSFORMS = frozenset(note for note in NumericalNote if note.name.startswith(("FFT", "WINOGRAD")))
_NAME = re.compile(r"cudnn:(\d+)((?: k\d+=-?\d+)*)")


@dataclass(frozen=True, slots=True, order=True)
class EngineConfig:
    """An engine of cuDNN with its knob settings as (knob type, value), sorted by type.

    Engine and knob numbers have a meaning only within one version of cuDNN and on one device.
    """

    engine: int
    knobs: tuple[tuple[int, int], ...] = ()

    @property
    def name(self) -> str:
        """Name of the engine configuration, such as ``cudnn:67 k2=5 k13=0``, which databases use."""
        return f"{PREFIX}{self.engine}" + "".join(f" k{knob}={value}" for knob, value in self.knobs)

    @classmethod
    def named(cls, name: str) -> Self:
        """Parse the name of an engine configuration. Raises ``InvalidInputError`` if it is malformed."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise InvalidInputError(f"{name!r} is no engine configuration; write for example 'cudnn:67 k2=5 k13=0'")
        knobs = re.findall(r"k(\d+)=(-?\d+)", match[2])
        return cls(int(match[1]), tuple((int(knob), int(value)) for knob, value in knobs))


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine configuration for one problem and micro-batch size, with cuDNN's notes and workspace size."""

    config: EngineConfig
    numerical_notes: frozenset[int]
    workspace_bytes: int

    @property
    def deterministic(self) -> bool:
        return NumericalNote.NONDETERMINISTIC not in self.numerical_notes

    @property
    def local(self) -> bool:
        """Whether no note of cuDNN says that the engine uses a transform, which would spread NaN to further results."""
        return self.numerical_notes.isdisjoint(_TRANSFORMS)

    @property
    def uses_tensor_cores(self) -> bool:
        return NumericalNote.TENSOR_CORE in self.numerical_notes


def why_barred(settings: TorchSettings, engine: Engine, dtype: str) -> str | None:
    """Return why torch's settings, such as for TF32, forbid the engine for problems of this dtype, or None."""
    if not settings.cudnn:
        return "an engine of cuDNN, and torch.backends.cudnn.enabled is off"
    if NumericalNote.DOWN_CONVERT_INPUTS in engine.numerical_notes:
        return "rounds its inputs to a smaller type"
    if dtype == "float32" and engine.uses_tensor_cores:
        if settings.tf32_override == "0":
            return "rounds to TF32, and NVIDIA_TF32_OVERRIDE is 0"
        if not settings.allow_tf32:
            return "rounds to TF32, and torch.backends.cudnn.allow_tf32 is off"
    if settings.deterministic and not engine.deterministic:
        return "not deterministic, and torch must be"
    return None


def offered_engines(library: Library, graph: Descriptor, device: Descriptor | None = None) -> list[Engine]:
    """Return the engines that cuDNN's heuristics propose, best first, then its fallback list, without duplicates.

    device: the descriptor of a device, None for the graph's own. Raises ``CudnnError`` if both lists
    fail, or one fails for lack of memory.
    """
    found: list[Descriptor] = []
    refused: list[CudnnError] = []
    modes = (HeuristicMode.A, HeuristicMode.FALLBACK)
    for mode in modes:
        try:
            found += _proposed(library, graph, device, mode)
        except CudnnError as error:  # One list is enough, as in NVIDIA's frontend.
            if error.is_lack_of_memory:
                raise
            refused.append(error.with_traceback(None))  # The frames of the traceback would keep every descriptor alive.
    if len(refused) == len(modes):
        raise refused[0]
    return _distinct(described(config) for config in found)


def configured(
    library: Library, graph: Descriptor, config: EngineConfig, device: Descriptor | None = None
) -> Descriptor:
    """Return the finalized descriptor of an engine configuration for a graph.

    Raises ``CudnnError`` if the engine configuration does not support the graph.
    """
    configuration = Descriptor(library, DescriptorKind.ENGINECFG)
    configuration.refer(Attribute.ENGINECFG_ENGINE, _engine(library, graph, device, config.engine))
    if config.knobs:
        choices = [
            Descriptor(library, DescriptorKind.KNOB_CHOICE)
            .set(Attribute.KNOB_CHOICE_KNOB_TYPE, AttributeType.KNOB_TYPE, knob)
            .set(Attribute.KNOB_CHOICE_KNOB_VALUE, AttributeType.INT64, value)
            .finalize()
            for knob, value in config.knobs
        ]
        configuration.refer(Attribute.ENGINECFG_KNOB_CHOICES, *choices)
    return configuration.finalize()


def described(configuration: Descriptor) -> Engine:
    """Return the engine, knobs, notes and workspace of a finalized engine configuration as an ``Engine``."""
    (engine,) = configuration.descriptors(Attribute.ENGINECFG_ENGINE, DescriptorKind.ENGINE, 1)
    chosen = configuration.descriptors(Attribute.ENGINECFG_KNOB_CHOICES, DescriptorKind.KNOB_CHOICE, _MOST_KNOBS)
    knobs = (
        (
            choice.number(Attribute.KNOB_CHOICE_KNOB_TYPE, AttributeType.KNOB_TYPE),
            choice.number(Attribute.KNOB_CHOICE_KNOB_VALUE),
        )
        for choice in chosen
    )
    numerical = engine.numbers(Attribute.ENGINE_NUMERICAL_NOTE, AttributeType.NUMERICAL_NOTE, _MOST_NOTES)
    return Engine(
        EngineConfig(engine.number(Attribute.ENGINE_GLOBAL_INDEX), tuple(sorted(knobs))),
        frozenset(numerical),
        configuration.number(Attribute.ENGINECFG_WORKSPACE_SIZE),
    )


def _proposed(
    library: Library, graph: Descriptor, device: Descriptor | None, mode: HeuristicMode
) -> Sequence[Descriptor]:
    heuristic = Descriptor(library, DescriptorKind.ENGINEHEUR)
    heuristic.refer(Attribute.ENGINEHEUR_OPERATION_GRAPH, graph)
    heuristic.set(Attribute.ENGINEHEUR_MODE, AttributeType.HEUR_MODE, mode)
    if device is not None:
        heuristic.refer(Attribute.ENGINEHEUR_DEVICEPROP, device)
    heuristic.finalize()
    count = heuristic.count(Attribute.ENGINEHEUR_RESULTS, AttributeType.BACKEND_DESCRIPTOR)
    return heuristic.descriptors(Attribute.ENGINEHEUR_RESULTS, DescriptorKind.ENGINECFG, count)


def _engine(library: Library, graph: Descriptor, device: Descriptor | None, number: int) -> Descriptor:
    engine = Descriptor(library, DescriptorKind.ENGINE).refer(Attribute.ENGINE_OPERATION_GRAPH, graph)
    engine.set(Attribute.ENGINE_GLOBAL_INDEX, AttributeType.INT64, number)
    if device is not None:
        engine.refer(Attribute.ENGINE_DEVICEPROP, device)
    return engine.finalize()


def _distinct(engines: Iterable[Engine]) -> list[Engine]:
    """Return the engines in the same order, without those whose configuration has occurred before."""
    first: dict[EngineConfig, Engine] = {}
    for engine in engines:
        first.setdefault(engine.config, engine)
    return list(first.values())
