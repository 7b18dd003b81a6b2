"""Compiles and launches CUDA C++ with CuPy (NVRTC).

CuPy is optional and imported lazily. CuPy compiles for the current device, caches the result for each device and on
disk (``~/.cupy/kernel_cache``), and launches with the driver's ``cuLaunchKernel``. A launch allocates no device memory
and does not synchronize, so a function that has been launched once can be captured in a CUDA graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch

from mucudnn.core.errors import MucudnnError

OPTIONS = ("--std=c++17",)
_PROBE = 'extern "C" __global__ void probe() {}'


class LaunchError(MucudnnError, RuntimeError):
    """Raised if a CUDA function cannot be compiled for a device, or cannot be launched with the given sizes."""


class CupyLauncher:
    """A compiler and launcher of CUDA C++ functions."""

    def probe(self) -> str | None:
        """Return why this process cannot compile or launch CUDA C++, None if it can. The result is cached."""
        return _probe()

    def launch(
        self,
        source: str,
        function: str,
        grid_blocks: int,
        block_threads: int,
        pointers: Sequence[int],
        sizes: Sequence[int],
        device: torch.device,
    ) -> None:
        """Launch a function asynchronously on torch's current stream of the device.

        source: a translation unit with the function as ``extern "C"``, compiled at its first use and cached; must be
        the same object for every call.
        pointers: addresses, the function's first parameters; 0 is null.
        sizes: 32-bit integers, the fields of a struct that is the function's last parameter.

        Raises ``LaunchError`` if the function cannot be compiled, ``RuntimeError`` if the device rejects the launch.
        """
        import cupy

        # CuPy passes a numpy array of one element by value: here a structure of 32-bit integers.
        structure = np.array(sizes, dtype=np.int32).view(f"V{4 * len(sizes)}")
        stream = _stream(torch.cuda.current_stream(device).cuda_stream)
        try:
            with cupy.cuda.Device(device.index), stream:
                _function(source, function)((grid_blocks,), (block_threads,), (*pointers, structure))
        except cupy.cuda.compiler.CompileException as error:
            raise LaunchError(f"CuPy cannot compile {function!r} for {device}: {error}") from error


def compiler_name() -> str:
    """Return the name of the compiler of mucudnn's CUDA C++, such as ``CuPy 14.2.0``; ``torch`` if there is none."""
    if _probe() is not None:
        return "torch"
    import cupy

    return f"CuPy {cupy.__version__}"


def how_to_install() -> str:
    """Return the pip command that installs CuPy for the CUDA version of torch."""
    return f"pip install cupy-cuda{12 if cuda_of_torch() == 12 else 13}x"


def cuda_of_torch() -> int | None:
    """Return the major version of CUDA that torch is built for; None if torch is built without CUDA."""
    return None if torch.version.cuda is None else int(torch.version.cuda.split(".")[0])


@cache
def _probe() -> str | None:
    """Return why CuPy cannot compile and load CUDA C++ for the current device, None if it can."""
    try:
        import cupy  # noqa: F401

        _function(_PROBE, "probe")
    except Exception as error:  # many causes: no driver, compiler or headers, CuPy for another CUDA
        if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
            return f"CuPy is not installed: {how_to_install()}"
        cause = error.__cause__ or error
        lines = [line.strip() for line in str(cause).splitlines() if line.strip(" =")]
        reason = f"CuPy does not work here: {': '.join([type(cause).__name__, *lines[:1]])}"
        remedy = f"; torch is built for CUDA {torch.version.cuda}: {how_to_install()}" if torch.version.cuda else ""
        warnings.warn(f"mucudnn runs without its own CUDA functions: {reason}{remedy}", stacklevel=2)
        return reason
    return None


@cache
def _module(source: str) -> Any:
    import cupy

    return cupy.RawModule(code=source, options=OPTIONS)


@cache
def _function(source: str, name: str) -> Any:
    """Return a CUDA function compiled for the current device; its first launch on another device compiles it again."""
    return _module(source).get_function(name)


@lru_cache(maxsize=64)
def _stream(address: int) -> Any:
    """Return a CuPy stream for the address of a CUDA stream.

    Its device is the current device at the time the stream is entered.
    """
    import cupy

    return cupy.cuda.Stream.from_external(_Stream(address))


class _Stream:
    """An object that gives CuPy the address of a CUDA stream (``__cuda_stream__``); independent of torch's version."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._address)
