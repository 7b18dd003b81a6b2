"""cuDNN's engine configurations as algorithms: which there are depends on the problem and on the micro-batch size.

The engines write a micro-batch's dw anew. It is written into scratch and added to the sum, which is kept in float32
where the problem's dtype has less (cuDNN could add to the sum itself, beta = 1: ``CudnnEngine.adds_in_place``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mucudnn.kernels.algorithm import Workspace
from mucudnn.kernels.buffers import Part, carve, carved_bytes, torch_dtype
from mucudnn.kernels.cudnn.engines import Engine, EngineConfig
from mucudnn.kernels.cudnn.numerics import Numerics
from mucudnn.problem import ConvProblem, MemoryFormat, Operation

SOURCE_NAME = "cudnn"  # with a colon after it, the prefix of the names of all engine configurations


@dataclass(frozen=True, slots=True)
class Plan:
    """What is executed: ``result = operation + beta * result`` on a micro-batch, by one engine configuration."""

    config: EngineConfig
    problem: ConvProblem
    micro_batch_size: int
    beta: float = 0.0


class Pointers(NamedTuple):
    """Addresses on the device of the three tensors of a micro-batch, dense in the problem's memory format."""

    x: int
    w: int
    y: int


class Backend(Protocol):
    """What executes plans: cuDNN on the current CUDA device. Tests put another in its place."""

    @property
    def version(self) -> int:
        """``cudnnGetVersion``: 91900. What an engine's number and knobs mean is fixed only within a version."""

    def offered(self, problem: ConvProblem, micro_batch_size: int) -> Sequence[Engine]:
        """Those proposed for micro-batches of this size, best first; none where cuDNN cannot compute the problem."""

    def engine(self, plan: Plan) -> Engine:
        """The plan's engine, with its exact workspace. Raises ``CudnnError`` where it cannot execute such a plan."""

    def execute(self, plan: Plan, pointers: Pointers, workspace: int, stream: int) -> None:
        """Start the plan on a CUDA stream. workspace: address of as many bytes as the plan's engine needs.

        Raises ``CudnnError`` where cuDNN refuses.
        """


@dataclass(frozen=True, slots=True)
class CudnnEngine:
    """One engine configuration. deterministic: false also where it is not known, as for a name out of a database.

    adds_in_place: cuDNN adds dw to the sum itself, where that is in float32 or float64. Off: not proven on a device.
    """

    config: EngineConfig
    backend: Backend
    deterministic: bool = field(default=False, compare=False)
    adds_in_place: bool = False

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def version(self) -> int:
        return self.backend.version

    def supports(self, problem: ConvProblem) -> str | None:
        return None  # it depends on the micro-batch size

    def supports_micro_batch(self, problem: ConvProblem, micro_batch_size: int) -> str | None:
        if any(engine.config == self.config for engine in self.backend.offered(problem, micro_batch_size)):
            return None
        return f"cuDNN does not offer this engine configuration for {micro_batch_size} sample(s)"

    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        scratch = self._scratch_parts(problem, micro_batch_size)
        return Workspace(carved_bytes(_accumulator_parts(problem)), carved_bytes(scratch))

    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        return 0

    def open(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        for accumulator in _filters(problem, carve(prepared, _accumulator_parts(problem))):
            accumulator.zero_()

    def step(
        self,
        problem: ConvProblem,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        bias: Tensor | None,
        prepared: Tensor,
        scratch: Tensor,
    ) -> None:
        n = x.shape[0]
        workspace, *temporaries = carve(scratch, self._scratch_parts(problem, n))
        written = next(iter(_filters(problem, temporaries)), w)
        pointers = Pointers(x.data_ptr(), written.data_ptr(), y.data_ptr())
        stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
        self.backend.execute(self._plan(problem, n), pointers, workspace.data_ptr(), stream)
        if bias is not None:
            y.add_(bias.view(-1, 1, 1))
        if written is not w:
            accumulators = _filters(problem, carve(prepared, _accumulator_parts(problem)))
            next(iter(accumulators), w).add_(written)

    def close(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        for accumulator in _filters(problem, carve(prepared, _accumulator_parts(problem))):
            w.add_(accumulator)

    def _plan(self, problem: ConvProblem, n: int) -> Plan:
        adds = problem.operation is Operation.BACKWARD_FILTER and not self._has_temporary(problem)
        return Plan(self.config, problem, n, 1.0 if adds else 0.0)

    def _has_temporary(self, problem: ConvProblem) -> bool:
        of_filter = problem.operation is Operation.BACKWARD_FILTER
        return of_filter and not (self.adds_in_place and problem.item_bytes >= 4)

    def _scratch_parts(self, problem: ConvProblem, n: int) -> list[Part]:
        """The engine's workspace, then dw of the micro-batch."""
        parts = [Part((self.backend.engine(self._plan(problem, n)).workspace_bytes,), torch.uint8)]
        return [*parts, _filter_part(problem, torch_dtype(problem))] if self._has_temporary(problem) else parts


@dataclass(frozen=True, slots=True)
class CudnnEngines:
    """All engine configurations that cuDNN offers for a problem, and that torch's settings allow."""

    backend: Backend
    name: str = SOURCE_NAME

    def offered(self, problem: ConvProblem, micro_batch_sizes: Sequence[int]) -> list[CudnnEngine]:
        """Those that are offered for any of the sizes; deterministic if they are so for all of them."""
        numerics = Numerics.of_torch()
        deterministic: dict[EngineConfig, bool] = {}
        for n in micro_batch_sizes:
            for engine in self.backend.offered(problem, n):
                if numerics.why_barred(engine, problem.dtype) is None:
                    before = deterministic.get(engine.config, True)
                    deterministic[engine.config] = before and engine.deterministic
        return [CudnnEngine(config, self.backend, always) for config, always in deterministic.items()]


def _accumulator_parts(problem: ConvProblem) -> list[Part]:
    """The sum of dw over micro-batches, where the problem's dtype is not exact enough to hold it."""
    needed = problem.operation is Operation.BACKWARD_FILTER and problem.item_bytes < 4
    return [_filter_part(problem, torch.float32)] if needed else []


def _filter_part(problem: ConvProblem, dtype: torch.dtype) -> Part:
    """A filter as it lies in memory."""
    k, c, r, s = problem.w_shape()
    return Part((k, r, s, c) if problem.memory_format is MemoryFormat.CHANNELS_LAST else (k, c, r, s), dtype)


def _filters(problem: ConvProblem, stored: Sequence[Tensor]) -> list[Tensor]:
    """As (K, C // groups, R, S)."""
    turned = problem.memory_format is MemoryFormat.CHANNELS_LAST
    return [filter_.permute(0, 3, 1, 2) if turned else filter_ for filter_ in stored]
