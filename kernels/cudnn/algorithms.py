"""Algorithms that run cuDNN's engine configurations (kernels with settings) on one problem and micro-batch size.

Engines overwrite their output. The dw of a micro-batch is therefore written to scratch and added to the sum, which is
float32 if the problem's dtype has lower precision. In float32 and float64, cuDNN can also add to the sum itself (beta =
1). Each engine configuration is therefore offered a second time as ``in-place``, and its results are checked on the
device like those of any other algorithm.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch
from torch import Tensor

from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.core.torch_settings import TorchSettings
from mucudnn.kernels.algorithm import BaseAlgorithm, Workspace
from mucudnn.kernels.cudnn.backend import CudnnBackend, Engine, EngineConfig, Plan, Pointers, why_barred
from mucudnn.kernels.cudnn.descriptor import MOST_ALIGNED_BYTES
from mucudnn.kernels.cudnn.library import CudnnError
from mucudnn.kernels.memory import Part, carve, carved_bytes, torch_dtype

SOURCE_NAME = "cudnn"  # With a colon, this is the prefix of the names of all engine configurations.
_IN_PLACE = " in-place"


class _Step(NamedTuple):
    """The plan and the parts of the scratch buffer for a micro-batch of one size.

    scratch: cuDNN's workspace, followed by the filter gradient dw of the micro-batch unless it is added in place.
    """

    plan: Plan
    scratch: list[Part]


@dataclass(frozen=True, slots=True)
class CudnnEngine(BaseAlgorithm):
    """An algorithm that runs one engine configuration of cuDNN.

    It runs on the CUDA device that is current when the algorithm is first used with a problem.

    deterministic: also False if unknown, as for a name read from a database.
    local: likewise.
    adds_in_place: whether cuDNN itself adds each micro-batch's filter gradient to the sum, in float32 and float64.

    The methods raise ``CudnnError`` if cuDNN fails.
    """

    config: EngineConfig
    backend: CudnnBackend
    deterministic: bool = field(default=False, compare=False)
    local: bool = field(default=False, compare=False)
    adds_in_place: bool = False
    _steps: dict[tuple[ConvProblem, int], _Step] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def named(cls, name: str, backend: CudnnBackend) -> Self:
        """Parse a name such as ``cudnn:67 k2=5`` or ``cudnn:67 k2=5 in-place``, and return the algorithm.

        Raises ``InvalidInputError`` if the name is malformed.
        """
        plain = name.removesuffix(_IN_PLACE)
        return cls(EngineConfig.named(plain), backend, adds_in_place=plain != name)

    @property
    def name(self) -> str:
        return self.config.name + (_IN_PLACE if self.adds_in_place else "")

    @property
    def version(self) -> int:
        return self.backend.version

    source = SOURCE_NAME
    alignment_bytes = MOST_ALIGNED_BYTES

    def supports(self, problem: ConvProblem) -> str | None:
        return None  # This depends on the micro-batch size.

    def is_local(self, problem: ConvProblem) -> bool:
        return self.local

    def supports_micro_batch(self, problem: ConvProblem, micro_batch_size: int) -> str | None:
        """Return why micro-batches of this size are not supported; None if they are.

        The limits are 2^31 - 1 elements in x and y, and sizes for which cuDNN cannot plan this engine configuration.
        """
        if micro_batch_size > problem.countable_samples():
            return f"x or y of {micro_batch_size} sample(s) has more than 2^31 - 1 elements; smaller micro-batches fit"
        try:
            if all(engine.config != self.config for engine in self.backend.offered(problem, micro_batch_size)):
                return f"cuDNN does not offer this engine configuration for {micro_batch_size} sample(s)"
            self._step(problem, micro_batch_size)
        except CudnnError as error:
            return str(error)
        return None

    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        scratch = self._step(problem, micro_batch_size).scratch
        return Workspace(carved_bytes(_accumulator_parts(problem)), carved_bytes(scratch))

    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        """Return the bytes of the plan's workspace if they exceed the size that its engine declares, else 0.

        Builds the plan if necessary.
        """
        return self.backend.own_bytes(self.plan(problem, micro_batch_size))

    def plan(self, problem: ConvProblem, micro_batch_size: int) -> Plan:
        """Return the cuDNN plan that is executed for a micro-batch of this size."""
        adds = problem.operation is Operation.BACKWARD_FILTER and not self._has_temporary(problem)
        return Plan(self.config, problem, micro_batch_size, 1.0 if adds else 0.0)

    def why_not_here(self, problem: ConvProblem, micro_batch_size: int) -> str | None:
        """Return why the engine must not run in the current environment, None if it may.

        The device may not offer the engine, or torch's settings may forbid it.
        """
        reason = self.supports_micro_batch(problem, micro_batch_size)
        if reason is not None:
            return reason
        engine = self.backend.engine(self.plan(problem, micro_batch_size))
        return why_barred(TorchSettings.current(), engine, problem.dtype)

    def build(self, problem: ConvProblem, micro_batch_size: int) -> None:
        self.backend.build(self._step(problem, micro_batch_size).plan)

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
        plan, parts = self._step(problem, x.shape[0])
        temporaries = carve(scratch, parts)[1:] if len(parts) > 1 else []
        written = next(iter(_filters(problem, temporaries)), w)
        pointers = Pointers(x.data_ptr(), written.data_ptr(), y.data_ptr())
        stream = int(torch._C._cuda_getCurrentRawStream(x.get_device())) if x.is_cuda else 0  # tests use the CPU
        self.backend.execute(plan, pointers, scratch.data_ptr(), stream)
        if bias is not None:
            y.add_(bias.view(-1, 1, 1))
        if written is not w:
            accumulators = _filters(problem, carve(prepared, _accumulator_parts(problem)))
            next(iter(accumulators), w).add_(written)

    def close(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        for accumulator in _filters(problem, carve(prepared, _accumulator_parts(problem))):
            w.add_(accumulator)

    def _step(self, problem: ConvProblem, n: int) -> _Step:
        step = self._steps.get((problem, n))
        if step is None:
            plan = self.plan(problem, n)
            parts = [Part((self.backend.engine(plan).workspace_bytes,), torch.uint8)]
            if self._has_temporary(problem):
                parts.append(_filter_part(problem, torch_dtype(problem)))
            step = self._steps[problem, n] = _Step(plan, parts)
        return step

    def _has_temporary(self, problem: ConvProblem) -> bool:
        is_of_filter = problem.operation is Operation.BACKWARD_FILTER
        return is_of_filter and not (self.adds_in_place and problem.item_bytes >= 4)


@dataclass(frozen=True, slots=True)
class CudnnEngines:
    """The source of cuDNN's engine configurations, as algorithms: all that torch's settings allow for a problem.

    No engines are offered for micro-batches whose x or y has more than 2^31 - 1 elements. For BACKWARD_FILTER each
    configuration is offered with and without ``in-place``. If cuDNN fails to list the engines for a micro-batch size,
    a warning is issued, and no engine is offered for that size.
    """

    backend: CudnnBackend
    name: str = SOURCE_NAME

    def offered(self, problem: ConvProblem, micro_batch_sizes: Sequence[int]) -> list[CudnnEngine]:
        """Return the engines offered for any of the micro-batch sizes, those offered for the largest size first.

        An engine counts as deterministic, or as local, only if it is so at every size. None is offered for volumes,
        which ``descriptor`` does not describe.
        """
        if problem.is_volume:
            return []
        numerics = TorchSettings.current()
        engines_of: dict[EngineConfig, list[Engine]] = {}
        for n in sorted(micro_batch_sizes, reverse=True):
            if n > problem.countable_samples():
                continue
            try:
                listed = self.backend.offered(problem, n)
            except CudnnError as error:
                reason = (
                    f"cuDNN lists no engines for {n} sample(s) of {problem}: {error}; none is measured at this size"
                )
                warnings.warn(reason, RuntimeWarning, stacklevel=2)
                continue
            for engine in listed:
                if why_barred(numerics, engine, problem.dtype) is None:
                    engines_of.setdefault(engine.config, []).append(engine)
        in_place = problem.operation is Operation.BACKWARD_FILTER and problem.item_bytes >= 4
        return [
            CudnnEngine(
                config,
                self.backend,
                deterministic=all(engine.deterministic for engine in engines),
                local=all(engine.local for engine in engines),
                adds_in_place=adds_in_place,
            )
            for config, engines in engines_of.items()
            for adds_in_place in ((False, True) if in_place else (False,))
        ]

    def measuring(self) -> AbstractContextManager[object]:
        return self.backend.building_for_a_while()


def _accumulator_parts(problem: ConvProblem) -> list[Part]:
    """Return a list with the float32 buffer in which a dw of lower precision is accumulated, else an empty list."""
    needed = problem.operation is Operation.BACKWARD_FILTER and problem.item_bytes < 4
    return [_filter_part(problem, torch.float32)] if needed else []


def _filter_part(problem: ConvProblem, dtype: torch.dtype) -> Part:
    """Return the buffer part for a filter, with the filter's shape in the problem's memory format."""
    k, c, r, s = problem.w_shape()
    return Part((k, r, s, c) if problem.memory_format is MemoryFormat.CHANNELS_LAST else (k, c, r, s), dtype)


def _filters(problem: ConvProblem, stored: Sequence[Tensor]) -> list[Tensor]:
    """Return views of filters that are stored in the problem's memory format, each as (K, C // groups, R, S)."""
    turned = problem.memory_format is MemoryFormat.CHANNELS_LAST
    return [filter_.permute(0, 3, 1, 2) if turned else filter_ for filter_ in stored]
