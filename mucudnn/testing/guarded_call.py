"""Calls of an algorithm on buffers of exactly the declared size between guard zones, which detect writes outside.

The bytes allocated in a call are counted. Under AddressSanitizer (``make sanitize``) the zones are poisoned, so that
reads of them are reported, too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate

import torch
from torch import Tensor

from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.kernels.contract.algorithm import ALIGNMENT_BYTES, Algorithm, Workspace
from mucudnn.kernels.contract.allocation import peak_allocated_bytes
from mucudnn.kernels.contract.buffers import torch_dtype
from mucudnn.kernels.contract.epilogue import Epilogue
from mucudnn.measuring.guard_zones import GuardedBuffer
from mucudnn.measuring.operands import Operands

_GUARD_BYTES = 2 * ALIGNMENT_BYTES  # small, since thousands of buffers are checked


@cache
def sanitizer() -> ctypes.CDLL | None:
    """Return AddressSanitizer's runtime library; None if the process does not run under AddressSanitizer."""
    process = ctypes.CDLL(None)
    return process if hasattr(process, "__asan_poison_memory_region") else None


@dataclass
class GuardedMemory:
    """Aligned buffers filled with NaN, which detect writes around them."""

    device: str = "cpu"
    guard_bytes: int = _GUARD_BYTES
    buffers: list[tuple[GuardedBuffer, int]] = field(default_factory=list)  # each with its size in bytes

    def buffer(self, size_bytes: int) -> Tensor:
        """Return a new buffer between guard zones: 1-D, uint8."""
        guarded = GuardedBuffer(self.device, self.guard_bytes)
        guarded.require(size_bytes)
        guarded.arm(size_bytes)
        self.buffers.append((guarded, size_bytes))
        self._tell_sanitizer("poison")
        return guarded.part(size_bytes)

    def tensor(self, problem: ConvProblem, shape: tuple[int, int, int, int]) -> Tensor:
        """Return a new tensor between guard zones, in the problem's dtype and memory format. shape: (N, C, H, W)."""
        n, c, h, w = shape
        flat = self.vector(problem, n * c * h * w)
        if problem.memory_format is MemoryFormat.CHANNELS_LAST:
            return flat.view(n, h, w, c).permute(0, 3, 1, 2)
        return flat.view(shape)

    def vector(self, problem: ConvProblem, count: int) -> Tensor:
        """Return a new 1-D tensor of ``count`` elements between guard zones, in the problem's dtype."""
        return self.buffer(count * problem.item_bytes).view(torch_dtype(problem))

    def trespass(self) -> str | None:
        """Return a description of a write in a guard zone around a buffer; None if there was none."""
        self._tell_sanitizer("unpoison")
        found = [where for buffer, size in self.buffers if (where := buffer.trespass(size)) is not None]
        self._tell_sanitizer("poison")
        return found[0] if found else None

    def _tell_sanitizer(self, action: str) -> None:
        runtime = sanitizer() if self.device == "cpu" else None
        if runtime is None:
            return
        for zone in (zone for buffer, size in self.buffers for zone in buffer.zones(size)):
            runtime[f"__asan_{action}_memory_region"](ctypes.c_void_p(zone.data_ptr()), ctypes.c_size_t(zone.nbytes))


@dataclass
class Call:
    """One call of one operation of an algorithm, on random numbers of torch's global generator.

    undeclared_bytes: after ``run``, the largest excess of the bytes that an open, step or close allocated over the
    declared ones; may be negative.
    """

    problem: ConvProblem
    batch_size: int
    memory: GuardedMemory = field(default_factory=GuardedMemory)
    undeclared_bytes: int = -(2**63)

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
        """The tensor that the call writes, initially filled with NaN, or with zeros if the algorithm adds to it."""
        return Operands(self.x, self.w, self.y).written(self.problem.operation)

    @torch.no_grad()
    def run(
        self,
        algorithm: Algorithm,
        micro_batches: Sequence[int],
        bias: Tensor | None = None,
    ) -> Tensor:
        """Open the algorithm, step over micro-batches of these sizes, close it; return the output.

        Raises ``AssertionError`` if a byte was written outside the output and the workspace.
        """
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
        self._require_within()
        if not all(map(_have_the_same_bits, read, before)):
            raise AssertionError("an input was changed")
        return self.written

    @torch.no_grad()
    def run_with(
        self, epilogue: Epilogue, algorithm: Algorithm, micro_batches: Sequence[int], bias: Tensor | None
    ) -> Tensor:
        """Run micro-batches of these sizes in one stage, of an algorithm that ``fuses``; return y with the epilogue.

        Raises ``AssertionError`` if a byte was written outside the output and the workspace.
        """
        sizes = [algorithm.workspace(self.problem, n) for n in micro_batches]
        workspace = Workspace(max(size.prepared_bytes for size in sizes), max(size.scratch_bytes for size in sizes))
        ends = accumulate(micro_batches)
        slices = [slice(end - n, end) for end, n in zip(ends, micro_batches, strict=True)]
        stage = algorithm.bound(self.problem, self.batch_size, slices, workspace)
        assert stage is not None
        buffers = (self.memory.buffer(size) for size in (workspace.prepared_bytes, workspace.scratch_bytes))
        prepared, scratch = (buffer.data_ptr() for buffer in buffers)
        addresses = self.x.data_ptr(), self.w.data_ptr(), self.y.data_ptr()
        stage(*addresses, None if bias is None else bias.data_ptr(), prepared, scratch, epilogue)
        self._require_within()
        return self.written

    def _require_within(self) -> None:
        if (where := self.memory.trespass()) is not None:
            raise AssertionError(f"written outside the output, prepared or scratch: {where}")

    def _count(self, declared_bytes: int, function: Callable[[], None]) -> None:
        excess_bytes = peak_allocated_bytes(function, self.x.device.type) - declared_bytes
        self.undeclared_bytes = max(self.undeclared_bytes, excess_bytes)


def _have_the_same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether the tensors are bitwise identical, so that NaN equals itself."""
    return torch.equal(*(tensor.flatten().view(torch.uint8) for tensor in (one, other)))
