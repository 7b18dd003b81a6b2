"""The algorithms written in C++, for the CPU. Each has a folder of C++ sources.

A stage is the part of a convolution call that one algorithm computes. The C++ functions ("entries") get it as an
argument, and check operands and buffer sizes (common/stage.h).

Half precision is widened when operands are packed, and rounded when results are written; the arithmetic is in float32.
Only ``implicit-gemm`` and ``pointwise`` multiply bfloat16 by the processor's instruction, if there is one
(common/pairs.h).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.kernels.algorithm import BaseAlgorithm, Epilogue, Prologue, Workspace
from mucudnn.kernels.compiled.library import (
    ELEMENTS,
    FUNCTIONS,
    OPERATIONS,
    PHASES,
    EpilogueArgument,
    Geometry,
    Operand,
    Stage,
    function,
    loaded_build,
    why_not,
    why_too_large,
)
from mucudnn.kernels.memory import torch_dtype

_MOST = 2**63 - 1
_CHANNELS_LAST = MemoryFormat.CHANNELS_LAST  # a local name, because every call uses it
_OPEN, STEP, _CLOSE = PHASES
_ALL = sum(PHASES)


class CompiledAlgorithm(BaseAlgorithm):
    """Base class of algorithms that C++ functions compute, one for each of ``workspace``, and one for all phases.

    tile: for Winograd, the number of outputs of a tile in one direction; otherwise 0.
    """

    __slots__ = ()
    tile = 0

    @property
    def entry(self) -> str:
        """Name of the algorithm in the names of the C++ functions."""
        return self.name.replace("-", "_")

    def fuses(self, problem: ConvProblem) -> bool:
        return True

    def fuses_moments(self, problem: ConvProblem) -> bool:
        return problem.memory_format is _CHANNELS_LAST

    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        return 0

    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        return self.workspace_of(self.stage(problem, _shapes(problem, micro_batch_size)))

    def open(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        if problem.operation is Operation.BACKWARD_FILTER:
            prepared.zero_()
        else:
            self._run_on_filter(_OPEN, problem, w, prepared)

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
        for tensor in (x, w, y):
            _require_dense(problem, tensor)
        if bias is not None:
            _require_dtype(problem, "the bias", bias)
        sizes = 0 if bias is None else bias.nbytes, prepared.nbytes, scratch.nbytes
        stage = _kept_stage(self, problem, (x.shape, w.shape, y.shape), STEP, sizes, torch.get_num_threads())
        addresses = x.data_ptr(), w.data_ptr(), y.data_ptr(), None if bias is None else bias.data_ptr()
        self._entry("stage")(stage, *addresses, prepared.data_ptr(), scratch.data_ptr(), None)

    def close(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        if problem.operation is Operation.BACKWARD_FILTER:
            self._run_on_filter(_CLOSE, problem, w, prepared)

    def bound(
        self,
        problem: ConvProblem,
        batch_size: int,
        slices: Sequence[slice],
        workspace: Workspace,
    ) -> CompiledStage:
        """Return a callable that runs these slices of the mini-batch, with all arguments resolved except addresses."""
        stage = self.stage(problem, _shapes(problem, batch_size), _ALL, slices=slices)
        return self.bound_to(problem, stage, workspace)

    def normalizing(
        self, problem: ConvProblem, batch_size: int, slices: Sequence[slice]
    ) -> tuple[CompiledStage, Workspace]:
        """Return a callable as ``bound`` does, for calls with a prologue, and its workspace."""
        stage = self.stage(problem, _shapes(problem, batch_size), _ALL, slices=slices)
        stage.normalizes = True
        workspaces = []
        for size in {part.stop - part.start for part in slices}:
            of_size = self.stage(problem, _shapes(problem, size))
            of_size.normalizes = True
            workspaces.append(self.workspace_of(of_size))
        workspace = Workspace(
            max(one.prepared_bytes for one in workspaces), max(one.scratch_bytes for one in workspaces)
        )
        return self.bound_to(problem, stage, workspace), workspace

    def band(
        self, problem: ConvProblem, n: int, rows: tuple[int, int], above: int
    ) -> tuple[CompiledStage, Workspace] | None:
        """Return a callable as ``bound`` does, and its workspace, for some rows of x and of y of ``n`` samples.

        The filter is prepared before, by ``open``.

        problem: of whole images, FORWARD or BACKWARD_DATA.
        rows: of x and y.
        above: rows of zeros above those of x.
        """
        extent, stride = problem.dilation[0] * (problem.window[0] - 1) + 1, problem.stride[0]
        missing = (rows[1] - 1) * stride + extent - above - rows[0]
        padding = above, 0 if -stride < missing < 0 else missing  # a stride may leave rows over
        shapes = self.shapes_of_band(problem, n, rows)
        stage = self.stage(problem, shapes, STEP, slices=[slice(0, n)], padding=padding)
        workspace = self.workspace_of(stage)
        return self.bound_to(problem, stage, workspace), workspace

    def shapes_of_band(self, problem: ConvProblem, n: int, rows: tuple[int, int]) -> list[Sequence[int]]:
        """Return the shapes of x, w and y with so many rows, or frames, of x and of y."""
        x, w, y = _shapes(problem, n)
        return [(*x[:2], rows[0], *x[3:]), w, (*y[:2], rows[1], *y[3:])]

    def workspace_of(self, stage: Stage) -> Workspace:
        return Workspace(self._entry("prepared_bytes")(stage), self._entry("scratch_bytes")(stage))

    def bound_to(self, problem: ConvProblem, stage: Stage, workspace: Workspace) -> CompiledStage:
        """Return a callable that runs a stage, whose buffer sizes this sets."""
        sizes = problem.k * problem.item_bytes, workspace.prepared_bytes, workspace.scratch_bytes
        stage.bias_bytes, stage.prepared_bytes, stage.scratch_bytes = sizes
        return CompiledStage(self._entry("stage"), stage, problem)

    def stage(
        self,
        problem: ConvProblem,
        shapes: Sequence[Sequence[int]],
        phases: int = _ALL,
        sizes: tuple[int, int, int] = (0, 0, 0),
        slices: Sequence[slice] = (),
        padding: tuple[int, int] | None = None,
    ) -> Stage:
        """Return the C struct that is the first argument of the C++ functions.

        shapes: of x, w and y.
        phases: which of ``open``, ``step`` and ``close`` to run.
        sizes: bytes of the bias, the prepared buffer and the scratch buffer.
        padding: above and below; None for the problem's.
        """
        (stride_h, stride_w), (dilation_h, dilation_w) = problem.stride[-2:], problem.dilation[-2:]
        above, below = padding or (problem.padding[-2],) * 2
        stride_d, before, dilation_d, first_tap, taps = self.depth(problem)
        geometry = Geometry(
            r=problem.r,
            s=problem.s,
            stride_h=stride_h,
            stride_w=stride_w,
            pad_h=above,
            pad_w=problem.padding[-1],
            dilation_h=dilation_h,
            dilation_w=dilation_w,
            groups=problem.groups,
            pad_below=below,
            stride_d=stride_d,
            pad_d=before,
            dilation_d=dilation_d,
            first_tap=first_tap,
            taps=taps,
        )
        x, w, y = (_described(problem, shape) for shape in shapes)
        bias_bytes, prepared_bytes, scratch_bytes = sizes
        bounds = [bound for part in slices for bound in (part.start, part.stop - part.start)]
        return Stage(
            geometry=geometry,
            x=x,
            w=w,
            y=y,
            operation=OPERATIONS.index(problem.operation),
            phases=phases,
            tile=self.tile,
            bias_bytes=bias_bytes,
            prepared_bytes=prepared_bytes,
            scratch_bytes=scratch_bytes,
            threads=torch.get_num_threads(),
            slice_count=len(slices),
            slices=(ctypes.c_int64 * len(bounds))(*bounds),
        )

    def depth(self, problem: ConvProblem) -> tuple[int, int, int, int, int]:
        """Return the last fields of ``Geometry``."""
        return 1, 0, 1, 0, 1

    def _run_on_filter(self, phase: int, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        _require_dense(problem, w)
        shapes, sizes = (None, w.shape, None), (0, prepared.nbytes, 0)
        stage = _kept_stage(self, problem, shapes, phase, sizes, torch.get_num_threads())
        self._entry("stage")(stage, None, w.data_ptr(), None, None, prepared.data_ptr(), None, None)

    def _entry(self, what: str) -> Callable[..., int]:
        return function(f"{self.entry}_{what}")


@lru_cache(maxsize=4096)
def _kept_stage(
    algorithm: CompiledAlgorithm,
    problem: ConvProblem,
    shapes: tuple[torch.Size | None, ...],
    phase: int,
    sizes: tuple[int, int, int],
    threads: int,
) -> Stage:
    """Return the argument of the C++ functions for one phase (``open``, ``step`` or ``close``) of a micro-batch.

    The argument is cached, because making it takes as long as a tiny convolution.

    shapes: of x, w and y; None for the shape of one sample.
    """
    x, w, y = (shape or default for shape, default in zip(shapes, _shapes(problem, 1), strict=True))
    return algorithm.stage(problem, (x, w, y), phase, sizes, [slice(0, x[0])])


class CompiledStage:
    """A call of a C++ function with all arguments resolved except the addresses of tensors and the epilogue."""

    __slots__ = ("_function", "_problem", "_stage", "entry")

    def __init__(self, entry: Callable[..., int], stage: Stage, problem: ConvProblem) -> None:
        self._function, self._stage, self._problem = entry, stage, problem
        address = ctypes.cast(entry, ctypes.c_void_p).value  # type: ignore[arg-type]
        self.entry = (address or 0, ctypes.addressof(stage))

    def __call__(
        self,
        x: int,
        w: int,
        y: int,
        bias: int | None,
        prepared: int,
        scratch: int,
        epilogue: Epilogue | None = None,
        prologue: Prologue | None = None,
        /,
    ) -> None:
        argument = None if epilogue is None and prologue is None else EpilogueArgument()
        if argument is not None and prologue is not None:
            _set_prologue(argument, prologue)
        if argument is not None and epilogue is not None:
            argument.activation = FUNCTIONS.index(epilogue.activation)
            if epilogue.added is not None:
                _require_dense(self._problem, epilogue.added)
                argument.added, argument.bytes = epilogue.added.data_ptr(), epilogue.added.nbytes
            if epilogue.moments is not None:
                argument.moments, argument.moments_bytes = epilogue.moments.data_ptr(), epilogue.moments.nbytes
        self._function(self._stage, x, w, y, bias, prepared, scratch, argument)


def _set_prologue(argument: EpilogueArgument, prologue: Prologue) -> None:
    """Write a prologue to a C struct. Raises ``InvalidInputError`` for vectors of different sizes or dtypes."""
    channels, parameters = len(prologue.mean), (prologue.weight, prologue.bias)
    dtype = next((vector.dtype for vector in parameters if vector is not None), torch.float32)
    for name in ("mean", "inverse", "weight", "bias"):
        vector, wanted = getattr(prologue, name), torch.float32 if name in ("mean", "inverse") else dtype
        if vector is not None:
            if vector.shape != (channels,) or vector.dtype is not wanted or not vector.is_contiguous():
                raise InvalidInputError(f"{name} must be {channels} numbers of {wanted}, one after the other")
            setattr(argument, name, vector.data_ptr())
    argument.channels, argument.parameter_element = channels, ELEMENTS[str(dtype).removeprefix("torch.")]
    argument.function, argument.slope = FUNCTIONS.index(prologue.function), prologue.slope


def _shapes(problem: ConvProblem, n: int) -> tuple[Sequence[int], ...]:
    return problem.x_shape(n), problem.w_shape(), problem.y_shape(n)


def _described(problem: ConvProblem, shape: Sequence[int]) -> Operand:
    """Describe a dense tensor of this shape for the C++ code, without its address.

    Numbers beyond 64 bits are clamped, so that the C++ code refuses them.
    """
    depth = (1,) if len(shape) == 4 else ()
    numbers = (min(number, _MOST) for number in (prod(shape) * problem.item_bytes, *shape[:2], *depth, *shape[2:]))
    return Operand(None, *numbers, problem.memory_format is MemoryFormat.CHANNELS_LAST, ELEMENTS[problem.dtype])


def _require_dense(problem: ConvProblem, tensor: Tensor) -> None:
    """Raise ``InvalidInputError`` if a tensor is not dense in the problem's memory format, or has another dtype."""
    _require_dtype(problem, "a tensor", tensor)
    channels_last = torch.channels_last_3d if problem.is_volume else torch.channels_last
    is_last = problem.memory_format is _CHANNELS_LAST
    if not (tensor.is_contiguous(memory_format=channels_last) if is_last else tensor.is_contiguous()):
        raise InvalidInputError(
            f"a tensor of {tuple(tensor.shape)} has the strides {tensor.stride()}; it must be dense and "
            f"{problem.memory_format} for the compiled algorithms"
        )


def _require_dtype(problem: ConvProblem, operand: str, tensor: Tensor) -> None:
    if tensor.dtype is not torch_dtype(problem):
        raise InvalidInputError(f"{operand} has dtype {tensor.dtype}; it must be that of the problem, {problem.dtype}")


# Algorithms

_LEAST_CHANNELS = 4  # Pointwise: with fewer channels per group, most of a register tile would be empty.
_MOST_CHANNELS = 8  # Depthwise: with more channels per group, matrix products are faster.
_LARGEST_EXTENT = 128  # Depthwise: the windows of larger filters do not fit in the cache.


def _none(problem: ConvProblem) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class ExactAlgorithm(CompiledAlgorithm):
    """An algorithm that computes the sums of the definition.

    refuses: why it is not for a problem, or None.
    normalizes: of which problems it normalizes x as it reads x.
    """

    name: str
    refuses: Callable[[ConvProblem], str | None] = why_too_large
    version: int = 1
    normalizes: Callable[[ConvProblem], bool] = _none
    deterministic: bool = True

    def supports(self, problem: ConvProblem) -> str | None:
        return why_not(problem, self.name) or self.refuses(problem)

    def fuses_normalization(self, problem: ConvProblem) -> bool:
        return self.normalizes(problem)

    def is_local(self, problem: ConvProblem) -> bool:
        return True

    def least_flops(self, problem: ConvProblem, micro_batch_size: int) -> int:
        return problem.flops(micro_batch_size)


def _not_pointwise(problem: ConvProblem) -> str | None:
    if (problem.r, problem.s) != (1, 1):
        return f"the filter is {problem.r}x{problem.s}; pointwise takes 1x1"
    if problem.padding != (0, 0):
        return f"the padding is {problem.padding}; pointwise takes none"
    channels = min(problem.c, problem.k) // problem.groups
    if problem.groups > 1 and channels < _LEAST_CHANNELS:
        return f"a group has {channels} channels; pointwise takes groups of {_LEAST_CHANNELS} and more"
    return None


def _all(problem: ConvProblem) -> bool:
    return True


def _with_a_filter_a_channel(problem: ConvProblem) -> bool:
    return problem.c == problem.k == problem.groups


def _not_depthwise(problem: ConvProblem) -> str | None:
    channels = max(problem.c, problem.k) // problem.groups
    if problem.groups == 1 or channels > _MOST_CHANNELS:
        return (
            f"a group has up to {channels} channels, of {problem.groups} groups; "
            f"direct sums take 2 groups or more, of up to {_MOST_CHANNELS} channels"
        )
    extent = max(problem.dilation[0] * (problem.r - 1), problem.dilation[1] * (problem.s - 1)) + 1
    if extent > _LARGEST_EXTENT:
        return f"the filter extends over {extent} pixels; direct sums take up to {_LARGEST_EXTENT}"
    return None


class LoopNest(ExactAlgorithm):
    """Convolution computed by its definition, of images and volumes, as loops without any buffer (loop_nest.cpp).

    This algorithm supports every problem without workspace, so it meets any workspace limit. It is mostly slower than
    other algorithms. Sums are in float32; in float64 if the problem is in float64, and for all filter gradients.
    """

    __slots__ = ()
    is_last_resort = True
    takes_volumes = True

    def supports(self, problem: ConvProblem) -> str | None:
        return loaded_build().why_not_compiled or why_too_large(problem)

    def supports_micro_batch(self, problem: ConvProblem, micro_batch_size: int) -> str | None:
        if problem.operation is Operation.BACKWARD_FILTER and problem.item_bytes < 4:
            return f"sums over micro-batches would be rounded to {problem.dtype} after each; it only runs undivided"
        return None

    def can_run_undivided(self, problem: ConvProblem) -> bool:
        return True

    def depth(self, problem: ConvProblem) -> tuple[int, int, int, int, int]:
        if not problem.is_volume:
            return super().depth(problem)
        return problem.stride[0], problem.padding[0], problem.dilation[0], 0, problem.t

    def band(
        self, problem: ConvProblem, n: int, rows: tuple[int, int], above: int
    ) -> tuple[CompiledStage, Workspace] | None:
        return None if problem.is_volume else super().band(problem, n, rows, above)

    def fuses(self, problem: ConvProblem) -> bool:
        return False

    def fuses_moments(self, problem: ConvProblem) -> bool:
        return False


# One matrix product over all taps and channels without an im2col matrix (implicit_gemm.cpp): register tiles read small
# packed windows of the image. Any stride, padding, dilation and groups.
IMPLICIT_GEMM = ExactAlgorithm("implicit-gemm", version=8)
# 1x1 filters as matrix products on x and y in place, in either memory format (pointwise.cpp). Any stride and groups, no
# padding. For BACKWARD_FILTER in float32, the first thread adds to dw itself, the other threads to copies of dw.
POINTWISE = ExactAlgorithm("pointwise", _not_pointwise, version=8, normalizes=_all)
# Depthwise, and small groups of channels, by direct sums (depthwise.cpp). Every output is a sum over the few channels
# of its group. Each register tile of outputs reads neighbouring columns from zero-padded windows, or neighbouring
# channels in place. Any stride, padding, dilation and channel multiplier.
DEPTHWISE = ExactAlgorithm("depthwise", _not_depthwise, version=7, normalizes=_with_a_filter_a_channel)
LOOP_NEST = LoopNest("loop-nest")
ALGORITHMS = (IMPLICIT_GEMM, POINTWISE, DEPTHWISE)
