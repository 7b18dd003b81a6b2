"""Executes plans with cuDNN on the current CUDA device. Nothing in this file has been run on a GPU yet."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from mucudnn.kernels.cudnn.constants import Attribute, AttributeType, DescriptorKind
from mucudnn.kernels.cudnn.descriptor import Descriptor
from mucudnn.kernels.cudnn.device import Device, current_device
from mucudnn.kernels.cudnn.engines import Engine, configured, described
from mucudnn.kernels.cudnn.library import CudnnError, library
from mucudnn.kernels.cudnn.operation_graph import W_ID, X_ID, Y_ID, operation_graph
from mucudnn.kernels.cudnn_engine import Plan, Pointers
from mucudnn.problem import ConvProblem


@dataclass(slots=True)
class _OfDevice:
    """What one thread keeps for one device: a handle must not be used by two threads at a time."""

    device: Device
    offered: dict[tuple[ConvProblem, int], Sequence[Engine]] = field(default_factory=dict)
    engines: dict[Plan, tuple[Descriptor, Engine]] = field(default_factory=dict)
    plans: dict[Plan, Descriptor] = field(default_factory=dict)

    @property
    def handle(self) -> int:
        assert self.device.handle is not None
        return self.device.handle.pointer.value or 0


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.devices: dict[int, _OfDevice] = {}


class CudnnBackend:
    """Built lazily and kept: engine lists, and finalized plans, of every thread and device.

    Raises ``UnavailableError`` where there is no cuDNN; its methods, where there is no device.
    """

    def __init__(self) -> None:
        self._library = library()
        self._of_thread = _OfThread()

    @property
    def version(self) -> int:
        return self._library.version

    def offered(self, problem: ConvProblem, micro_batch_size: int) -> Sequence[Engine]:
        here, key = self._here(), (problem, micro_batch_size)
        if key not in here.offered:
            here.offered[key] = _offered(here.device, *key)
        return here.offered[key]

    def engine(self, plan: Plan) -> Engine:
        return self._engine(plan)[1]

    def execute(self, plan: Plan, pointers: Pointers, workspace: int, stream: int) -> None:
        here = self._here()
        executable = here.plans.get(plan) or self._build(plan)
        pack = (
            Descriptor(self._library, DescriptorKind.VARIANT_PACK)
            .set(Attribute.VARIANT_PACK_UNIQUE_IDS, AttributeType.INT64, X_ID, W_ID, Y_ID)
            .set(Attribute.VARIANT_PACK_DATA_POINTERS, AttributeType.VOID_PTR, *pointers)
            .set(Attribute.VARIANT_PACK_WORKSPACE, AttributeType.VOID_PTR, workspace)
            .finalize()
        )
        self._library.call("cudnnSetStream", "set the stream", here.handle, stream)
        what = f"execute {plan.config.name} for {plan.micro_batch_size} sample(s)"
        self._library.call("cudnnBackendExecute", what, here.handle, executable.pointer, pack.pointer)

    def _build(self, plan: Plan) -> Descriptor:
        here = self._here()
        built = Descriptor(self._library, DescriptorKind.EXECUTION_PLAN)
        built.set(Attribute.EXECUTION_PLAN_HANDLE, AttributeType.HANDLE, here.handle)
        built.refer(Attribute.EXECUTION_PLAN_ENGINE_CONFIG, self._engine(plan)[0]).finalize()
        here.plans[plan] = built
        return built

    def _engine(self, plan: Plan) -> tuple[Descriptor, Engine]:
        here = self._here()
        if plan not in here.engines:
            size = (plan.problem, plan.micro_batch_size)
            graph = operation_graph(self._library, *size, beta=plan.beta, handle=here.handle)
            configuration = configured(self._library, graph, plan.config)
            here.engines[plan] = (configuration, described(configuration))
        return here.engines[plan]

    def _here(self) -> _OfDevice:
        devices, number = self._of_thread.devices, torch.cuda.current_device()
        if number not in devices:
            devices[number] = _OfDevice(current_device())
        return devices[number]


def _offered(device: Device, problem: ConvProblem, n: int) -> Sequence[Engine]:
    try:
        return device.engines(problem, n)
    except CudnnError as error:
        if error.is_unsupported:
            return []
        raise


@lru_cache(maxsize=1)
def cudnn_backend() -> CudnnBackend:
    """The one of this process."""
    return CudnnBackend()
