"""States what compiles CUDA C++ and starts its functions on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from mucudnn.words.errors import MucudnnError


class LaunchError(MucudnnError, RuntimeError):
    """A CUDA function cannot be compiled for a device, or not be started with such sizes; the message says why."""


class Launcher(Protocol):
    """CuPy on CUDA devices (``cupy_launcher.py``). Tests put another in its place."""

    def why_not(self) -> str | None:
        """Return why nothing can be compiled or started in this process, or ``None``. Found out once, then cheap."""

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
