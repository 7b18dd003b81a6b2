"""Loads the build that fits this processor and declares its functions.

The libraries take pointers, sizes in elements, strides in floats and the thread count. Their workspace is handed in;
of their own they allocate only tables that do not grow with the images (offsets, and one block of filter taps a thread:
tens of KiB). Which build is taken follows torch's own choice (``ATEN_CPU_CAPABILITY`` lowers both);
``MUCUDNN_BUILD=torch`` takes none.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

from mucudnn.errors import InvalidInputError, UnavailableError
from mucudnn.problem import ConvProblem, MemoryFormat

BUILDS = ("avx512", "avx2", "plain")
_LARGEST_BUILD = {"AVX512": "avx512", "AVX2": "avx2"}  # by torch.backends.cpu.get_cpu_capability()

_int, _int64, _floats = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p


class Images(ctypes.Structure):
    """x or y: (N, C, H, W) float32, with its strides."""

    _fields_ = [("data", _floats), *((f"size_{i}", _int64) for i in "nchw"), *((f"stride_{i}", _int64) for i in "nchw")]


class Filter(ctypes.Structure):
    """w or dw: (K, C // groups, R, S) float32, with its strides."""

    _fields_ = [("data", _floats), *((f"size_{i}", _int64) for i in "kcrs"), *((f"stride_{i}", _int64) for i in "kcrs")]


class Geometry(ctypes.Structure):
    """What a convolution is, beside its sizes."""

    _fields_ = [
        (name, _int64)
        for name in ("r", "s", "stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w", "groups")
    ]


def images(problem: ConvProblem, tensor: Tensor) -> Images:
    """x or y of the problem as the libraries see it."""
    return Images(tensor.data_ptr(), *tensor.shape, *_strides(problem, tensor))


def filter_of(problem: ConvProblem, w: Tensor) -> Filter:
    """w or dw of the problem as the libraries see it."""
    return Filter(w.data_ptr(), *w.shape, *_strides(problem, w))


@lru_cache(maxsize=1024)
def geometry(problem: ConvProblem) -> Geometry:
    """What the problem is, beside its sizes; kept, since building it costs as much as a tiny convolution."""
    return Geometry(problem.r, problem.s, *problem.stride, *problem.padding, *problem.dilation, problem.groups)


def _strides(problem: ConvProblem, tensor: Tensor) -> tuple[int, int, int, int]:
    """Of a dense tensor. Torch's own say nothing certain about dimensions of size 1."""
    _, channels, height, width = tensor.shape
    if problem.memory_format is MemoryFormat.CHANNELS_LAST:
        return (height * width * channels, 1, width * channels, channels)
    return (channels * height * width, height * width, width, 1)


_images, _filter, _geometry = ctypes.POINTER(Images), ctypes.POINTER(Filter), ctypes.POINTER(Geometry)
_SIGNATURES: dict[str, list[type]] = {
    "vector_length": [],
    "fingerprint": [ctypes.c_void_p, _int64, _int],
    "winograd_filter_floats": [_int] * 4,
    "winograd_scratch_floats": [_int] * 9,
    "winograd_transform_filter": [*[_int] * 4, _filter, _floats, _int],
    "winograd_forward": [*[_int] * 5, _images, _floats, _floats, _images, _floats, _int],
    "winograd_accumulate": [*[_int] * 5, _images, _images, _floats, _floats, _int],
    "winograd_add_filter_gradient": [*[_int] * 3, _floats, _filter, _int],
    "implicit_gemm_filter_floats": [_geometry, _int, _int],
    "implicit_gemm_scratch_floats": [_geometry, *[_int] * 7],
    "implicit_gemm_gradient_scratch_floats": [_geometry, *[_int] * 5],
    "implicit_gemm_pack_filter": [_geometry, _int, _filter, _floats, _int],
    "implicit_gemm_forward": [_geometry, _int, _images, _floats, _floats, _images, _floats, _int],
    "implicit_gemm_accumulate": [_geometry, _images, _images, _floats, _floats, _int],
    "implicit_gemm_add_filter_gradient": [_geometry, _floats, _filter, _int],
}


@dataclass(frozen=True, slots=True)
class LoadedBuild:
    """``name`` is one of BUILDS, or ``torch`` with ``library`` None and the reason in ``why_not_compiled``."""

    name: str
    library: ctypes.CDLL | None
    why_not_compiled: str = ""


@lru_cache(maxsize=1)
def loaded_build() -> LoadedBuild:
    """The fastest build that this processor runs and that was built; loaded on the first call."""
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
    """Raises ``UnavailableError`` where nothing compiled can be used."""
    build = loaded_build()
    if build.library is None:
        raise UnavailableError(f"the compiled algorithms are not available: {build.why_not_compiled}")
    return build.library


def why_not(problem: ConvProblem) -> str | None:
    """``None`` if the compiled algorithms can compute with this problem's dtype here, else the reason."""
    if problem.dtype != "float32":
        return f"the dtype is {problem.dtype}; the compiled algorithms compute in float32"
    return loaded_build().why_not_compiled or None


def build_name() -> str:
    """``avx512``, ``avx2``, ``plain``, or ``torch`` where nothing compiled can be used."""
    return loaded_build().name


def _path(build: str) -> Path | None:
    candidates = [Path(__file__).with_name(f"_{build}{suffix}") for suffix in EXTENSION_SUFFIXES]
    return next((path for path in candidates if path.exists()), None)


def _declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    for name, arguments in _SIGNATURES.items():
        function = getattr(loaded, f"mucudnn_{name}")
        function.argtypes, function.restype = arguments, _int64
    return loaded
