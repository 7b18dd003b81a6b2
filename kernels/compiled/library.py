"""Loads the build that fits this processor and declares its functions.

The libraries take pointers, sizes in elements, strides in floats and the thread count; they allocate nothing. Which
build is taken follows torch's own choice (``ATEN_CPU_CAPABILITY`` lowers both); ``MUCUDNN_BUILD=torch`` takes none.
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

BUILDS = ("avx512", "avx2", "plain")
_LARGEST_BUILD = {"AVX512": "avx512", "AVX2": "avx2"}  # by torch.backends.cpu.get_cpu_capability()

_int, _int64, _floats = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p


class Images(ctypes.Structure):
    """x or y: (N, C, H, W), with its strides."""

    _fields_ = [("data", _floats), *((f"size_{i}", _int64) for i in "nchw"), *((f"stride_{i}", _int64) for i in "nchw")]

    @classmethod
    def of(cls, tensor: Tensor) -> Images:
        return cls(tensor.data_ptr(), *tensor.shape, *tensor.stride())


class Filter(ctypes.Structure):
    """w or dw: (K, C // groups, R, S), with its strides."""

    _fields_ = [("data", _floats), *((f"size_{i}", _int64) for i in "kcrs"), *((f"stride_{i}", _int64) for i in "kcrs")]

    @classmethod
    def of(cls, tensor: Tensor) -> Filter:
        return cls(tensor.data_ptr(), *tensor.shape, *tensor.stride())


_images, _filter = ctypes.POINTER(Images), ctypes.POINTER(Filter)
_SIGNATURES: dict[str, list[type]] = {
    "vector_length": [],
    "winograd_filter_floats": [_int] * 4,
    "winograd_scratch_floats": [_int] * 9,
    "winograd_transform_filter": [*[_int] * 4, _filter, _floats, _int],
    "winograd_forward": [*[_int] * 5, _images, _floats, _floats, _images, _floats, _int],
    "winograd_accumulate": [*[_int] * 5, _images, _images, _floats, _floats, _int],
    "winograd_add_filter_gradient": [*[_int] * 3, _floats, _filter, _int],
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
    wanted = os.environ.get("MUCUDNN_BUILD") or _LARGEST_BUILD.get(torch.backends.cpu.get_cpu_capability(), "plain")
    if wanted == "torch":
        return LoadedBuild("torch", None, "MUCUDNN_BUILD=torch asks for torch's operators")
    reasons = []
    for name in BUILDS[BUILDS.index(wanted) if wanted in BUILDS else 0 :]:
        path = _path(name)
        if path is None:
            reasons.append(f"{name} was not built")
            continue
        try:
            return LoadedBuild(name, _declared(ctypes.CDLL(str(path))))
        except OSError as error:  # an OpenMP runtime that torch does not share, or another machine's build
            reasons.append(f"{name} cannot be loaded: {error}")
    return LoadedBuild("torch", None, "; ".join(reasons) + "; install with a C++ compiler (g++) at hand")


def library() -> ctypes.CDLL | None:
    return loaded_build().library


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
