"""Buffers between two guard zones: bytes with a known pattern that reveal writes outside the buffer.

The method is that of XLA's red zones with smaller zones; writes beyond the zones are not detected.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mucudnn.kernels.pages import on_huge_pages

# On each side; a multiple of every alignment. In the proving process, red zones surround the guard zones.
GUARD_BYTES = 2**16
_GUARD_BYTES_ON_GPUS = 2**20
_PATTERN = 0xA5
_GARBAGE = 0xFF  # NaN in every floating-point type, so that reads of unwritten memory show in the result


class GuardedBuffer:
    """A buffer between guard zones. Parts of any size up to its capacity begin right after the first zone.

    The buffer grows on demand. Its old memory is freed first, so call ``part`` again for every use. It takes
    ``capacity_bytes + 2 * guard_bytes`` from torch's allocator.
    """

    def __init__(self, device: str, guard_bytes: int | None = None) -> None:
        default = GUARD_BYTES if device == "cpu" else _GUARD_BYTES_ON_GPUS
        self._device, self._guard_bytes = device, default if guard_bytes is None else guard_bytes
        self._memory: Tensor | None = None
        self._parts: dict[int, Tensor] = {}

    @property
    def capacity_bytes(self) -> int:
        return 0 if self._memory is None else self._memory.numel() - 2 * self._guard_bytes

    def require(self, size_bytes: int) -> bool:
        """Grow the buffer to this size if needed, uninitialized; return whether memory was allocated.

        Raises torch's out-of-memory error; the buffer then has its former capacity, if that could be allocated again.
        """
        if self._memory is not None and size_bytes <= self.capacity_bytes:
            return False
        former, had_memory = self.capacity_bytes, self._memory is not None
        self.release()
        try:
            self._memory = self._allocate(size_bytes)
        except RuntimeError:
            self._memory = self._allocate(former) if had_memory else None
            raise
        return True

    def release(self) -> None:
        self._memory = None
        self._parts.clear()

    def part(self, size_bytes: int) -> Tensor:
        """Return the buffer's first ``size_bytes``, 1-D uint8, valid until the buffer grows; cached for timed code."""
        if size_bytes not in self._parts:
            self._parts[size_bytes] = self._raw[self._guard_bytes : self._guard_bytes + size_bytes]
        return self._parts[size_bytes]

    def arm(self, size_bytes: int) -> None:
        """Prepare a run: fill the first ``size_bytes`` with NaN, and the guard zones around them with a pattern."""
        self.part(size_bytes).fill_(_GARBAGE)
        for zone in self.zones(size_bytes):
            zone.fill_(_PATTERN)

    def trespass(self, size_bytes: int) -> str | None:
        """Return a description of writes outside the buffer's first ``size_bytes``; None if there are none."""
        before, behind = map(_written, self.zones(size_bytes))
        if len(before):
            return f"{len(before)} bytes, from {self._guard_bytes - int(before[0])} bytes before the begin"
        if len(behind):
            return f"{len(behind)} bytes, up to {int(behind[-1]) + 1} bytes behind the end"
        return None

    def zones(self, size_bytes: int) -> tuple[Tensor, Tensor]:
        """Return views of the guard zones before and after the buffer's first ``size_bytes``."""
        end = self._guard_bytes + size_bytes
        return self._raw[: self._guard_bytes], self._raw[end : end + self._guard_bytes]

    @property
    def _raw(self) -> Tensor:
        if self._memory is None:
            raise MemoryError("the buffer was given back for lack of memory")
        return self._memory

    def _allocate(self, size_bytes: int) -> Tensor:
        return on_huge_pages(torch.empty(size_bytes + 2 * self._guard_bytes, dtype=torch.uint8, device=self._device))


def _written(zone: Tensor) -> Tensor | np.ndarray[Any, Any]:
    """Return the indices of the zone's bytes that differ from the pattern, because a run has written them."""
    if zone.device.type == "cpu":  # NumPy, since torch would wake all its threads
        return np.flatnonzero(zone.numpy() != _PATTERN)
    return (zone != _PATTERN).nonzero().flatten()
