"""Executes plans with cuDNN on the current CUDA device. Nothing in this file has been run on a GPU yet."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from mucudnn.kernels.cudnn.algorithms import Plan, Pointers
from mucudnn.kernels.cudnn.constants import Attribute, AttributeType, DescriptorKind
from mucudnn.kernels.cudnn.descriptor import Descriptor
from mucudnn.kernels.cudnn.device import Device, current_device
from mucudnn.kernels.cudnn.engines import Engine, configured, described
from mucudnn.kernels.cudnn.library import CudnnError, Library, library
from mucudnn.kernels.cudnn.operation_graph import W_ID, X_ID, Y_ID, operation_graph
from mucudnn.words.errors import CapturingError
from mucudnn.words.problem import ConvProblem

_NOT_SUPPORTED = 3000  # CUDNN_STATUS_NOT_SUPPORTED
_PACKS_KEPT = 4096  # of a thread and device: more than a training step of a large network executes plans


class _Executable(NamedTuple):
    plan: Descriptor
    what: str  # the plan does, for messages


class _OfDevice:
    """A handle of one device and all that belongs to it, for one thread at a time.

    Neither handles nor plans of cuDNN are for several.
    """

    def __init__(self, library: Library, device: Device) -> None:
        assert device.handle is not None
        self.device, self.handle = device, device.handle.pointer.value or 0
        self.executables: dict[Plan, _Executable] = {}
        self.stream: int | None = None  # of the handle, once it was set
        # A pack is six calls of cuDNN; in a training loop the allocator gives the same addresses in every step
        self.pack: Callable[[Plan, Pointers, int], Descriptor] = lru_cache(_PACKS_KEPT)(partial(_pack, library))


_Pool = dict[int, list[_OfDevice]]  # by device; no thread has them


@dataclass(slots=True)
class _Lent:
    """Handles and plans that one thread has, given back when it ends.

    They are dear, and some programs start threads for every call (``torch.nn.DataParallel``).
    """

    pool: _Pool
    by_device: dict[int, _OfDevice] = field(default_factory=dict)

    def __del__(self) -> None:
        for number, of_device in self.by_device.items():
            self.pool[number].append(of_device)


class _OfThread(threading.local):
    def __init__(self, pool: _Pool) -> None:
        self.lent = _Lent(pool)


class CudnnBackend:
    """Engine lists and finalized plans of every thread and device, built lazily and kept.

    Of engines that are not built only what is known of them is kept: an engine configuration takes 45 KB of cuDNN's
    memory, and there are some hundreds for each problem.

    Raises ``UnavailableError`` where there is no cuDNN; its methods, where there is no device.
    """

    def __init__(self) -> None:
        self._library = library()
        # By device, the same in all its threads
        self._offered: dict[tuple[int, ConvProblem, int], Sequence[Engine]] = {}
        self._engines: dict[tuple[int, Plan], Engine] = {}
        self._pool: _Pool = defaultdict(list)
        self._of_thread = _OfThread(self._pool)

    @property
    def version(self) -> int:
        return self._library.version

    def offered(self, problem: ConvProblem, micro_batch_size: int) -> Sequence[Engine]:
        key = torch.cuda.current_device(), problem, micro_batch_size
        if key not in self._offered:
            self._offered[key] = _offered(self._here().device, problem, micro_batch_size)
        return self._offered[key]

    def engine(self, plan: Plan) -> Engine:
        key = torch.cuda.current_device(), plan
        if key not in self._engines:
            self._engines[key] = self._listed(plan) or described(self._configured(self._here(), plan))
        return self._engines[key]

    def build(self, plan: Plan) -> None:
        self._executable(self._here(), plan)

    @contextmanager
    def building_for_a_while(self) -> Iterator[None]:
        """Give back the plans that are built inside.

        A search builds hundreds of plans for a problem, of which a few will run, and plans of engines that are compiled
        at run time hold code on the device. A plan that was there before may be part of a CUDA graph: it stays. After
        an error everything does, since the device may not be in a state in which to take plans apart.
        """
        here = self._here()
        before = set(here.executables)
        yield
        torch.cuda.synchronize()  # none of them runs any more
        for plan in here.executables.keys() - before:
            del here.executables[plan]

    def execute(self, plan: Plan, pointers: Pointers, workspace: int, stream: int) -> None:
        here = self._here()
        executable, what = here.executables.get(plan) or self._executable(here, plan)
        if here.stream != stream:
            self._library.call("cudnnSetStream", "set the stream", here.handle, stream)
            here.stream = stream
        pack = here.pack(plan, pointers, workspace)
        self._library.call("cudnnBackendExecute", what, here.handle, executable.pointer, pack.pointer)

    def _executable(self, here: _OfDevice, plan: Plan) -> _Executable:
        if plan not in here.executables:
            what = f"{plan.config.name} for {plan.micro_batch_size} sample(s)"
            _refuse_while_capturing(f"the plan of {what}")
            built = Descriptor(self._library, DescriptorKind.EXECUTION_PLAN)
            built.set(Attribute.EXECUTION_PLAN_HANDLE, AttributeType.HANDLE, here.handle)
            built.refer(Attribute.EXECUTION_PLAN_ENGINE_CONFIG, self._configured(here, plan)).finalize()
            _require_no_more(built, self.engine(plan), what)
            here.executables[plan] = _Executable(built, f"execute {what}")
        return here.executables[plan]

    def _listed(self, plan: Plan) -> Engine | None:
        """Return the plan's engine as it was offered, if it was: lists are of plans that add nothing."""
        size = torch.cuda.current_device(), plan.problem, plan.micro_batch_size
        listed = self._offered.get(size, ()) if plan.beta == 0 else ()
        return next((engine for engine in listed if engine.config == plan.config), None)

    def _configured(self, here: _OfDevice, plan: Plan) -> Descriptor:
        size = (plan.problem, plan.micro_batch_size)
        graph = operation_graph(self._library, *size, beta=plan.beta, handle=here.handle)
        return configured(self._library, graph, plan.config)

    def _here(self) -> _OfDevice:
        by_device, number = self._of_thread.lent.by_device, torch.cuda.current_device()
        if number not in by_device:
            by_device[number] = self._taken(number)
        return by_device[number]

    def _taken(self, number: int) -> _OfDevice:
        try:
            return self._pool[number].pop()
        except IndexError:
            _refuse_while_capturing("cuDNN's handle")
            return _OfDevice(self._library, current_device())


def _refuse_while_capturing(what: str) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise CapturingError(f"{what} is not made in this thread yet, and a CUDA graph is captured: run it once before")


def _require_no_more(built: Descriptor, engine: Engine, what: str) -> None:
    """Raises ``CudnnError`` where a plan writes to more workspace than its engine said and is handed."""
    needed = built.number(Attribute.EXECUTION_PLAN_WORKSPACE_SIZE)
    if needed > engine.workspace_bytes:
        text = f"the plan needs {needed} bytes of workspace, and the engine said {engine.workspace_bytes}"
        raise CudnnError(f"build {what}", _NOT_SUPPORTED, "CUDNN_STATUS_NOT_SUPPORTED", text)


def _pack(library: Library, plan: Plan, pointers: Pointers, workspace: int) -> Descriptor:
    return (
        Descriptor(library, DescriptorKind.VARIANT_PACK)
        .set(Attribute.VARIANT_PACK_UNIQUE_IDS, AttributeType.INT64, X_ID, W_ID, Y_ID)
        .set(Attribute.VARIANT_PACK_DATA_POINTERS, AttributeType.VOID_PTR, *pointers)
        .set(Attribute.VARIANT_PACK_WORKSPACE, AttributeType.VOID_PTR, workspace)
        .finalize()
    )


def _offered(device: Device, problem: ConvProblem, n: int) -> Sequence[Engine]:
    try:
        return device.engines(problem, n)
    except CudnnError as error:
        if error.is_unsupported:
            return []
        raise


@lru_cache(maxsize=1)
def cudnn_backend() -> CudnnBackend:
    """Return the one of this process."""
    return CudnnBackend()
