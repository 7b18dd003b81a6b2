"""Runs an algorithm on buffers of exactly the declared size, between guard zones, and counts what torch allocates.

Under AddressSanitizer (``make sanitize``) the zones are poisoned: reading them is reported, too, where it is done.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import Tensor

from mucudnn.kernels.contract.algorithm import ALIGNMENT_BYTES, Algorithm
from mucudnn.kernels.contract.allocation import peak_allocated_bytes
from mucudnn.kernels.contract.buffers import TORCH_FORMATS
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation

_GUARD_BYTES = 2 * ALIGNMENT_BYTES
_PATTERN = 0xA5
_GARBAGE = 0xFF  # NaN in every floating-point type: whatever is read before it was written shows


@cache
def sanitizer() -> ctypes.CDLL | None:
    """AddressSanitizer's runtime, where the process runs under it."""
    process = ctypes.CDLL(None)
    return process if hasattr(process, "__asan_poison_memory_region") else None


@dataclass
class GuardedMemory:
    """Aligned buffers full of NaN that know whether anything was written around them."""

    device: str = "cpu"
    raws: list[tuple[Tensor, int, int]] = field(default_factory=list)

    def buffer(self, size_bytes: int) -> Tensor:
        size = size_bytes + 2 * _GUARD_BYTES + ALIGNMENT_BYTES
        raw = torch.full((size,), _PATTERN, dtype=torch.uint8, device=self.device)
        start = _GUARD_BYTES + -raw.data_ptr() % ALIGNMENT_BYTES
        self.raws.append((raw, start, start + size_bytes))
        self._tell_sanitizer("poison")
        return raw[start : start + size_bytes].fill_(_GARBAGE)

    def tensor(self, problem: ConvProblem, shape: tuple[int, int, int, int]) -> Tensor:
        """In the problem's dtype and memory format."""
        n, c, h, w = shape
        channels_last = problem.memory_format is MemoryFormat.CHANNELS_LAST
        stored = (n, h, w, c) if channels_last else shape
        flat = self.buffer(n * c * h * w * problem.item_bytes).view(getattr(torch, problem.dtype))
        tensor = flat.view(stored).permute(0, 3, 1, 2) if channels_last else flat.view(stored)
        assert tensor.is_contiguous(memory_format=TORCH_FORMATS[problem.memory_format])
        return tensor

    def vector(self, problem: ConvProblem, count: int) -> Tensor:
        """In the problem's dtype."""
        return self.buffer(count * problem.item_bytes).view(getattr(torch, problem.dtype))

    def is_intact(self) -> bool:
        self._tell_sanitizer("unpoison")
        intact = all(bool((zone == _PATTERN).all()) for zone in self._zones())
        self._tell_sanitizer("poison")
        return intact

    def _zones(self) -> Iterator[Tensor]:
        return (zone for raw, start, end in self.raws for zone in (raw[:start], raw[end:]))

    def _tell_sanitizer(self, action: str) -> None:
        runtime = sanitizer() if self.device == "cpu" else None
        if runtime is not None:
            for zone in self._zones():
                runtime[f"__asan_{action}_memory_region"](
                    ctypes.c_void_p(zone.data_ptr()), ctypes.c_size_t(zone.nbytes)
                )


@dataclass
class Call:
    """One call of one operation: its tensors, and after ``run`` what was seen."""

    problem: ConvProblem
    batch_size: int
    memory: GuardedMemory = field(default_factory=GuardedMemory)
    excess_bytes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.x = self.memory.tensor(self.problem, self.problem.x_shape(self.batch_size))
        self.w = self.memory.tensor(self.problem, self.problem.w_shape())
        self.y = self.memory.tensor(self.problem, self.problem.y_shape(self.batch_size))
        for tensor in (self.x, self.w, self.y):
            if tensor is not self.written:
                tensor.normal_()
        if self.problem.operation is Operation.BACKWARD_FILTER:
            self.w.zero_()

    @property
    def written(self) -> Tensor:
        """The output: full of NaN before, or zero where it is added to."""
        return {
            Operation.FORWARD: self.y,
            Operation.BACKWARD_DATA: self.x,
            Operation.BACKWARD_FILTER: self.w,
        }[self.problem.operation]

    @torch.no_grad()
    def run(self, algorithm: Algorithm, micro_batches: Sequence[int], bias: Tensor | None = None) -> Tensor:
        """The output after open, steps and close; fails if a byte was written where none belongs."""
        read = [tensor for tensor in (self.x, self.w, self.y) if tensor is not self.written]
        before = [tensor.clone() for tensor in read]
        workspaces = {n: algorithm.workspace(self.problem, n) for n in micro_batches}
        internal = {n: algorithm.internal_bytes(self.problem, n) for n in micro_batches}
        setup_bytes = max(internal.values())
        prepared = self.memory.buffer(workspaces[micro_batches[0]].prepared_bytes)
        self._count(setup_bytes, partial(algorithm.open, self.problem, self.w, prepared))
        start = 0
        for n in micro_batches:
            scratch = self.memory.buffer(workspaces[n].scratch_bytes)
            x, y = self.x[start : start + n], self.y[start : start + n]
            operands = (x, self.w, y, bias, prepared, scratch)
            self._count(internal[n], partial(algorithm.step, self.problem, *operands))
            start += n
        self._count(setup_bytes, partial(algorithm.close, self.problem, self.w, prepared))
        assert self.memory.is_intact(), "written outside the output, prepared or scratch"
        assert all(map(_have_the_same_bits, read, before)), "an input was changed"
        return self.written

    @property
    def undeclared_bytes(self) -> int:
        """By how much the worst open, step or close allocated more inside than declared (negative: less)."""
        return max(self.excess_bytes)

    def _count(self, declared_bytes: int, function: Callable[[], None]) -> None:
        self.excess_bytes.append(peak_allocated_bytes(function, self.x.device.type) - declared_bytes)


def _have_the_same_bits(one: Tensor, other: Tensor) -> bool:
    """Also where they hold NaN, which equals nothing."""
    return torch.equal(*(tensor.flatten().view(torch.uint8) for tensor in (one, other)))
