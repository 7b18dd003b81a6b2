"""Loads the build that fits this processor and declares its functions.

The libraries take pointers, each with the bytes that may be read and written there, sizes in elements and the thread
count. Before they touch anything they check that the operands belong together and that every buffer holds what the call
needs; a call that they refuse raises (``_accepted``). Their workspace is handed in; of their own they allocate only
tables that do not grow with the images (offsets, and one block of filter taps a thread: tens of KiB). Which build is
taken follows torch's own choice (``ATEN_CPU_CAPABILITY`` lowers both);
``MUCUDNN_BUILD=torch`` takes none.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.machinery import EXTENSION_SUFFIXES
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mucudnn.kernels.contract.algorithm import Workspace
from mucudnn.kernels.contract.epilogue import Epilogue
from mucudnn.words.errors import InvalidInputError, UnavailableError
from mucudnn.words.problem import ITEM_BYTES, ConvProblem, MemoryFormat, Operation

BUILDS = ("avx512", "avx2", "plain")
_LARGEST_BUILD = {"AVX512": "avx512", "AVX2": "avx2"}  # by torch.backends.cpu.get_cpu_capability()

_LARGEST_SIZE = 2**30
_NO_MEMORY = -5  # among its refusals
_CHANNELS_LAST = MemoryFormat.CHANNELS_LAST  # looked up in every call
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
_ELEMENTS = {"float32": 0, "bfloat16": 1, "float16": 2, "float64": 3}
_DTYPES_OF_MOST = tuple(dtype for dtype in _ELEMENTS if dtype != "float64")


class _Size(ctypes.c_int64):
    """A parameter that a user's number reaches. Ctypes would cut off what 64 bits do not hold."""

    @classmethod
    def from_param(cls, value: int) -> _Size:
        return cls(min(max(value, 0), 2**63 - 1))


_int, _int64, _pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
_buffer = (_pointer, _int64)  # prepared, scratch or a bias, and its bytes


class Operand(ctypes.Structure):
    """x, y, w or dw: dense in one of the memory formats. element: the number of its type among ``_ELEMENTS``."""

    _fields_ = [
        ("data", _pointer),
        *((name, _int64) for name in ("bytes", "size_0", "size_1", "size_2", "size_3", "channels_last", "element")),
    ]


class Geometry(ctypes.Structure):
    """Filter size, stride, padding, dilation and groups of a convolution."""

    _fields_ = [
        (name, _int64)
        for name in ("r", "s", "stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w", "groups")
    ]


class EpilogueArgument(ctypes.Structure):
    """An ``Epilogue``: what is added and its bytes, and the number of its activation among ``_ACTIVATIONS``."""

    _fields_ = [("added", _pointer), ("bytes", _int64), ("activation", _int64)]


class Stage(ctypes.Structure):
    """All that one algorithm computes of a call; x, w, y: of the whole mini-batch, whose addresses come with the call.

    is_open: whether the filter is prepared. tile: the outputs of a tile in one direction, of Winograd. slices: the
    first sample of each, and how many.
    """

    _fields_ = [
        ("geometry", Geometry),
        *((name, Operand) for name in ("x", "w", "y")),
        *((name, _int64) for name in ("operation", "is_open", "tile", "bias_bytes", "prepared_bytes", "scratch_bytes")),
        *((name, _int64) for name in ("threads", "slice_count")),
        ("slices", ctypes.POINTER(_int64)),
    ]


def operand(problem: ConvProblem, tensor: Tensor) -> Operand:
    """Describe a tensor of the problem as the libraries see it.

    Raises ``InvalidInputError`` where it is not dense in the problem's memory format, or of another dtype.
    """
    require_dense(problem, tensor)
    channels_last = problem.memory_format is _CHANNELS_LAST
    return Operand(tensor.data_ptr(), tensor.nbytes, *tensor.shape, channels_last, _ELEMENTS[problem.dtype])


def require_dense(problem: ConvProblem, tensor: Tensor) -> Tensor:
    """Return the tensor. Raises ``InvalidInputError`` as ``operand``."""
    require_dtype(problem, "a tensor", tensor)
    channels_last = problem.memory_format is _CHANNELS_LAST
    if not (tensor.is_contiguous(memory_format=torch.channels_last) if channels_last else tensor.is_contiguous()):
        raise InvalidInputError(
            f"a tensor of {tuple(tensor.shape)} has the strides {tensor.stride()}; it must be dense and "
            f"{problem.memory_format} for the compiled algorithms"
        )
    return tensor


def bias_span(problem: ConvProblem, bias: Tensor | None) -> tuple[int | None, int]:
    """Return where a bias, or none, begins, and its bytes. Raises ``InvalidInputError`` for one of another dtype."""
    if bias is not None:
        require_dtype(problem, "the bias", bias)
    return span(bias)


def epilogue_argument(problem: ConvProblem, epilogue: Epilogue | None) -> EpilogueArgument | None:
    """Describe an epilogue as the libraries see it. Raises ``InvalidInputError`` as ``operand``."""
    if epilogue is None:
        return None
    added = (None, 0) if epilogue.added is None else span(require_dense(problem, epilogue.added))
    return EpilogueArgument(*added, activation_number(epilogue.activation))


def activation_number(activation: str | None) -> int:
    """Return the number by which the libraries know an activation, or none."""
    return _ACTIVATIONS.index(activation)


def require_dtype(problem: ConvProblem, what: str, tensor: Tensor) -> None:
    """Raise ``InvalidInputError`` where a tensor of the problem has another dtype."""
    if tensor.dtype is not _DTYPES[problem.dtype]:
        raise InvalidInputError(f"{what} has dtype {tensor.dtype}; it must be that of the problem, {problem.dtype}")


def shape_of(problem: ConvProblem, shape: tuple[int, int, int, int]) -> Operand:
    """Describe a tensor of the problem without its data."""
    size_bytes, is_channels_last = prod(shape) * problem.item_bytes, problem.memory_format is _CHANNELS_LAST
    return Operand(None, size_bytes, *shape, is_channels_last, _ELEMENTS[problem.dtype])


def span(buffer: Tensor | None) -> tuple[int | None, int]:
    """Return where a buffer begins, and its bytes."""
    return (None, 0) if buffer is None else (buffer.data_ptr(), buffer.nbytes)


@lru_cache(maxsize=1024)
def geometry(problem: ConvProblem) -> Geometry:
    """Return the problem's geometry; kept, since building it costs as much as a tiny convolution."""
    return Geometry(problem.r, problem.s, *problem.stride, *problem.padding, *problem.dilation, problem.groups)


def element_number(problem: ConvProblem) -> int:
    """Return the number by which the libraries know the problem's dtype."""
    return _ELEMENTS[problem.dtype]


def operation_number(problem: ConvProblem) -> int:
    """Return the number by which the libraries know the problem's operation."""
    return _OPERATIONS.index(problem.operation)


def bound_stage(
    name: str,
    problem: ConvProblem,
    batch_size: int,
    slices: Sequence[slice],
    workspace: Workspace,
    *,
    is_open: bool = False,
    tile: int = 0,
) -> CompiledStage:
    """Bind what does not change from call to call to the entry of this name."""

    shapes = problem.x_shape(batch_size), problem.w_shape(), problem.y_shape(batch_size)
    bounds = [bound for each in slices for bound in (each.start, each.stop - each.start)]
    stage = Stage(
        geometry(problem),
        *(shape_of(problem, shape) for shape in shapes),
        operation_number(problem),
        is_open,
        tile,
        problem.k * problem.item_bytes,
        workspace.prepared_bytes,
        workspace.scratch_bytes,
        torch.get_num_threads(),
        len(slices),
        (_int64 * len(bounds))(*bounds),
    )
    return CompiledStage(getattr(library(), f"mucudnn_{name}_stage"), stage, problem)


class CompiledStage:
    """A bound stage: an entry, and what it is bound to."""

    __slots__ = ("_function", "_problem", "_stage", "entry")

    def __init__(self, entry: Callable[..., int], stage: Stage, problem: ConvProblem) -> None:
        self._function, self._stage, self._problem = entry, stage, problem
        address = ctypes.cast(entry, _pointer).value  # type: ignore[arg-type]
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
        of_y = epilogue_argument(self._problem, epilogue)
        self._function(self._stage, x, w, y, bias, prepared, scratch, of_y)


_OPERATIONS = (Operation.FORWARD, Operation.BACKWARD_DATA, Operation.BACKWARD_FILTER)
_ACTIVATIONS = (None, "ReLU", "ReLU6", "SiLU")
_operand, _geometry, _epilogue = (ctypes.POINTER(each) for each in (Operand, Geometry, EpilogueArgument))
_stage: list[type] = [ctypes.POINTER(Stage), *[_pointer] * 6, _epilogue]
_SIGNATURES: dict[str, list[type]] = {
    "winograd_prepared_bytes": [_geometry, _int, *[_Size] * 2],
    "winograd_scratch_bytes": [_geometry, _int, _int, *[_Size] * 5, _int],
    "winograd_transform_filter": [_geometry, _int, _int, _operand, *_buffer, _int],
    "winograd_forward": [_geometry, _int, _int, _operand, *_buffer, *_buffer, _operand, *_buffer, _int, _epilogue],
    "winograd_accumulate": [_geometry, _int, _operand, _operand, *_buffer, *_buffer, _int],
    "winograd_add_filter_gradient": [_geometry, _int, *_buffer, _operand, _int],
    "winograd_stage": _stage,
    "implicit_gemm_prepared_bytes": [_geometry, _Size, _Size],
    "implicit_gemm_scratch_bytes": [_geometry, _int, *[_Size] * 5, _int],
    "implicit_gemm_gradient_scratch_bytes": [_geometry, *[_Size] * 5, _int],
    "implicit_gemm_pack_filter": [_geometry, _int, _operand, *_buffer, _int],
    "implicit_gemm_forward": [_geometry, _int, _operand, *_buffer, *_buffer, _operand, *_buffer, _int, _epilogue],
    "implicit_gemm_accumulate": [_geometry, _operand, _operand, *_buffer, *_buffer, _int],
    "implicit_gemm_add_filter_gradient": [_geometry, *_buffer, _operand, _int],
    "implicit_gemm_stage": _stage,
    "pointwise_prepared_bytes": [_geometry, _int, _int64, *[_Size] * 2, _int],
    "pointwise_scratch_bytes": [_geometry, _int, _int64, _int, *[_Size] * 5, _int],
    "pointwise_pack_filter": [_geometry, _int, _operand, *_buffer, _int],
    "pointwise_forward": [_geometry, _int, _operand, *_buffer, *_buffer, _operand, *_buffer, _int, _epilogue],
    "pointwise_accumulate": [_geometry, _operand, _operand, _operand, *_buffer, *_buffer, _int],
    "pointwise_add_filter_gradient": [_geometry, *_buffer, _operand, _int],
    "pointwise_stage": _stage,
    "depthwise_prepared_bytes": [_geometry, _int64, _operand],
    "depthwise_scratch_bytes": [_geometry, _int64, _operand, _operand, _int],
    "depthwise_pack_filter": [_geometry, _int, _operand, *_buffer, _int],
    "depthwise_forward": [_geometry, _int, _operand, *_buffer, *_buffer, _operand, *_buffer, _int, _epilogue],
    "depthwise_accumulate": [_geometry, _operand, _operand, *_buffer, *_buffer, _int],
    "depthwise_add_filter_gradient": [_geometry, *_buffer, _operand, _int],
    "depthwise_stage": _stage,
    "loop_nest_forward": [_geometry, _int, _operand, _operand, *_buffer, _operand, _int],
    "loop_nest_add_filter_gradient": [_geometry, _operand, _operand, _operand, _int],
    "loop_nest_stage": _stage,
}


@dataclass(frozen=True, slots=True)
class LoadedBuild:
    """``name`` is one of BUILDS, or ``torch`` with ``library`` None and the reason in ``why_not_compiled``."""

    name: str
    library: ctypes.CDLL | None
    why_not_compiled: str = ""


@lru_cache(maxsize=1)
def loaded_build() -> LoadedBuild:
    """Return the fastest build that this processor runs and that was built; loaded on the first call."""
    largest = _LARGEST_BUILD.get(torch.backends.cpu.get_cpu_capability(), "plain")
    wanted = os.environ.get("MUCUDNN_BUILD") or largest
    runnable = BUILDS[BUILDS.index(largest) :]
    if wanted not in (*runnable, "torch"):
        raise InvalidInputError(f"MUCUDNN_BUILD is {wanted!r}; this processor runs {', '.join(runnable)} and torch")
    if wanted == "torch":
        return LoadedBuild("torch", None, "MUCUDNN_BUILD=torch asks for torch's operators")
    reasons = []
    for name in BUILDS[BUILDS.index(wanted) :]:
        path = _path(name)
        if path is None:
            reasons.append(f"{name} was not built")
            continue
        try:
            return LoadedBuild(name, _declared(ctypes.CDLL(str(path))))
        except OSError as error:  # an OpenMP runtime that torch does not share, or another machine's build
            reasons.append(f"{name} cannot be loaded: {error}")
    return LoadedBuild("torch", None, "; ".join(reasons) + "; install with a C++ compiler (g++) at hand")


def library() -> ctypes.CDLL:
    """Return the loaded library. Raises ``UnavailableError`` where nothing compiled can be used."""
    build = loaded_build()
    if build.library is None:
        raise UnavailableError(f"the compiled algorithms are not available: {build.why_not_compiled}")
    return build.library


def why_too_large(problem: ConvProblem) -> str | None:
    """Return why the compiled algorithms cannot count every size of this problem, or ``None``."""
    pad_h, pad_w = problem.padding
    padded = problem.h + 2 * pad_h, problem.w + 2 * pad_w
    largest = max(problem.c, problem.k, *padded, *problem.stride, *problem.dilation)
    if largest > _LARGEST_SIZE:
        return f"a size is {largest}; the compiled algorithms take up to {_LARGEST_SIZE}"
    return None


def why_not(problem: ConvProblem) -> str | None:
    """Return why a compiled algorithm cannot compute with this problem's dtype here, or ``None``."""
    if problem.dtype not in _DTYPES_OF_MOST:
        return f"the dtype is {problem.dtype}; this algorithm is compiled for {', '.join(_DTYPES_OF_MOST)}"
    return loaded_build().why_not_compiled or None


def build_name() -> str:
    """Return ``avx512``, ``avx2``, ``plain``, or ``torch`` where nothing compiled can be used."""
    return loaded_build().name


def _path(build: str) -> Path | None:
    candidates = [Path(__file__).with_name(f"_{build}{suffix}") for suffix in EXTENSION_SUFFIXES]
    return next((path for path in candidates if path.exists()), None)


def _abi() -> list[int]:
    """Return the numbers that C++ shares with this module, in the order of ``mucudnn_abi``."""
    structures = [ctypes.sizeof(one) for one in (Operand, Geometry, EpilogueArgument, Stage)]
    enums = (_ELEMENTS, _ACTIVATIONS, _OPERATIONS)
    return [*structures, _LARGEST_SIZE, _NO_MEMORY, *(number for each in enums for number in range(len(each)))]


def _declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the functions of a build. Raises ``OSError`` for one of other sources."""
    expected = _abi()
    try:
        loaded.mucudnn_abi.restype = ctypes.POINTER(_int64)
        is_ours = loaded.mucudnn_abi()[: len(expected)] == expected
    except AttributeError:
        is_ours = False
    if not is_ours:
        raise OSError("it was built from other sources; build it again")
    loaded.mucudnn_refusal.argtypes, loaded.mucudnn_refusal.restype = [], ctypes.c_char_p
    loaded.mucudnn_vector_length.argtypes, loaded.mucudnn_vector_length.restype = [], _int64
    fingerprint = loaded.mucudnn_fingerprint  # any number may be one: it refuses nothing
    fingerprint.argtypes, fingerprint.restype = [_pointer, _int64, _int], _int64
    accepted = partial(_accepted, loaded.mucudnn_refusal)
    for name, arguments in _SIGNATURES.items():
        function = getattr(loaded, f"mucudnn_{name}")
        function.argtypes, function.restype, function.errcheck = arguments, _int64, accepted
    return loaded


def _accepted(refusal: Callable[[], bytes], result: int, function: Any, _: tuple[object, ...]) -> int:
    """Return the result. Raises ``InvalidInputError`` for a call that was refused, which has touched nothing."""
    if result >= 0:
        return result
    words = refusal().decode()
    if result == _NO_MEMORY:
        raise torch.OutOfMemoryError(words)
    raise InvalidInputError(f"{function.__name__}: {words}")
