"""Tensors and buffers of one problem, allocated once, and the runs on them that are timed and checked."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from mucudnn.bench.operands import Operands, random_operands
from mucudnn.bench.race import Candidate
from mucudnn.kernels.reference import reference, relative_l2_error
from mucudnn.problem import ConvProblem, Operation
from mucudnn.units import format_bytes

_REFERENCE_FLOPS = 4e9  # of float64 arithmetic: about 0.1 s on two cores
_MEMORY_INFO = Path("/proc/meminfo")


class Workbench:
    """Every algorithm keeps a prepared buffer of its own, so that algorithms can take turns; all share one scratch."""

    def __init__(self, problem: ConvProblem, batch_size: int, device: str = "cpu") -> None:
        self.problem = problem
        self.operands = random_operands(problem, batch_size, device)
        self._scratch = self._allocate(0)
        self._prepared: dict[str, Tensor] = {}
        self._references: dict[int, Tensor] = {}

    def stream(self, candidate: Candidate) -> Callable[[], None]:
        """A call is one step on the next slice of the mini-batch, from the first again after the last.

        So a slice is no more in the cache than when the whole mini-batch is run. The algorithm has been opened
        (``set_up``, ``relative_error``). Raises ``MemoryError``, and what torch raises for lack of memory.
        """
        slices = cycle(self.operands.slices(candidate.micro_batch_size))
        prepared, scratch = self._buffers(candidate)
        step, problem, w = candidate.algorithm.step, self.problem, self.operands.w

        def next_step() -> None:
            x, y = next(slices)
            step(problem, x, w, y, None, prepared, scratch)

        return next_step

    def set_up(self, candidate: Candidate) -> Callable[[], None]:
        """A call opens and closes the algorithm: what it does once, however many micro-batches there are."""
        algorithm, problem, w = candidate.algorithm, self.problem, self.operands.w
        prepared, _ = self._buffers(candidate)

        def open_and_close() -> None:
            algorithm.open(problem, w, prepared)
            algorithm.close(problem, w, prepared)

        return open_and_close

    def relative_error(self, candidate: Candidate) -> float:
        """Relative L2 error against float64, on as many samples as have a reference in a short time, at least one
        micro-batch; not finite if the result is not.
        """
        algorithm, problem, size = candidate.algorithm, self.problem, candidate.micro_batch_size
        affordable = min(self.operands.batch_size, int(_REFERENCE_FLOPS / problem.flops(1)))
        n = max(size, affordable // size * size)
        operands = self._sample(n)
        prepared, scratch = self._buffers(candidate)
        algorithm.open(problem, operands.w, prepared)
        for x, y in operands.slices(size):
            algorithm.step(problem, x, operands.w, y, None, prepared, scratch)
        algorithm.close(problem, operands.w, prepared)
        return relative_l2_error(_written(problem, operands), self._reference(n))

    def _sample(self, n: int) -> Operands:
        """The first ``n`` samples, with a gradient of the filter that starts at zero."""
        first = self.operands.first(n)
        if self.problem.operation is not Operation.BACKWARD_FILTER:
            return first
        return Operands(first.x, torch.zeros_like(first.w), first.y)

    def _reference(self, n: int) -> Tensor:
        if n not in self._references:
            first = self.operands.first(n)
            self._references[n] = reference(self.problem, first.x, first.w, first.y)
        return self._references[n]

    def _buffers(self, candidate: Candidate) -> tuple[Tensor, Tensor]:
        """(prepared, scratch) of the sizes that the algorithm is to be handed."""
        self._require_memory(candidate.handed_bytes)
        self._require_memory(candidate.workspace_bytes)  # it may take a run to know: only if there is room for that
        name, workspace = candidate.algorithm.name, candidate.workspace
        if name not in self._prepared or self._prepared[name].numel() < workspace.prepared_bytes:
            self._prepared[name] = self._allocate(workspace.prepared_bytes)
        if self._scratch.numel() < workspace.scratch_bytes:
            self._scratch = self._allocate(workspace.scratch_bytes)
        return self._prepared[name][: workspace.prepared_bytes], self._scratch[: workspace.scratch_bytes]

    def _allocate(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.operands.x.device)

    def _require_memory(self, size_bytes: int) -> None:
        """Linux grants memory that it does not have, and kills the process that uses it: so ask beforehand."""
        available = available_bytes() if self.operands.x.device.type == "cpu" else None
        if available is not None and size_bytes > available:
            needed = format_bytes(size_bytes)
            raise MemoryError(f"needs a workspace of {needed}; {format_bytes(available)} of memory are available")


def available_bytes() -> int | None:
    """Memory that can be had without swapping, as Linux estimates it; ``None`` where it does not say."""
    if not _MEMORY_INFO.exists():
        return None
    fields = dict(line.split(":", 1) for line in _MEMORY_INFO.read_text(encoding="ascii").splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None


def _written(problem: ConvProblem, operands: Operands) -> Tensor:
    by_operation = {
        Operation.FORWARD: operands.y,
        Operation.BACKWARD_DATA: operands.x,
        Operation.BACKWARD_FILTER: operands.w,
    }
    return by_operation[problem.operation]
