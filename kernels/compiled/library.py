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
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import product
from pathlib import Path
from typing import Any

import torch

from mucudnn.words.errors import InvalidInputError, UnavailableError
from mucudnn.words.problem import ConvProblem, Operation

BUILDS = ("avx512", "avx2", "plain")
_LARGEST_BUILD = {"AVX512": "avx512", "AVX2": "avx2"}  # by torch.backends.cpu.get_cpu_capability()

_LARGEST_SIZE = 2**30
_NO_MEMORY = -5  # among its refusals
# Values that C++ knows by numbers
ELEMENTS = {"float32": 0, "bfloat16": 1, "float16": 2, "float64": 3}
ACTIVATIONS = (None, "ReLU", "ReLU6", "SiLU")
OPERATIONS = (Operation.FORWARD, Operation.BACKWARD_DATA, Operation.BACKWARD_FILTER)
PHASES = (1, 2, 4)  # open, step, close

_DTYPES_OF_MOST = tuple(dtype for dtype in ELEMENTS if dtype != "float64")
_ALGORITHMS = ("winograd", "implicit_gemm", "pointwise", "depthwise", "loop_nest")
_int, _int64, _pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p


class Operand(ctypes.Structure):
    """x, y, w or dw: dense in one of the memory formats. element: the number of its type among ``ELEMENTS``."""

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
    """An ``Epilogue``: what is added and its bytes, and the number of its activation among ``ACTIVATIONS``."""

    _fields_ = [("added", _pointer), ("bytes", _int64), ("activation", _int64)]


class Stage(ctypes.Structure):
    """All that one algorithm computes of a call; x, w, y: of the whole mini-batch, whose addresses come with the call.

    phases: a sum of ``PHASES``. tile: the outputs of a tile in one direction, of Winograd. slices: the first sample of
    each, and how many.
    """

    _fields_ = [
        ("geometry", Geometry),
        *((name, Operand) for name in ("x", "w", "y")),
        *((name, _int64) for name in ("operation", "phases", "tile", "bias_bytes", "prepared_bytes", "scratch_bytes")),
        *((name, _int64) for name in ("threads", "slice_count")),
        ("slices", ctypes.POINTER(_int64)),
    ]


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
    enums = (ELEMENTS, ACTIVATIONS, OPERATIONS)
    numbers = (number for each in enums for number in range(len(each)))
    return [*structures, _LARGEST_SIZE, _NO_MEMORY, *numbers, *PHASES]


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
    stage = ctypes.POINTER(Stage)
    signatures = {
        "prepared_bytes": [stage],
        "scratch_bytes": [stage],
        "stage": [stage, *[_pointer] * 6, ctypes.POINTER(EpilogueArgument)],
    }
    for algorithm, (what, arguments) in product(_ALGORITHMS, signatures.items()):
        function = getattr(loaded, f"mucudnn_{algorithm}_{what}")
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
