"""Compiles CUDA C++ with CuPy (NVRTC) and starts it. Not run on a GPU yet.

CuPy is optional, and loaded when it is first needed. It compiles for the device at hand, keeps the result for each
device and on disk (``~/.cupy/kernel_cache``), and launches with the driver's ``cuLaunchKernel``: a launch allocates no
device memory and waits for nothing, so it can be captured in a CUDA graph once one has been made outside.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch

from mucudnn.words.errors import MucudnnError

OPTIONS = ("--std=c++17",)
_PROBE = 'extern "C" __global__ void probe() {}'


class LaunchError(MucudnnError, RuntimeError):
    """A CUDA function cannot be compiled for a device, or not be started with such sizes; the message says why."""


class CupyLauncher:
    """Compiles CUDA C++ and starts its functions."""

    def why_not(self) -> str | None:
        """Return why nothing can be compiled or started in this process, or ``None``. Found out once, then cheap."""
        return _why_not()

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
        """Start a function on the device's current stream of torch, and do not wait for it.

        source: a translation unit, the same object for every call, with the function in it as ``extern "C"``; compiled
        when it is first asked for, and kept. pointers: addresses, its first parameters; 0 is null. sizes: 32-bit
        integers, the fields of a struct that is its last parameter.

        Raises ``LaunchError`` where it cannot be compiled, ``RuntimeError`` where the device refuses it.
        """
        import cupy

        # A numpy array of one element is passed by value: here a structure of 32-bit integers.
        structure = np.array(sizes, dtype=np.int32).view(f"V{4 * len(sizes)}")
        stream = _stream(torch.cuda.current_stream(device).cuda_stream)
        try:
            with cupy.cuda.Device(device.index), stream:
                _function(source, function)((grid_blocks,), (block_threads,), (*pointers, structure))
        except cupy.cuda.compiler.CompileException as error:
            raise LaunchError(f"CuPy cannot compile {function!r} for {device}: {error}") from error


def compiler_name() -> str:
    """Return what compiles our own CUDA C++, ``CuPy 14.2.0``; ``torch`` where torch's operators run instead."""
    if _why_not() is not None:
        return "torch"
    import cupy

    return f"CuPy {cupy.__version__}"


def how_to_install() -> str:
    """Return the command that installs CuPy for the CUDA of torch."""
    return f"pip install 'mucudnn[{'cuda12' if cuda_of_torch() == 12 else 'cuda'}]'"


def cuda_of_torch() -> int | None:
    """Return the major version of CUDA that torch is built for; ``None`` where it is built without."""
    return None if torch.version.cuda is None else int(torch.version.cuda.split(".")[0])


@cache
def _why_not() -> str | None:
    """Return why CuPy cannot compile and load for this device, or ``None`` if it can."""
    try:
        import cupy  # noqa: F401

        _function(_PROBE, "probe")
    except Exception as error:  # of many kinds: no driver, no compiler, no headers, CuPy for another CUDA
        if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
            return f"CuPy is not installed: {how_to_install()}"
        reason = f"CuPy does not work here: {_first_line(error.__cause__ or error)}"
        remedy = f"; torch is built for CUDA {torch.version.cuda}: {how_to_install()}" if torch.version.cuda else ""
        warnings.warn(f"mucudnn goes on without CUDA functions of its own: {reason}{remedy}", stacklevel=2)
        return reason
    return None


@cache
def _module(source: str) -> Any:
    import cupy

    return cupy.RawModule(code=source, options=OPTIONS)


@cache
def _function(source: str, name: str) -> Any:
    """Compile a function for the current device; CuPy does so for every other one on which it is started."""
    return _module(source).get_function(name)


@lru_cache(maxsize=64)
def _stream(address: int) -> Any:
    """CuPy's view of a stream, for the device that is current when it is entered."""
    import cupy

    return cupy.cuda.Stream.from_external(_Stream(address))


class _Stream:
    """The CUDA stream protocol for an address, as it comes from any version of torch."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._address)


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip(" =")]
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
