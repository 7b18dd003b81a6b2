"""Builds and executes cuDNN plans on the current CUDA device."""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from mucudnn.core.errors import CapturingError, UnavailableError
from mucudnn.core.problem import ConvProblem
from mucudnn.kernels.cudnn.algorithms import Plan, Pointers
from mucudnn.kernels.cudnn.constants import Attribute, AttributeType, DescriptorKind
from mucudnn.kernels.cudnn.descriptor import W_ID, X_ID, Y_ID, Descriptor, operation_graph
from mucudnn.kernels.cudnn.engines import Engine, configured, described, offered_engines
from mucudnn.kernels.cudnn.library import CudnnError, Library, library

_PACKS_KEPT = 4096  # per device; more than a training step of a large network uses


class _Executable(NamedTuple):
    """A finalized cuDNN plan that is ready to be executed.

    own_bytes: bytes of the plan's workspace if they exceed the size that its engine declared, else 0. what: a
    description for error messages.
    """

    plan: Descriptor
    own_bytes: int
    what: str


class _Handle:
    """The cuDNN handle of the current CUDA device, destroyed together with this object.

    Raises ``UnavailableError`` if there is no device.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        self.pointer = ctypes.c_void_p()
        try:
            library.call("cudnnCreate", "make a handle of the current CUDA device", ctypes.byref(self.pointer))
        except CudnnError as error:
            message = f"no CUDA device can be used here: {error}; see nvidia-smi for its driver"
            raise UnavailableError(message) from error

    def __del__(self) -> None:
        if self.pointer:
            self.library.destroy("cudnnDestroy", self.pointer)


class _DeviceState:
    """The cuDNN handle of one device with the plans built for it, protected by ``lock``.

    cuDNN allows any thread to use a handle or a plan, but only one thread at a time.
    """

    def __init__(self, library: Library) -> None:
        self._owner = _Handle(library)
        self.handle = self._owner.pointer.value or 0
        self.lock = threading.RLock()
        self.executables: dict[Plan, _Executable] = {}
        self.stream: int | None = None  # the current stream of the handle, once set
        # Making a variant pack takes six calls of cuDNN. Packs are cached: addresses repeat in every training step.
        self.pack: Callable[[Plan, Pointers, int], Descriptor] = lru_cache(_PACKS_KEPT)(partial(_pack, library))


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
                    self._offered[key] = offered_engines(self._library, graph)
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
            engine = self._listed(plan)
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
            executable, own_bytes, what = here.executables.get(plan) or self._executable(here, plan)
            if own_bytes:
                own = torch.empty(own_bytes, dtype=torch.uint8, device="cuda")  # freed in stream order
                workspace = own.data_ptr()
            if here.stream != stream:
                self._library.call("cudnnSetStream", "set the stream", here.handle, stream)
                here.stream = stream
            pack = here.pack(plan, pointers, workspace)
            self._library.call("cudnnBackendExecute", what, here.handle, executable.pointer, pack.pointer)

    def _executable(self, here: _DeviceState, plan: Plan) -> _Executable:
        if plan not in here.executables:
            what = f"{plan.config.name} for {plan.micro_batch_size} sample(s)"
            _refuse_while_capturing(f"the plan of {what}")
            built = Descriptor(self._library, DescriptorKind.EXECUTION_PLAN)
            built.set(Attribute.EXECUTION_PLAN_HANDLE, AttributeType.HANDLE, here.handle)
            built.refer(Attribute.EXECUTION_PLAN_ENGINE_CONFIG, self._configured(here, plan)).finalize()
            needed = built.number(Attribute.EXECUTION_PLAN_WORKSPACE_SIZE)
            own_bytes = needed if needed > self.engine(plan).workspace_bytes else 0
            self._own_bytes[torch.cuda.current_device(), plan] = own_bytes
            here.executables[plan] = _Executable(built, own_bytes, f"execute {what}")
        return here.executables[plan]

    def _listed(self, plan: Plan) -> Engine | None:
        """Return the plan's engine from the list that cuDNN offered, None if it is not in the list.

        The lists contain engines for beta = 0 only.
        """
        size = torch.cuda.current_device(), plan.problem, plan.micro_batch_size
        listed = self._offered.get(size, ()) if plan.beta == 0 else ()
        return next((engine for engine in listed if engine.config == plan.config), None)

    def _configured(self, here: _DeviceState, plan: Plan) -> Descriptor:
        size = (plan.problem, plan.micro_batch_size)
        graph = operation_graph(self._library, *size, beta=plan.beta, handle=here.handle)
        return configured(self._library, graph, plan.config)

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


def _refuse_while_capturing(what: str) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise CapturingError(f"{what} cannot be created while a CUDA graph is captured; run it once before capturing")


def _pack(library: Library, plan: Plan, pointers: Pointers, workspace: int) -> Descriptor:
    return (
        Descriptor(library, DescriptorKind.VARIANT_PACK)
        .set(Attribute.VARIANT_PACK_UNIQUE_IDS, AttributeType.INT64, X_ID, W_ID, Y_ID)
        .set(Attribute.VARIANT_PACK_DATA_POINTERS, AttributeType.VOID_PTR, *pointers)
        .set(Attribute.VARIANT_PACK_WORKSPACE, AttributeType.VOID_PTR, workspace)
        .finalize()
    )


@lru_cache(maxsize=1)
def cudnn_backend() -> CudnnBackend:
    """Return the ``CudnnBackend`` that all threads of this process share."""
    return CudnnBackend()
