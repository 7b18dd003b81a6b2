"""Loads the build of mucudnn's C++ code that suits this processor, and declares the C++ functions.

The C++ functions take pointers, the number of accessible bytes behind every pointer, sizes in elements and the thread
count. Before reading or writing anything, the functions check that the operands match and the buffers are large enough;
a refused call raises an error (``_accepted``). The caller provides the workspace. The functions themselves allocate
only tables that do not grow with the images (offsets, and one block of filter taps per thread: tens of KiB). The build
follows torch's choice of instruction set (``ATEN_CPU_CAPABILITY`` lowers both); ``MUCUDNN_BUILD=torch`` selects no
build, and torch's operators run instead.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch

from mucudnn.core.errors import InvalidInputError, UnavailableError
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.kernels.algorithm import ACTIVATIONS, MOMENT_PADDING, MOMENT_ROWS

BUILDS = ("avx512", "avx2", "plain")
_LARGEST_BUILD = {"AVX512": "avx512", "AVX2": "avx2"}  # build by torch.backends.cpu.get_cpu_capability()

_LARGEST_SIZE = 2**30
_NO_MEMORY = -5  # error code of the C++ functions when out of memory
# Numbers of the dtypes in the C++ code.
ELEMENTS = {"float32": 0, "bfloat16": 1, "float16": 2, "float64": 3}
OPERATIONS = (Operation.FORWARD, Operation.BACKWARD_DATA, Operation.BACKWARD_FILTER)
PHASES = (1, 2, 4)  # numbers of open, step and close
# Of programs: kinds of steps, what an elementwise step does with its second operand, and functions.
STEPS = (
    *("convolution", "copy", "elementwise", "max_pool", "average_pool", "resize", "shuffle", "moments", "normalize"),
    "scale",
)
COMBINATIONS = (None, "add", "multiply")
FUNCTIONS = (None, *ACTIVATIONS, "sigmoid", "hardsigmoid", "hardswish", "leaky_relu", "gelu", "gelu_tanh")

_PRODUCTS = ("floats", "pairs", "tiles")  # in the order of enum Products (common/pairs.h)
_DTYPES_OF_MOST = tuple(dtype for dtype in ELEMENTS if dtype != "float64")
_int64, _pointer = ctypes.c_int64, ctypes.c_void_p

ROWS_OF_FRAMES = 2  # of enum MemoryFormat (common/abi.h)


class Operand(ctypes.Structure):
    """One of the tensors x, y, w or dw as a C struct, dense in one memory format.

    Images and their filters have a depth, size_2, of 1.

    memory_format: 0 if contiguous, 1 with the channels last, ``ROWS_OF_FRAMES`` if also rows are before frames.
    element: number of the tensor's dtype in ``ELEMENTS``.
    """

    _fields_ = [
        ("data", _pointer),
        *((name, _int64) for name in ("bytes", *(f"size_{i}" for i in range(5)), "memory_format", "element")),
    ]


class Geometry(ctypes.Structure):
    """Filter size, stride, padding, dilation and groups of a convolution, as a C struct.

    pad_h: padding above.
    pad_d: of volumes, the padding before x that the first used tap reads.
    first_tap: of volumes, the first tap of the filter that is used.
    taps: of volumes, how many are used.
    """

    _fields_ = [
        *((name, _int64) for name in ("r", "s", "stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w")),
        *((name, _int64) for name in ("groups", "pad_below", "stride_d", "pad_d", "dilation_d", "first_tap", "taps")),
    ]


class EpilogueArgument(ctypes.Structure):
    """An ``Epilogue`` and a ``Prologue`` as a C struct.

    The fields are the added tensor, its bytes, the activation's number in ``FUNCTIONS``, and the moments; how many
    channels the prologue has, the dtype of its parameters, its function's number, the slope, and its vectors.
    """

    _fields_ = [
        *(("added", _pointer), ("bytes", _int64), ("activation", _int64)),
        *(("moments", _pointer), ("moments_bytes", _int64)),
        *((name, _int64) for name in ("channels", "parameter_element", "function")),
        ("slope", ctypes.c_double),
        *((name, _pointer) for name in ("mean", "inverse", "weight", "bias")),
    ]


class Stage(ctypes.Structure):
    """The part of a convolution call that one algorithm computes, on some slices of the mini-batch, as a C struct.

    x, w and y describe the whole mini-batch; their addresses are passed with each call.

    phases: the sum of the numbers in ``PHASES`` of the phases to run.
    tile: outputs of a Winograd tile in one direction.
    normalizes: whether calls have a ``Prologue``.
    slices: the first sample and the number of samples of each slice.
    """

    _fields_ = [
        ("geometry", Geometry),
        *((name, Operand) for name in ("x", "w", "y")),
        *((name, _int64) for name in ("operation", "phases", "tile", "bias_bytes", "prepared_bytes", "scratch_bytes")),
        *((name, _int64) for name in ("threads", "normalizes", "slice_count")),
        ("slices", ctypes.POINTER(_int64)),
    ]


class Place(ctypes.Structure):
    """An address as a C struct: ``offset`` bytes behind the entry ``base`` of a table, of which entry 0 is null."""

    _fields_ = [("base", _int64), ("offset", _int64)]


class View(ctypes.Structure):
    """Some rows of a tensor (N, C, H, W) as a C struct; strides in elements. c = 0 for no tensor.

    element: number of the tensor's dtype in ``ELEMENTS``; 0 for dtypes of which elements are only copied.
    """

    _fields_ = [
        ("place", Place),
        *((name, _int64) for name in ("element", "n", "c", "h", "w", "stride_n", "stride_c", "stride_h", "stride_w")),
    ]


class ProgramStep(ctypes.Structure):
    """One operator on one band of rows, with every size and address resolved, as a C struct (program/step.h)."""

    _fields_ = [
        *((name, _int64) for name in ("kind", "operation")),
        *((name, _pointer) for name in ("stage", "entry")),
        *((name, View) for name in ("out", "x", "other")),
        *(("places", Place * 4), ("numbers", _int64 * 12), ("tables", _pointer * 6), ("values", ctypes.c_double * 2)),
    ]


class NormArgument(ctypes.Structure):
    """A normalization of a tensor (N, C, pixels) as a C struct (normalization/arguments.h).

    element, parameter_element, running_element: numbers in ``ELEMENTS`` of the dtypes of the tensor, of the weight and
    the bias, and of the running statistics.
    sets: whose statistics: 0 for channels over all samples, -1 for pixels, or how many groups of channels of a sample.
    function: number in ``FUNCTIONS``.
    """

    _fields_ = [
        *((name, _int64) for name in ("element", "parameter_element", "running_element", "n", "c", "pixels")),
        *((name, _int64) for name in ("channels_last", "sets", "function", "is_fixed", "threads")),
        *((name, ctypes.c_double) for name in ("eps", "slope")),
    ]


# The tensors of a normalization, as the C struct ``Operands``: of each its address, or 0, and its bytes.
NORM_OPERANDS = struct.Struct("30q")


_STAGE = ctypes.POINTER(Stage)
_NORM = [ctypes.POINTER(NormArgument), ctypes.c_char_p]
_ARGUMENTS = {  # by the end of a function's name
    "_prepared_bytes": [_STAGE],
    "_scratch_bytes": [_STAGE],
    "_stage": [_STAGE, *[_pointer] * 6, ctypes.POINTER(EpilogueArgument)],
    "program_run": [_pointer, _int64, _pointer, _int64],
    "set_threads": [_int64],
    "norm_mask_bytes": _NORM[:1],
    "norm_moments": [*_NORM, ctypes.c_double],
    "norm_forward": _NORM,
    "norm_backward": _NORM,
}


@dataclass(frozen=True, slots=True)
class LoadedBuild:
    """The build of the C++ code in use, or the reason why there is none.

    name: ``avx512``, ``avx2`` or ``plain``; ``torch`` without a build.
    wanted: the build that ``MUCUDNN_BUILD`` names, or the best for this processor.
    library: None without a build.
    why_not_compiled: the reason why there is no build.
    """

    name: str
    wanted: str
    library: ctypes.CDLL | None
    why_not_compiled: str = ""


@lru_cache(maxsize=1)
def loaded_build() -> LoadedBuild:
    """Load the fastest available build of the C++ code that this processor supports, once, and return it."""
    largest = largest_build()
    wanted = os.environ.get("MUCUDNN_BUILD") or largest
    runnable = BUILDS[BUILDS.index(largest) :]
    if wanted not in (*runnable, "torch"):
        raise InvalidInputError(f"MUCUDNN_BUILD is {wanted!r}; this processor runs {', '.join(runnable)} and torch")
    if wanted == "torch":
        return LoadedBuild("torch", wanted, None, "MUCUDNN_BUILD=torch selects torch's operators")
    usable, reasons = BUILDS[BUILDS.index(wanted) :], []
    for name in filter(usable.__contains__, builds()):
        try:
            return LoadedBuild(name, wanted, _declared(ctypes.CDLL(str(_path(name)))))
        except OSError as error:  # for example because of another OpenMP runtime than torch's
            reasons.append(f"{name} cannot be loaded: {error}")
    reason = "; ".join(reasons) or f"no build for {' or '.join(usable)} was compiled when mucudnn was installed"
    return LoadedBuild("torch", wanted, None, f"{reason}; {_how_to_compile()}")


def shortcoming() -> str | None:
    """Return what is missing of the C++ code and how to get it; None if the wanted build runs."""
    build = loaded_build()
    if build.name == build.wanted:
        return None
    return build.why_not_compiled or f"{build.name} runs, but {build.wanted} was not compiled; {_how_to_compile()}"


def _how_to_compile() -> str:
    named = ",".join(dict.fromkeys((largest_build(), *builds())))
    return (
        "install the wheel of mucudnn, which has every build, or with a C++ compiler (g++), in a clone: "
        f"MUCUDNN_BUILDS={named} pip install --force-reinstall --no-deps ."
    )


def builds() -> tuple[str, ...]:
    """Return the names of the builds that are installed, whether this processor runs them or not."""
    return tuple(name for name in BUILDS if _path(name) is not None)


def largest_build() -> str:
    """Return the name of the largest build that this processor runs, as torch uses it."""
    return _LARGEST_BUILD.get(torch.backends.cpu.get_cpu_capability(), "plain")


@cache
def function(name: str) -> Callable[..., int]:
    """Return a C++ function, by its name without ``mucudnn_``, such as ``pointwise_stage``.

    A call that it refuses raises an error (``_accepted``). Raises ``UnavailableError`` if no build of the C++ code can
    be used, or if the build does not have the function.
    """
    build = loaded_build()
    if build.library is None:
        raise UnavailableError(f"the compiled algorithms are not available: {build.why_not_compiled}")
    declared: Any = getattr(build.library, f"mucudnn_{name}", None)
    if declared is None:
        raise UnavailableError(f"the build {build.name} for this processor does not have {name}")
    declared.argtypes = next(types for kind, types in _ARGUMENTS.items() if name.endswith(kind))
    declared.restype, declared.errcheck = _int64, partial(_accepted, build.library.mucudnn_refusal)
    return cast(Callable[..., int], declared)


def why_too_large(problem: ConvProblem) -> str | None:
    """Return which size of this problem is too large for the C++ algorithms, as a sentence; None if none is."""
    padded = [extent + 2 * padding for extent, padding in zip(problem.extent, problem.padding, strict=True)]
    largest = max(problem.c, problem.k, *padded, *problem.stride, *problem.dilation)
    if largest > _LARGEST_SIZE:
        return f"a size is {largest}; the compiled algorithms take up to {_LARGEST_SIZE}"
    return None


def why_not(problem: ConvProblem, algorithm: str) -> str | None:
    """Return why a C++ algorithm is not compiled, or not for this problem's dtype and sizes; None if it is."""
    if problem.dtype not in _DTYPES_OF_MOST:
        return f"the dtype is {problem.dtype}; this algorithm is compiled for {', '.join(_DTYPES_OF_MOST)}"
    build = loaded_build()
    if build.library is not None and not hasattr(build.library, f"mucudnn_{algorithm.replace('-', '_')}_stage"):
        return f"the build {build.name} for this processor does not have it"
    return build.why_not_compiled or why_too_large(problem)


def bfloat16_products() -> str:
    """Return how bfloat16 is multiplied: as ``floats``, in ``pairs`` (AVX512_BF16) or in ``tiles`` of pairs (AMX)."""
    library = loaded_build().library
    return _PRODUCTS[library.mucudnn_products() if library else 0]


def _path(build: str) -> Path | None:
    path = Path(__file__).with_name(f"_{build}.so")
    return path if path.exists() else None


def _declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the functions of a C++ build, and return it. Raises ``OSError`` if it was built from other sources."""
    # The numbers on which Python and the C++ code must agree, in the order of the function mucudnn_abi.
    structures = (Operand, Geometry, EpilogueArgument, Stage, ProgramStep, NormArgument)
    sizes = [*(ctypes.sizeof(structure) for structure in structures), NORM_OPERANDS.size]
    enums = (ELEMENTS, FUNCTIONS, OPERATIONS, STEPS, COMBINATIONS)
    numbers = chain.from_iterable(range(len(enum)) for enum in enums)
    expected = [*sizes, _LARGEST_SIZE, _NO_MEMORY, *numbers, *PHASES, MOMENT_ROWS, MOMENT_PADDING]
    try:
        loaded.mucudnn_abi.restype = ctypes.POINTER(_int64)
        is_ours = loaded.mucudnn_abi()[: len(expected)] == expected
    except AttributeError:
        is_ours = False
    if not is_ours:
        raise OSError("it was built from other sources; build it again")
    loaded.mucudnn_refusal.argtypes, loaded.mucudnn_refusal.restype = [], ctypes.c_char_p
    for constant in (loaded.mucudnn_vector_length, loaded.mucudnn_products):
        constant.argtypes, constant.restype = [], _int64
    return loaded


def _accepted(refusal: Callable[[], bytes], result: int, function: Any, _: tuple[object, ...]) -> int:
    """Return the result of a C++ function. Raises ``InvalidInputError`` if the function refused the call.

    A refused call has written nothing.
    """
    if result >= 0:
        return result
    words = refusal().decode()
    if result == _NO_MEMORY:
        raise torch.OutOfMemoryError(words)
    raise InvalidInputError(f"{function.__name__}: {words}")
