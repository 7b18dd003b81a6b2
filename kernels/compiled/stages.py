"""Stages of the C++ algorithms. A stage is the part of a convolution call that one algorithm computes.

The C++ functions ("entries") get a stage as an argument, and check operands and buffer sizes (common/stage.h).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from mucudnn.core.errors import InvalidInputError, UnavailableError
from mucudnn.core.problem import ITEM_BYTES, ConvProblem, MemoryFormat, Operation
from mucudnn.kernels.compiled.library import (
    ACTIVATIONS,
    ELEMENTS,
    OPERATIONS,
    PHASES,
    EpilogueArgument,
    Geometry,
    Operand,
    Stage,
    build_name,
    library,
)
from mucudnn.kernels.contract.algorithm import Workspace
from mucudnn.kernels.contract.epilogue import Epilogue

_MOST = 2**63 - 1
_CHANNELS_LAST = MemoryFormat.CHANNELS_LAST  # a local name, because every call uses it
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
_OPEN, _STEP, _CLOSE = PHASES
_ALL = sum(PHASES)


class Entries:
    """The C++ functions of one algorithm, called by the methods that the class ``Algorithm`` requires."""

    __slots__ = ()

    @property
    def entry(self) -> str:
        """Name of the algorithm in the names of the C++ functions."""
        raise NotImplementedError

    @property
    def tile(self) -> int:
        """For Winograd, the number of outputs of a tile in one direction; otherwise 0."""
        return 0

    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        stage = self.stage(problem, _shapes(problem, micro_batch_size))
        return Workspace(self._entry("prepared_bytes")(stage), self._entry("scratch_bytes")(stage))

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
        stage = _kept_stage(self, problem, (x.shape, w.shape, y.shape), _STEP, sizes, torch.get_num_threads())
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
        sizes = problem.k * problem.item_bytes, workspace.prepared_bytes, workspace.scratch_bytes
        stage = self.stage(problem, _shapes(problem, batch_size), _ALL, sizes, slices)
        return CompiledStage(self._entry("stage"), stage, problem)

    def band(
        self, problem: ConvProblem, n: int, rows: tuple[int, int], above: int
    ) -> tuple[CompiledStage, Workspace] | None:
        """Return a callable as ``bound`` does, and its workspace, for some rows of x and of y of ``n`` samples.

        problem: of whole images, FORWARD or BACKWARD_DATA. rows: of x and y. above: rows of zeros above those of x.
        The filter is prepared before, by ``open``.
        """
        shapes = [
            (size, c, rows[i // 2], w) if i != 1 else (size, c, h, w)
            for i, (size, c, h, w) in enumerate(_shapes(problem, n))
        ]
        extent, stride = problem.dilation[0] * (problem.r - 1) + 1, problem.stride[0]
        missing = (rows[1] - 1) * stride + extent - above - rows[0]
        padding = above, 0 if -stride < missing < 0 else missing  # a stride may leave rows over
        stage = self.stage(problem, shapes, _STEP, slices=[slice(0, n)], padding=padding)
        workspace = Workspace(self._entry("prepared_bytes")(stage), self._entry("scratch_bytes")(stage))
        sizes = problem.k * problem.item_bytes, workspace.prepared_bytes, workspace.scratch_bytes
        stage.bias_bytes, stage.prepared_bytes, stage.scratch_bytes = sizes
        return CompiledStage(self._entry("stage"), stage, problem), workspace

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

        shapes: of x, w and y. phases: which of ``open``, ``step`` and ``close`` to run. sizes: bytes of the bias, the
        prepared buffer and the scratch buffer. padding: above and below; None for the problem's.
        """
        above, below = padding or (problem.padding[0],) * 2
        bounds = [bound for each in slices for bound in (each.start, each.stop - each.start)]
        return Stage(
            Geometry(
                *(problem.r, problem.s, *problem.stride, above, problem.padding[1]),
                *(*problem.dilation, problem.groups, below),
            ),
            *(_described(problem, shape) for shape in shapes),
            *(OPERATIONS.index(problem.operation), phases, self.tile, *sizes, torch.get_num_threads(), len(slices)),
            (ctypes.c_int64 * len(bounds))(*bounds),
        )

    def _run_on_filter(self, phase: int, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        _require_dense(problem, w)
        shapes, sizes = (None, w.shape, None), (0, prepared.nbytes, 0)
        stage = _kept_stage(self, problem, shapes, phase, sizes, torch.get_num_threads())
        self._entry("stage")(stage, None, w.data_ptr(), None, None, prepared.data_ptr(), None, None)

    def _entry(self, what: str) -> Callable[..., int]:
        entry: Callable[..., int] | None = getattr(library(), f"mucudnn_{self.entry}_{what}", None)
        if entry is None:
            raise UnavailableError(f"the build {build_name()} for this processor does not have {self.entry}")
        return entry


@lru_cache(maxsize=4096)
def _kept_stage(
    entries: Entries,
    problem: ConvProblem,
    shapes: tuple[torch.Size | None, ...],
    phase: int,
    sizes: tuple[int, int, int],
    threads: int,
) -> Stage:
    """Return the argument of the C++ functions for one phase (``open``, ``step`` or ``close``) of a micro-batch.

    The argument is cached, because making it takes as long as a tiny convolution. shapes: of x, w and y; None for the
    shape of one sample.
    """
    given = [of_one if shape is None else shape for shape, of_one in zip(shapes, _shapes(problem, 1), strict=True)]
    return entries.stage(problem, given, phase, sizes, [slice(0, given[0][0])])


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
        /,
    ) -> None:
        following = epilogue_argument(self._problem, epilogue)
        self._function(self._stage, x, w, y, bias, prepared, scratch, following)


def epilogue_argument(problem: ConvProblem, epilogue: Epilogue | None) -> EpilogueArgument | None:
    """Convert an epilogue to a C struct; return None for None.

    Raises ``InvalidInputError`` if the epilogue's added tensor is not dense, or has another dtype than the problem.
    """
    if epilogue is None:
        return None
    activation, added = ACTIVATIONS.index(epilogue.activation), epilogue.added
    if added is None:
        return EpilogueArgument(None, 0, activation)
    _require_dense(problem, added)
    return EpilogueArgument(added.data_ptr(), added.nbytes, activation)


def _shapes(problem: ConvProblem, n: int) -> tuple[Sequence[int], ...]:
    return problem.x_shape(n), problem.w_shape(), problem.y_shape(n)


def _described(problem: ConvProblem, shape: Sequence[int]) -> Operand:
    """Describe a dense tensor of this shape for the C++ code, without its address.

    Numbers beyond 64 bits are clamped, so that the C++ code refuses them.
    """
    numbers = (min(number, _MOST) for number in (prod(shape) * problem.item_bytes, *shape))
    return Operand(None, *numbers, problem.memory_format is MemoryFormat.CHANNELS_LAST, ELEMENTS[problem.dtype])


def _require_dense(problem: ConvProblem, tensor: Tensor) -> None:
    """Raise ``InvalidInputError`` if a tensor is not dense in the problem's memory format, or has another dtype."""
    _require_dtype(problem, "a tensor", tensor)
    channels_last = problem.memory_format is _CHANNELS_LAST
    if not (tensor.is_contiguous(memory_format=torch.channels_last) if channels_last else tensor.is_contiguous()):
        raise InvalidInputError(
            f"a tensor of {tuple(tensor.shape)} has the strides {tensor.stride()}; it must be dense and "
            f"{problem.memory_format} for the compiled algorithms"
        )


def _require_dtype(problem: ConvProblem, what: str, tensor: Tensor) -> None:
    if tensor.dtype is not _DTYPES[problem.dtype]:
        raise InvalidInputError(f"{what} has dtype {tensor.dtype}; it must be that of the problem, {problem.dtype}")
