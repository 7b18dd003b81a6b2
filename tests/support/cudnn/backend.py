"""Executes cuDNN's plans with torch on the CPU, from nothing but the addresses that it is given."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod

import pytest
import torch
from torch import Tensor

from mucudnn.core import errors
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.kernels import registry
from mucudnn.kernels.cudnn.backend import Engine, EngineConfig, Plan, Pointers
from mucudnn.kernels.cudnn.descriptor import NumericalNote
from mucudnn.kernels.cudnn.library import CudnnError
from mucudnn.kernels.torch_convolution import reference
from mucudnn.running import choices

STEADY, PICKY, RANDOM = EngineConfig(7), EngineConfig(38, ((2, 5), (13, 0))), EngineConfig(9, ((2, -1),))
_GARBAGE = 0x5A


@dataclass(eq=False)
class FakeBackend:
    """Offers ``STEADY`` for every size, ``PICKY`` from two samples on and ``RANDOM``, which is not deterministic.

    started, building: called with each plan before it is executed, built. is_searching: what is built now is given
    back. own: bytes of workspace that a plan allocates since its engine said less.
    """

    version: int = 91900
    started: Callable[[Plan], object] = lambda plan: None
    building: Callable[[Plan], object] = lambda plan: None
    own: Callable[[Plan], int] = lambda plan: 0
    executed: list[Plan] = field(default_factory=list)
    built: list[Plan] = field(default_factory=list)
    is_searching: bool = False

    def offered(self, problem: ConvProblem, micro_batch_size: int) -> Sequence[Engine]:
        needed = 33 * micro_batch_size
        picky = [Engine(PICKY, frozenset({NumericalNote.TENSOR_CORE}), 2 * needed)]
        return [
            *(picky if micro_batch_size > 1 else []),
            Engine(STEADY, frozenset(), needed),
            Engine(RANDOM, frozenset({NumericalNote.NONDETERMINISTIC}), 0),
        ]

    def engine(self, plan: Plan) -> Engine:
        for engine in self.offered(plan.problem, plan.micro_batch_size):
            if engine.config == plan.config:
                return replace(engine, workspace_bytes=engine.workspace_bytes + int(plan.beta))
        raise CudnnError(f"plan {plan.config.name}", 3000, "CUDNN_STATUS_NOT_SUPPORTED", "")

    def own_bytes(self, plan: Plan) -> int:
        return self.own(plan)

    def build(self, plan: Plan) -> None:
        self.building(plan)
        self.built.append(plan)

    @contextmanager
    def building_for_a_while(self) -> Iterator[None]:
        self.is_searching = True
        yield
        self.is_searching = False

    def execute(self, plan: Plan, pointers: Pointers, workspace: int, stream: int) -> None:
        self.started(plan)
        self.executed.append(plan)
        torch.empty(self.own(plan), dtype=torch.uint8)
        with ThreadPoolExecutor(1) as other:  # a thread of its own, whose allocations are not the algorithm's
            other.submit(self._compute, plan, pointers, workspace).result()

    def _compute(self, plan: Plan, pointers: Pointers, workspace: int) -> None:
        ctypes.memset(workspace, _GARBAGE, self.engine(plan).workspace_bytes)
        problem, n = plan.problem, plan.micro_batch_size
        shapes = (problem.x_shape(n), problem.w_shape(), problem.y_shape(n))
        x, w, y = (_tensor_at(address, problem, shape) for address, shape in zip(pointers, shapes, strict=True))
        result = reference(problem, x, w, y)
        written = {Operation.FORWARD: y, Operation.BACKWARD_DATA: x, Operation.BACKWARD_FILTER: w}[problem.operation]
        written.copy_(result + plan.beta * written if plan.beta else result)


def in_the_place_of_cudnn(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    """A fake wherever names are resolved, in a process in which nothing has been resolved, failed or said yet."""
    backend = FakeBackend()
    monkeypatch.setattr(registry, "cudnn_backend", lambda: backend)
    monkeypatch.setattr(choices, "_registered", {})
    monkeypatch.setattr(choices, "_failed", {})
    monkeypatch.setattr(errors, "_said", set())
    return backend


def _tensor_at(address: int, problem: ConvProblem, shape: tuple[int, int, int, int]) -> Tensor:
    """What lies there, in the problem's dtype and memory format."""
    memory = (ctypes.c_byte * (prod(shape) * problem.item_bytes)).from_address(address)
    flat = torch.frombuffer(memory, dtype=getattr(torch, problem.dtype))
    n, c, h, w = shape
    if problem.memory_format is MemoryFormat.CHANNELS_LAST:
        return flat.view(n, h, w, c).permute(0, 3, 1, 2)
    return flat.view(shape)
