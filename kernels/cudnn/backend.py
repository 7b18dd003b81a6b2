"""The engine configurations that cuDNN offers for a convolution, and the plans that execute them."""

from __future__ import annotations

import ctypes
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple, Self

import torch

from mucudnn.core.errors import CapturingError, InvalidInputError, UnavailableError
from mucudnn.core.problem import ConvProblem
from mucudnn.core.torch_settings import TorchSettings
from mucudnn.kernels.cudnn.descriptor import (
    W_ID,
    X_ID,
    Y_ID,
    Attribute,
    Descriptor,
    DescriptorKind,
    HeuristicMode,
    NumericalNote,
    operation_graph,
)
from mucudnn.kernels.cudnn.library import CudnnError, Library, library

# Engines

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
        return f"cudnn:{self.engine}" + "".join(f" k{knob}={value}" for knob, value in self.knobs)

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


def offered_engines(graph: Descriptor, device: Descriptor | None = None) -> list[Engine]:
    """Return the engines that cuDNN's heuristics propose, best first, then its fallback list, without duplicates.

    device: the descriptor of a device, None for the graph's own. Raises ``CudnnError`` if both lists
    fail, or one fails for lack of memory.
    """
    engines: dict[EngineConfig, Engine] = {}
    refused: list[CudnnError] = []
    modes = (HeuristicMode.A, HeuristicMode.FALLBACK)
    for mode in modes:
        try:
            heuristic = (
                Descriptor(graph.library, DescriptorKind.ENGINEHEUR)
                .set(Attribute.ENGINEHEUR_OPERATION_GRAPH, graph)
                .set(Attribute.ENGINEHEUR_MODE, mode)
                .set(Attribute.ENGINEHEUR_DEVICEPROP, *([] if device is None else [device]))
                .finalize()
            )
            proposed = heuristic.descriptors(Attribute.ENGINEHEUR_RESULTS, DescriptorKind.ENGINECFG)
        except CudnnError as error:  # One list is enough, as in NVIDIA's frontend.
            if error.is_lack_of_memory:
                raise
            refused.append(error.with_traceback(None))  # The frames of the traceback would keep every descriptor alive.
            continue
        for engine in map(described, proposed):
            engines.setdefault(engine.config, engine)
    if len(refused) == len(modes):
        raise refused[0]
    return list(engines.values())


def configured(graph: Descriptor, config: EngineConfig, device: Descriptor | None = None) -> Descriptor:
    """Return the finalized descriptor of an engine configuration for a graph.

    Raises ``CudnnError`` if the engine configuration does not support the graph.
    """
    engine = (
        Descriptor(graph.library, DescriptorKind.ENGINE)
        .set(Attribute.ENGINE_OPERATION_GRAPH, graph)
        .set(Attribute.ENGINE_GLOBAL_INDEX, config.engine)
        .set(Attribute.ENGINE_DEVICEPROP, *([] if device is None else [device]))
        .finalize()
    )
    choices = [
        Descriptor(graph.library, DescriptorKind.KNOB_CHOICE)
        .set(Attribute.KNOB_CHOICE_KNOB_TYPE, knob)
        .set(Attribute.KNOB_CHOICE_KNOB_VALUE, value)
        .finalize()
        for knob, value in config.knobs
    ]
    configuration = Descriptor(graph.library, DescriptorKind.ENGINECFG).set(Attribute.ENGINECFG_ENGINE, engine)
    return configuration.set(Attribute.ENGINECFG_KNOB_CHOICES, *choices).finalize()


def described(configuration: Descriptor) -> Engine:
    """Return the engine, knobs, notes and workspace of a finalized engine configuration as an ``Engine``."""
    (engine,) = configuration.descriptors(Attribute.ENGINECFG_ENGINE, DescriptorKind.ENGINE, 1)
    chosen = configuration.descriptors(Attribute.ENGINECFG_KNOB_CHOICES, DescriptorKind.KNOB_CHOICE, _MOST_KNOBS)
    knob, value = Attribute.KNOB_CHOICE_KNOB_TYPE, Attribute.KNOB_CHOICE_KNOB_VALUE
    knobs = sorted((choice.numbers(knob)[0], choice.numbers(value)[0]) for choice in chosen)
    return Engine(
        EngineConfig(engine.numbers(Attribute.ENGINE_GLOBAL_INDEX)[0], tuple(knobs)),
        frozenset(engine.numbers(Attribute.ENGINE_NUMERICAL_NOTE, _MOST_NOTES)),
        configuration.numbers(Attribute.ENGINECFG_WORKSPACE_SIZE)[0],
    )


# Plans

_PACKS_KEPT = 4096  # per device; more than a training step of a large network uses


@dataclass(frozen=True, slots=True)
class Plan:
    """The computation of one cuDNN engine configuration on a micro-batch: ``result = operation + beta * result``."""

    config: EngineConfig
    problem: ConvProblem
    micro_batch_size: int
    beta: float = 0.0
    _hash: int = field(init=False, repr=False, compare=False)  # cached: every step looks up plans

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.config, self.problem, self.micro_batch_size, self.beta)))

    def __hash__(self) -> int:
        return self._hash


class Pointers(NamedTuple):
    """The device addresses of a micro-batch's tensors x, w and y, which are dense in the problem's memory format."""

    x: int
    w: int
    y: int


class _Executable(NamedTuple):
    """A finalized cuDNN plan that is ready to be executed.

    own_bytes: bytes of the plan's workspace if they exceed the size that its engine declared, else 0.
    what: a description for error messages.
    """

    plan: Descriptor
    own_bytes: int
    what: str


class _DeviceState:
    """The cuDNN handle of the current CUDA device with the plans built for it, protected by ``lock``.

    cuDNN allows any thread to use a handle or a plan, but only one thread at a time. The handle is destroyed together
    with this object. Raises ``UnavailableError`` if there is no device.
    """

    def __init__(self, library: Library) -> None:
        self._library, self._pointer = library, ctypes.c_void_p()
        try:
            library.call("cudnnCreate", "make a handle of the current CUDA device", ctypes.byref(self._pointer))
        except CudnnError as error:
            message = f"no CUDA device can be used here: {error}; see nvidia-smi for its driver"
            raise UnavailableError(message) from error
        self.handle = self._pointer.value or 0
        self.lock = threading.RLock()
        self.executables: dict[Plan, _Executable] = {}
        self.stream: int | None = None  # the current stream of the handle, once set
        # Making a variant pack takes six calls of cuDNN. Packs are cached: addresses repeat in every training step.
        self.pack: Callable[[Plan, Pointers, int], Descriptor] = lru_cache(_PACKS_KEPT)(partial(_pack, library))

    def __del__(self) -> None:
        if self._pointer:
            self._library.destroy("cudnnDestroy", self._pointer)


class _ThreadState(threading.local):
    """The device states, by device number, that replace the shared ones while this thread measures algorithms."""

    searching: dict[int, _DeviceState] | None = None


class CudnnBackend:
    """The engine lists and finalized plans of every device, built lazily, cached, and shared by all threads.

    Sharing avoids building plans again in autograd's threads. A search (measuring many engines) has its own handle, so
    that no convolution waits while the search builds plans.

    No descriptor is kept for an engine whose plan is not built: an engine configuration takes 45 KB of cuDNN's memory,
    and there are hundreds for each problem.

    Raises ``UnavailableError`` if there is no cuDNN; the methods raise the same error if there is no device.
    """

    def __init__(self) -> None:
        self._library = library()
        # All keys begin with the device number.
        self._offered: dict[tuple[int, ConvProblem, int], Sequence[Engine]] = {}
        self._engines: dict[tuple[int, Plan], Engine] = {}
        self._own_bytes: dict[tuple[int, Plan], int] = {}
        self._shared: dict[int, _DeviceState] = {}
        self._idle: dict[int, list[_DeviceState]] = defaultdict(list)  # device states of finished searches
        self._making = threading.Lock()
        self._of_thread = _ThreadState()

    @property
    def version(self) -> int:
        """The version number of cuDNN, such as 91900.

        Engine and knob (setting) numbers only have a meaning within one version.
        """
        return self._library.version

    def offered(self, problem: ConvProblem, micro_batch_size: int) -> Sequence[Engine]:
        """Return the engines that cuDNN proposes for micro-batches of this size, best first.

        The list is empty if cuDNN does not support the problem.
        """
        key = torch.cuda.current_device(), problem, micro_batch_size
        if key not in self._offered:
            here = self._here()
            with here.lock:
                try:
                    graph = operation_graph(self._library, problem, micro_batch_size, handle=here.handle)
                    self._offered[key] = offered_engines(graph)
                except CudnnError as error:
                    if not error.is_unsupported:
                        raise
                    self._offered[key] = []
        return self._offered[key]

    def engine(self, plan: Plan) -> Engine:
        """Return the plan's engine, with its exact workspace.

        Raises ``CudnnError`` if the engine does not support the plan's problem and micro-batch size.
        """
        key = torch.cuda.current_device(), plan
        if key not in self._engines:
            # The lists contain engines for beta = 0 only.
            size = torch.cuda.current_device(), plan.problem, plan.micro_batch_size
            listed = self._offered.get(size, ()) if plan.beta == 0 else ()
            engine = next((engine for engine in listed if engine.config == plan.config), None)
            if engine is None:
                here = self._here()
                with here.lock:
                    engine = described(self._configured(here, plan))
            self._engines[key] = engine
        return self._engines[key]

    def own_bytes(self, plan: Plan) -> int:
        """Return the bytes of the plan's workspace if they exceed the size that its engine declares, else 0.

        Builds the plan if necessary. Raises ``CudnnError`` if it cannot be built.
        """
        key = torch.cuda.current_device(), plan
        if key not in self._own_bytes:
            with nullcontext() if self._of_thread.searching else self.building_for_a_while():
                self.build(plan)
        return self._own_bytes[key]

    def build(self, plan: Plan) -> None:
        """Build everything needed to execute the plan. Raises ``CudnnError`` if the plan cannot be built."""
        here = self._here()
        with here.lock:
            self._executable(here, plan)

    @contextmanager
    def building_for_a_while(self) -> Iterator[None]:
        """Give this thread its own cuDNN handle within the context; free the plans built with it on exit.

        A search measures hundreds of plans for a problem, few of which will run later, and engines compiled at run time
        keep code on the device. Shared plans are kept, because they may be part of a CUDA graph. After an error nothing
        is freed, because the device may be in an undefined state.
        """
        number, outer = torch.cuda.current_device(), self._of_thread.searching
        with self._making:
            mine = self._idle[number].pop() if self._idle[number] else self._made()
        self._of_thread.searching = {number: mine}
        try:
            yield
            torch.cuda.synchronize()  # No plan may be freed while it runs.
            mine.executables.clear()
        finally:
            self._of_thread.searching = outer
            self._idle[number].append(mine)

    def execute(self, plan: Plan, pointers: Pointers, workspace: int, stream: int) -> None:
        """Start the plan's convolution on ``stream``, torch's current CUDA stream, without waiting for its end.

        workspace: address of as many bytes as the plan's engine declares; if the plan needs more (``own_bytes``), a
        buffer allocated by torch is used instead. Raises ``CudnnError`` if cuDNN fails, ``CapturingError`` if the plan
        would have to be built while a CUDA graph is captured.
        """
        here = self._here()
        with here.lock:
            executable, own_bytes, action = here.executables.get(plan) or self._executable(here, plan)
            if own_bytes:
                buffer = torch.empty(own_bytes, dtype=torch.uint8, device="cuda")  # freed in stream order
                workspace = buffer.data_ptr()
            if here.stream != stream:
                self._library.call("cudnnSetStream", "set the stream", here.handle, stream)
                here.stream = stream
            pack = here.pack(plan, pointers, workspace)
            self._library.call("cudnnBackendExecute", action, here.handle, executable.pointer, pack.pointer)

    def _executable(self, here: _DeviceState, plan: Plan) -> _Executable:
        if plan not in here.executables:
            step = f"{plan.config.name} for {plan.micro_batch_size} sample(s)"
            _refuse_while_capturing(f"the plan of {step}")
            built = Descriptor(self._library, DescriptorKind.EXECUTION_PLAN)
            built.set(Attribute.EXECUTION_PLAN_HANDLE, here.handle)
            built.set(Attribute.EXECUTION_PLAN_ENGINE_CONFIG, self._configured(here, plan)).finalize()
            (needed,) = built.numbers(Attribute.EXECUTION_PLAN_WORKSPACE_SIZE)
            own_bytes = needed if needed > self.engine(plan).workspace_bytes else 0
            self._own_bytes[torch.cuda.current_device(), plan] = own_bytes
            here.executables[plan] = _Executable(built, own_bytes, f"execute {step}")
        return here.executables[plan]

    def _configured(self, here: _DeviceState, plan: Plan) -> Descriptor:
        size = plan.problem, plan.micro_batch_size
        graph = operation_graph(self._library, *size, beta=plan.beta, handle=here.handle)
        return configured(graph, plan.config)

    def _here(self) -> _DeviceState:
        """Return the state of the current device: this thread's own during a search, otherwise the shared one."""
        number = torch.cuda.current_device()
        here = (self._of_thread.searching or self._shared).get(number)
        if here is None:
            with self._making:
                here = self._shared[number] = self._shared.get(number) or self._made()
        return here

    def _made(self) -> _DeviceState:
        _refuse_while_capturing("cuDNN's handle")
        return _DeviceState(self._library)


def _refuse_while_capturing(subject: str) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise CapturingError(
            f"{subject} cannot be created while a CUDA graph is captured; run it once before capturing"
        )


def _pack(library: Library, plan: Plan, pointers: Pointers, workspace: int) -> Descriptor:
    return (
        Descriptor(library, DescriptorKind.VARIANT_PACK)
        .set(Attribute.VARIANT_PACK_UNIQUE_IDS, X_ID, W_ID, Y_ID)
        .set(Attribute.VARIANT_PACK_DATA_POINTERS, *pointers)
        .set(Attribute.VARIANT_PACK_WORKSPACE, workspace)
        .finalize()
    )


@lru_cache(maxsize=1)
def cudnn_backend() -> CudnnBackend:
    """Return the ``CudnnBackend`` that all threads of this process share."""
    return CudnnBackend()
