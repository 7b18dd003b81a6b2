"""Placement of buffers in one arena: offsets by lifetime, so that buffers that are alive together do not overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer of ``size_bytes``, in use from step ``start`` to step ``end``, both included."""

    size_bytes: int
    start: int
    end: int


def place(buffers: Sequence[Buffer]) -> tuple[list[int], int]:
    """Return the offset of each buffer, and the bytes of the arena.

    Largest first, each into the smallest gap between the buffers placed before it that are alive together with it
    (Pisarchyk and Lee, *Efficient Memory Management for Deep Neural Net Inference*, 2020, greedy by size). The arena
    may be larger than the most bytes that are alive at the same time.

    >>> place([Buffer(512, 0, 1), Buffer(1024, 1, 2), Buffer(512, 2, 3)])
    ([1024, 0, 1024], 1536)
    """
    offsets, end = [0] * len(buffers), 0
    placed: list[int] = []
    for index in sorted(range(len(buffers)), key=lambda index: (-buffers[index].size_bytes, buffers[index].start)):
        one = buffers[index]
        others = [
            (offsets[other], offsets[other] + aligned(buffers[other].size_bytes))
            for other in placed
            if buffers[other].start <= one.end and one.start <= buffers[other].end
        ]
        offsets[index] = _smallest_gap(sorted(others), aligned(one.size_bytes))
        end = max(end, offsets[index] + aligned(one.size_bytes))
        if one.size_bytes:
            placed.append(index)
    return offsets, end


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _smallest_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    """Return where the smallest gap between ranges, in order of their starts, begins that has room for ``size``."""
    best, smallest, end = None, 0, 0
    for start, stop in taken:
        gap = start - end
        if gap >= size and (best is None or gap < smallest):
            best, smallest = end, gap
        end = max(end, stop)
    return end if best is None else best
