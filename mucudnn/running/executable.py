"""Executables: configurations (algorithms with micro-batch sizes) made ready to run.

Algorithms, slices and workspace offsets are resolved once, so that a call does little more than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from math import inf, prod

import torch
from torch import Tensor

from mucudnn.core.errors import InvalidInputError, LibraryError, MisalignedError
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.core.records import Configuration, MicroConfig
from mucudnn.kernels.algorithm import (
    Algorithm,
    BoundStage,
    Epilogue,
    Prologue,
    Workspace,
    fuses_moments,
    fuses_normalization,
    why_unsupported,
)
from mucudnn.kernels.memory import dense_strides, torch_dtype, torch_format
from mucudnn.kernels.pages import is_advised, on_huge_pages
from mucudnn.kernels.registry import algorithm as algorithm_named
from mucudnn.running.eager import hot_path
from mucudnn.running.workspace import workspace_of

BUFFER_BYTES = 256  # alignment of each buffer, as in CUDA's allocations, which libraries may rely on


class StepError(LibraryError):
    """A step of an executable (an algorithm on a micro-batch) cannot be built or run, with the library's message.

    Its cause is the ``LibraryError``.
    """

    def __init__(self, problem: ConvProblem, micro_config: MicroConfig, error: LibraryError) -> None:
        super().__init__(str(error))
        self.problem, self.micro_config, self._error = problem, micro_config, error

    def __reduce__(self) -> tuple[object, ...]:
        return StepError, (self.problem, self.micro_config, self._error)

    @property
    def is_lack_of_memory(self) -> bool:
        return self._error.is_lack_of_memory


@dataclass(frozen=True, slots=True)
class Stage:
    """The part of a configuration that one algorithm computes, in one or several micro-batches.

    slices: the micro-batches along N, in execution order.
    prepared: range of the algorithm's prepared bytes in the workspace.
    bound: runs the whole stage in one C call; None if not possible.
    """

    algorithm: Algorithm
    slices: tuple[slice, ...]
    prepared: slice
    bound: BoundStage | None = field(default=None, compare=False, repr=False)

    def run(
        self,
        problem: ConvProblem,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        bias: Tensor | None,
        prepared: Tensor,
        scratch: Tensor,
    ) -> None:
        """Compute the micro-batches one by one. Raises ``StepError`` if a library fails."""
        algorithm, micro_batch = self.algorithm, self.slices[0]
        try:
            algorithm.open(problem, w, prepared)
            for micro_batch in self.slices:
                is_all = micro_batch.stop - micro_batch.start == len(x)  # then no view is made: a microsecond
                x_in, y_in = (x, y) if is_all else (x[micro_batch], y[micro_batch])
                algorithm.step(problem, x_in, w, y_in, bias, prepared, scratch)
            algorithm.close(problem, w, prepared)
        except LibraryError as error:
            failed = MicroConfig(algorithm.name, micro_batch.stop - micro_batch.start)
            raise StepError(problem, failed, error) from error


@dataclass(frozen=True, slots=True)
class Result:
    """The shape and strides of an operation's result, which each call allocates."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device_type: str
    is_large: bool

    @classmethod
    def of(cls, problem: ConvProblem, batch_size: int, device_type: str) -> Result:
        shapes = problem.y_shape(batch_size), problem.x_shape(batch_size), problem.w_shape()
        shape = shapes[tuple(Operation).index(problem.operation)]
        strides = dense_strides(shape, problem.memory_format)
        is_large = device_type == "cpu" and is_advised(prod(shape) * problem.item_bytes)
        return cls(shape, strides, torch_dtype(problem), device_type, is_large)

    def new(self) -> Tensor:
        """Return a new uninitialized tensor of this shape and strides on the current device."""
        y = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device_type)
        return on_huge_pages(y) if self.is_large else y


@dataclass(frozen=True, slots=True)
class Executable:
    """A configuration of one problem, resolved for one thread count and one device.

    The workspace consists of the algorithms' prepared buffers and then the largest scratch, each aligned to
    ``BUFFER_BYTES``. Libraries may allocate additional memory, so a workspace is kept between calls only up to
    ``most_kept_bytes``, or up to the bytes that the executable needs if that is more.

    bound: a C++ version of ``run``, if every stage has a C function; otherwise None.
    """

    problem: ConvProblem
    configuration: Configuration
    stages: tuple[Stage, ...]
    scratch: slice
    result: Result
    keeps_workspace: bool = True
    alignment_bytes: int = 1
    most_kept_bytes: float = inf
    bound: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        problem: ConvProblem,
        configuration: Configuration,
        *,
        device_type: str = "cpu",
        keeps_workspace: bool = True,
    ) -> Executable:
        """Return the executable of a configuration for the current device, which has the type ``device_type``.

        keeps_workspace: whether the CPU workspace is kept between calls.

        Raises ``InvalidInputError`` for an algorithm that is not registered or cannot compute the problem, and
        ``LibraryError`` or ``UnavailableError`` for an algorithm of a missing library.
        """
        sizes_of = {
            name: [m.micro_batch_size for m in configuration.micro_configs if m.algorithm == name]
            for name in configuration.algorithms
        }
        placed = iter(_placed(list(chain.from_iterable(sizes_of.values()))))

        # Place what each algorithm prepares, one after the other, and behind all the largest scratch
        stages = []
        prepared_end = scratch_bytes = 0
        for name, sizes in sizes_of.items():
            algorithm = algorithm_named(name, device_type)
            if (reason := why_unsupported(algorithm, problem)) is not None:
                raise InvalidInputError(f"algorithm {name!r} cannot compute {problem}: {reason}")
            workspaces = [algorithm.workspace(problem, size) for size in set(sizes)]
            prepared = _aligned(prepared_end, max(w.prepared_bytes for w in workspaces))
            stages.append(Stage(algorithm, tuple(islice(placed, len(sizes))), prepared))
            prepared_end = prepared.stop
            scratch_bytes = max(scratch_bytes, *(w.scratch_bytes for w in workspaces))
        scratch = _aligned(prepared_end, scratch_bytes)

        # Bind each stage that a C function can run, and then all stages together
        for i, stage in enumerate(stages):
            if device_type == "cpu" and stage.algorithm.alignment_bytes <= 1:
                workspace = Workspace(stage.prepared.stop - stage.prepared.start, scratch_bytes)
                bound = stage.algorithm.bound(problem, configuration.batch_size, stage.slices, workspace)
                stages[i] = replace(stage, bound=bound)
        alignment_bytes = max((stage.algorithm.alignment_bytes for stage in stages), default=1)
        result = Result.of(problem, configuration.batch_size, device_type)
        executable = cls(problem, configuration, tuple(stages), scratch, result, keeps_workspace, alignment_bytes)
        return executable if any(stage.bound is None for stage in stages) else executable._with_bound()

    def with_strides(self, strides: tuple[int, ...]) -> Executable:
        """Return the executable whose result has these strides, which differ only in dimensions of size 1."""
        if strides == self.result.strides:
            return self
        executable = replace(self, result=replace(self.result, strides=strides))
        return executable if self.bound is None else executable._with_bound()

    def normalizing(self) -> Executable | None:
        """Return the executable for calls of ``run`` with a prologue; None if an algorithm takes none."""
        stages, end, scratch_bytes, n = list[Stage](), 0, 0, self.configuration.batch_size
        for stage in self.stages:
            is_able = stage.bound is not None and fuses_normalization(stage.algorithm, self.problem)
            parts = stage.algorithm.normalizing(self.problem, n, stage.slices) if is_able else None
            if parts is None:
                return None
            bound, workspace = parts
            prepared = _aligned(end, workspace.prepared_bytes)
            stages.append(replace(stage, prepared=prepared, bound=bound))
            end, scratch_bytes = prepared.stop, max(scratch_bytes, workspace.scratch_bytes)
        return replace(self, stages=tuple(stages), scratch=_aligned(end, scratch_bytes), bound=None)

    @property
    def workspace_bytes(self) -> int:
        return int(self.scratch.stop)

    @property
    def buffer_bytes(self) -> int:
        """The bytes of its buffers without those that align them: what configurations count."""
        return sum(buffer.stop - buffer.start for buffer in (self.scratch, *(stage.prepared for stage in self.stages)))

    def steps(self) -> Iterator[tuple[Algorithm, int]]:
        """Yield the distinct pairs of an algorithm and a micro-batch size that it runs."""
        for stage in self.stages:
            for size in dict.fromkeys(micro_batch.stop - micro_batch.start for micro_batch in stage.slices):
                yield stage.algorithm, size

    def build(self) -> None:
        """Build all steps (algorithms by micro-batch size), so that ``execute`` can be captured in a CUDA graph.

        Raises ``StepError`` if a step cannot be built.
        """
        for algorithm, size in self.steps():
            self.build_step(algorithm, size)

    def build_step(self, algorithm: Algorithm, micro_batch_size: int) -> None:
        """Build one of ``steps``: an algorithm for a micro-batch size. Raises the errors of ``build``."""
        try:
            algorithm.build(self.problem, micro_batch_size)
        except LibraryError as error:
            raise StepError(self.problem, MicroConfig(algorithm.name, micro_batch_size), error) from error

    @property
    def fuses_moments(self) -> bool:
        """Whether ``run`` computes the moments of y, of all stages."""
        return all(stage.bound is not None and fuses_moments(stage.algorithm, self.problem) for stage in self.stages)

    def run(
        self,
        x: Tensor,
        w: Tensor,
        third: Tensor | None,
        moments: Tensor | None = None,
        prologue: Prologue | None = None,
    ) -> Tensor:
        """Return the operation's result, newly allocated. Raises the errors of ``execute``.

        x, w: tensors of the problem's shapes and dtype, with any strides.
        third: the bias or None in FORWARD, else dy.
        moments: where those of y are added (``zero_moments``), only if the executable ``fuses_moments``.
        prologue: what is computed of x, of an executable that is ``normalizing``, which needs one.
        """
        operation, result = self.problem.operation, self.result.new()
        dense = torch_format(self.problem)
        if operation is not Operation.BACKWARD_DATA:
            x = x.contiguous(memory_format=dense)
        if operation is not Operation.BACKWARD_FILTER:
            w = w.contiguous(memory_format=dense)
        if operation is Operation.FORWARD:
            self.execute(x, w, result, None if third is None else third.contiguous(), moments, prologue)
            return result
        assert third is not None
        third = third.contiguous(memory_format=dense)
        if operation is Operation.BACKWARD_DATA:
            self.execute(result, w, third)
        else:
            self.execute(x, result, third, prologue=prologue)
        return result

    def execute(
        self,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        bias: Tensor | None = None,
        moments: Tensor | None = None,
        prologue: Prologue | None = None,
    ) -> None:
        """Compute the problem's operation on a mini-batch, writing the result into one of the tensors.

        x: (N, C, H, W), w: (K, C // groups, R, S), y: (N, K, P, Q), of volumes all with a depth, bias: (K,) or None.
        All must be dense, in the problem's memory format, on the current device, with the configuration's N, which is
        not checked.

        Raises ``MisalignedError``, ``StepError`` if a library fails, and torch's out-of-memory errors.
        """
        x_start, w_start, y_start, alignment_bytes = x.data_ptr(), w.data_ptr(), y.data_ptr(), self.alignment_bytes
        if alignment_bytes > 1 and (x_start | w_start | y_start) % alignment_bytes:
            raise MisalignedError(
                f"{self.configuration} needs tensors that begin on a multiple of {alignment_bytes} bytes; clone views"
            )
        if self.problem.operation is Operation.BACKWARD_FILTER:
            w.zero_()
        workspace = workspace_of(
            self.scratch.stop, x.device, keeps=self.keeps_workspace, most_bytes=self.most_kept_bytes
        )
        start, bias_start = workspace.data_ptr(), None if bias is None else bias.data_ptr()
        epilogue = None if moments is None else Epilogue(moments=moments)
        for stage in self.stages:
            if stage.bound is not None:
                prepared_start, scratch_start = start + stage.prepared.start, start + self.scratch.start
                stage.bound(x_start, w_start, y_start, bias_start, prepared_start, scratch_start, epilogue, prologue)
            else:
                stage.run(self.problem, x, w, y, bias, workspace[stage.prepared], workspace[self.scratch])

    def _with_bound(self) -> Executable:
        """Return the executable with its ``bound``, for which every stage has a C function.

        ``bound`` is a C++ function, which calls ``run`` for operands that are not dense, and while this thread has no
        workspace yet. It is ``run`` itself where the extension has not been built, if the workspace is not kept, and
        for stages that the extension cannot call.
        """
        entries = [(stage.bound.entry, stage.prepared.start) for stage in self.stages if stage.bound is not None]
        if hot_path.extension is None or not self.keeps_workspace or any(entry is None for entry, _ in entries):
            return replace(self, bound=self.run)
        result = self.result
        bound = hot_path.extension.Bound(
            tuple(Operation).index(self.problem.operation),
            tuple((*entry, start) for entry, start in entries if entry is not None),
            self.scratch.start,
            self.scratch.stop,
            self.problem.memory_format is MemoryFormat.CHANNELS_LAST,
            (result.shape, result.strides, result.dtype, torch.device(result.device_type)),
            ("dtype", "device"),
            result.new if result.is_large else None,
            self.run,
        )
        return replace(self, bound=bound)


def _aligned(end: int, size: int) -> slice:
    """Return the range of ``size`` bytes that begins at the next multiple of ``BUFFER_BYTES`` after ``end``."""
    start = -(-end // BUFFER_BYTES) * BUFFER_BYTES
    return slice(start, start + size)


def _placed(sizes: Sequence[int]) -> list[slice]:
    """Return adjacent slices along N for micro-batches of these sizes.

    Each slice begins at a multiple of the largest power of two that divides its size, since libraries may rely on this
    alignment. To this end, slices are placed in descending order of these powers, regardless of execution order.
    """
    slices = [slice(0)] * len(sizes)
    start = 0
    for index in sorted(range(len(sizes)), key=lambda index: sizes[index] & -sizes[index], reverse=True):
        slices[index] = slice(start, start + sizes[index])
        start += sizes[index]
    return slices
