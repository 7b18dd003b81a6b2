"""Placement of buffers in one arena: offsets by lifetime, so that buffers that are alive together do not overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from mucudnn.solver.knapsack import programs, pulp_without_warnings, run_program

ALIGNMENT_BYTES = 256
_SMALL = 1 / 256  # of the arena: smaller buffers are not part of the integer program
_LIMIT_S = 10.0  # of the integer program


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer of ``size_bytes``, in use from step ``start`` to step ``end``, both included."""

    size_bytes: int
    start: int
    end: int


def place(
    buffers: Sequence[Buffer], overlaps: Mapping[tuple[int, int], int] | None = None, limit_bytes: float = inf
) -> tuple[list[int], int]:
    """Return the offset of each buffer, and the bytes of the arena.

    overlaps: the numbers of two buffers that may overlap although they are alive together, if the first starts at least
    so many bytes behind the second.

    Largest first, each where the arena grows least, into the smallest gap between the buffers placed before it that are
    alive together with it (Pisarchyk and Lee, *Efficient Memory Management for Deep Neural Net Inference*, 2020, greedy
    by size). The arena may be larger than the most bytes that are alive at the same time; if it is also larger than
    ``limit_bytes``, the large buffers are placed by an integer program.

    >>> place([Buffer(512, 0, 1), Buffer(1024, 1, 2), Buffer(512, 2, 3)])
    ([1024, 0, 1024], 1536)
    >>> place([Buffer(1024, 0, 1), Buffer(1024, 1, 2)], {(0, 1): 256})
    ([256, 0], 1280)
    """
    arena = _Arena(buffers, overlaps or {})
    offsets, size = arena.greedy({})
    if size > limit_bytes:
        large = [index for index, size_bytes in enumerate(arena.sizes) if size_bytes > size * _SMALL]
        offsets, size = min((offsets, size), arena.greedy(arena.solved(large, size)), key=lambda placed: placed[1])
    return offsets, size


class _Arena:
    """Buffers to be placed.

    sizes: aligned bytes.
    together: of each buffer, those that are alive together with it.
    """

    def __init__(self, buffers: Sequence[Buffer], overlaps: Mapping[tuple[int, int], int]) -> None:
        self.buffers, self.sizes = buffers, [aligned(buffer.size_bytes) for buffer in buffers]
        self.distances = {pair: aligned(distance) for pair, distance in overlaps.items()}
        self.together: list[list[int]] = []
        used = [(index, buffer) for index, buffer in enumerate(buffers) if buffer.size_bytes]
        for i, buffer in enumerate(buffers):
            alive = (j for j, neighbour in used if neighbour.start <= buffer.end and buffer.start <= neighbour.end)
            self.together.append([j for j in alive if j != i])

    def gap(self, low: int, high: int) -> int:
        """Return the least distance from the start of the lower buffer to that of the higher one."""
        return min(self.sizes[low], self.distances.get((high, low), self.sizes[low]))

    def greedy(self, placed: Mapping[int, int]) -> tuple[list[int], int]:
        """Place all buffers that are not placed yet, and return the offsets and the bytes of the arena."""
        offsets = dict(placed)
        bottom = min(offsets.values(), default=0)
        top = max((offset + self.sizes[index] for index, offset in offsets.items()), default=0)
        left = [index for index in range(len(self.sizes)) if index not in placed]
        for index in sorted(left, key=lambda index: (-self.buffers[index].size_bytes, self.buffers[index].start)):
            barred = [
                (offsets[neighbour] - self.gap(index, neighbour), offsets[neighbour] + self.gap(neighbour, index))
                for neighbour in self.together[index]
                if neighbour in offsets
            ]
            offsets[index] = _best_start(barred, self.sizes[index], bottom, top)
            bottom, top = min(bottom, offsets[index]), max(top, offsets[index] + self.sizes[index])
        return [offsets[index] - bottom for index in range(len(offsets))], top - bottom

    def solved(self, large: Sequence[int], size: int) -> dict[int, int]:
        """Return offsets of large buffers in the smallest arena that an integer program finds in time.

        The program decides which of two buffers that are alive together is the lower one; the offsets follow from that.
        size: of an arena that is large enough. If all solvers fail, the offsets are valid but not small.
        """
        with pulp_without_warnings() as pulp:
            program, top = pulp.LpProblem("placement", pulp.LpMinimize), pulp.LpVariable("top", 0, 1)
            starts = {index: pulp.LpVariable(f"start_{index}", 0, 1) for index in large}  # in units of size
            program += top
            for index in large:
                program += starts[index] + self.sizes[index] / size <= top
                for above in self.together[index]:
                    if above in starts and above > index:
                        is_above = pulp.LpVariable(f"above_{index}_{above}", cat="Binary")
                        program += starts[index] + self.gap(index, above) / size <= starts[above] + 2 * (1 - is_above)
                        program += starts[above] + self.gap(above, index) / size <= starts[index] + 2 * is_above
        for name in programs():
            try:
                run_program(program, name, _LIMIT_S)
            except Exception:  # The greedy order does not need the external solver.
                continue
            break
        offsets: dict[int, int] = {}
        order = {index: (round(starts[index].varValue or 0.0, 6), -self.buffers[index].start) for index in large}
        for index in sorted(large, key=order.__getitem__):  # of two at one place, the one written over the other first
            below = [offsets[low] + self.gap(low, index) for low in self.together[index] if low in offsets]
            offsets[index] = max(below, default=0)
        return offsets


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _best_start(barred: Sequence[tuple[int, int]], size: int, bottom: int, top: int) -> int:
    """Return where a buffer starts in the arena from ``bottom`` to ``top``, not inside the barred ranges."""
    starts: list[tuple[int, float, int]] = []  # growth of the arena, size of the gap, minus the start
    end = min([bottom, *(low for low, _ in barred)])
    for low, high in [*sorted(barred), (inf, inf)]:
        if low >= end:
            growth = max(bottom - end, 0) + max(end + size - top, 0)
            starts.append((growth, low - end if end >= bottom else inf, -end))
        end = max(end, high)  # type: ignore[assignment]
    return -min(starts)[2]
