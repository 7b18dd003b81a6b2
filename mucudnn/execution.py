"""Runs a configuration: one workspace, and each algorithm stepping over consecutive slices of the mini-batch.

What can be known beforehand (algorithms, slices, where everything lies in the workspace) is resolved once into a
``Recipe``, so that a call does little more than the arithmetic.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from mucudnn.configuration import Configuration
from mucudnn.errors import InvalidInputError
from mucudnn.kernels.algorithm import ALIGNMENT_BYTES, Algorithm
from mucudnn.kernels.buffers import TORCH_FORMATS
from mucudnn.kernels.registry import algorithm as algorithm_named
from mucudnn.pages import on_huge_pages
from mucudnn.problem import ConvProblem, Operation


@dataclass(frozen=True, slots=True)
class Part:
    """What one algorithm does of a configuration: the slices along N, and where its prepared bytes are.

    ``is_kept``: they are in a buffer of their own, which outlives the call, instead of in the workspace.
    """

    algorithm: Algorithm
    slices: tuple[slice, ...]
    prepared: slice
    is_kept: bool = False


@dataclass(frozen=True, slots=True)
class Recipe:
    """A configuration of one problem, resolved for one thread count.

    ``workspace_bytes`` is what is handed to the algorithms: their prepared buffers side by side, then the largest
    scratch, each from a multiple of ``ALIGNMENT_BYTES``. What libraries allocate by themselves comes on top.
    """

    problem: ConvProblem
    batch_size: int
    parts: tuple[Part, ...]
    scratch: slice
    keeps_workspace: bool = True

    @classmethod
    def of(
        cls,
        problem: ConvProblem,
        configuration: Configuration,
        kept: str | None = None,
        *,
        keeps_workspace: bool = True,
    ) -> Recipe:
        """``kept``: the algorithm whose prepared buffer is handed to ``execute``, as ``prepare`` has filled it.
        ``keeps_workspace``: whether the CPU's workspace outlives a call.

        Raises ``InvalidInputError`` for an algorithm that is not registered, or cannot compute the problem.
        """
        parts = []
        prepared_end = position = scratch_bytes = 0
        for name in configuration.algorithms:
            chosen = _capable(name, problem)
            sizes = [m.micro_batch_size for m in configuration.micro_configs if m.algorithm == name]
            workspaces = [chosen.workspace(problem, size) for size in set(sizes)]
            prepared = _aligned(0 if name == kept else prepared_end, max(w.prepared_bytes for w in workspaces))
            parts.append(Part(chosen, _consecutive(position, sizes), prepared, name == kept))
            position += sum(sizes)
            if name != kept:
                prepared_end = prepared.stop
            scratch_bytes = max(scratch_bytes, *(w.scratch_bytes for w in workspaces))
        return cls(problem, position, tuple(parts), _aligned(prepared_end, scratch_bytes), keeps_workspace)

    @property
    def workspace_bytes(self) -> int:
        end: int = self.scratch.stop
        return end

    def prepare(self, w: Tensor) -> Tensor:
        """What the kept algorithm prepares from w, in a new buffer, 1-D uint8: for any number of calls with this w.

        w: (K, C // groups, R, S), dense, in the problem's memory format.
        """
        (part,) = (part for part in self.parts if part.is_kept)
        prepared = _lasting_buffer(part.prepared.stop)
        part.algorithm.open(self.problem, w, prepared)
        return prepared

    def execute(self, x: Tensor, w: Tensor, y: Tensor, bias: Tensor | None = None, kept: Tensor | None = None) -> None:
        """Compute the problem's operation on a mini-batch, into the tensor that it writes.

        x: (N, C, H, W), w: (K, C // groups, R, S), y: (N, K, P, Q), bias: (K,) or None. All are dense, in the
        problem's memory format, and N is ``batch_size``: this is not checked here. kept: what ``prepare`` returned for
        this w; only for a recipe with a kept algorithm.
        """
        problem = self.problem
        if problem.operation is Operation.BACKWARD_FILTER:
            w.zero_()
        workspace = _workspace(self.workspace_bytes, x.device, self.keeps_workspace)
        scratch = workspace[self.scratch]
        for part in self.parts:
            if part.is_kept:
                assert kept is not None
                prepared = kept
            else:
                prepared = workspace[part.prepared]
                part.algorithm.open(problem, w, prepared)
            for micro_batch in part.slices:
                part.algorithm.step(problem, x[micro_batch], w, y[micro_batch], bias, prepared, scratch)
            part.algorithm.close(problem, w, prepared)


def run(
    problem: ConvProblem,
    configuration: Configuration,
    x: Tensor,
    w: Tensor,
    y: Tensor,
    bias: Tensor | None = None,
    *,
    keeps_workspace: bool = True,
) -> None:
    """Compute ``problem`` as ``configuration`` says, into the tensor that the operation writes.

    x: (N, C, H, W), w: (K, C // groups, R, S), y: (N, K, P, Q), bias: (K,) or None, added to y, only in FORWARD.
    All are dense and in the problem's memory format. The baseline is run as its algorithm here; ``torch_convolution``
    is torch's own call, without this module around it.

    Raises ``InvalidInputError`` for tensors that do not fit the problem or the configuration.
    """
    _check(problem, configuration, x, w, y)
    _cached_recipe(problem, configuration, torch.get_num_threads(), keeps_workspace).execute(x, w, y, bias)


def release_workspaces() -> None:
    """Give back the workspace that every thread keeps for the CPU, and all kept filters; the next call that needs them
    allocates and prepares them again.
    """
    for kept in list(releasable):
        kept.release()


class Releasable(Protocol):
    """Memory that is kept for speed alone."""

    def release(self) -> None:
        """Give it back."""


class _KeptWorkspace:
    """One thread's buffer. Kept, since on the CPU fresh pages cost more than the arithmetic (page faults)."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None

    def at_least(self, size_bytes: int) -> Tensor:
        buffer = self.buffer
        if buffer is None or buffer.numel() < size_bytes:
            self.buffer = buffer = None  # freed first: never two at a time
            buffer = self.buffer = _lasting_buffer(size_bytes)
        return buffer

    def release(self) -> None:
        self.buffer = None


class _OfThisThread(threading.local):
    def __init__(self) -> None:
        self.kept = _KeptWorkspace()
        releasable.add(self.kept)


releasable: WeakSet[Releasable] = WeakSet()
"""What ``release_workspaces`` gives back."""
_of_this_thread = _OfThisThread()


def _lasting_buffer(size_bytes: int) -> Tensor:
    """On the CPU, 1-D uint8; not an inference tensor, which a later training step could not write to."""
    with torch.inference_mode(False):
        return on_huge_pages(torch.empty(size_bytes, dtype=torch.uint8))


def _workspace(size_bytes: int, device: torch.device, kept: bool) -> Tensor:
    """1-D uint8 of at least ``size_bytes``; both allocators align to 64 bytes or more."""
    if kept and device.type == "cpu":
        return _of_this_thread.kept.at_least(size_bytes)
    return on_huge_pages(torch.empty(size_bytes, dtype=torch.uint8, device=device))


@lru_cache(maxsize=1024)
def _cached_recipe(problem: ConvProblem, configuration: Configuration, threads: int, keeps_workspace: bool) -> Recipe:
    """``threads`` is part of the key because what algorithms need can depend on it."""
    return Recipe.of(problem, configuration, keeps_workspace=keeps_workspace)


def _capable(name: str, problem: ConvProblem) -> Algorithm:
    chosen = algorithm_named(name)
    reason = chosen.supports(problem)
    if reason is not None:
        raise InvalidInputError(f"algorithm {name!r} cannot compute {problem}: {reason}")
    return chosen


def _aligned(end: int, size: int) -> slice:
    """The next ``size`` bytes after ``end`` that begin on a multiple of the alignment."""
    start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return slice(start, start + size)


def _consecutive(start: int, sizes: Sequence[int]) -> tuple[slice, ...]:
    slices = []
    for size in sizes:
        slices.append(slice(start, start + size))
        start += size
    return tuple(slices)


def _check(problem: ConvProblem, configuration: Configuration, x: Tensor, w: Tensor, y: Tensor) -> None:
    n = configuration.batch_size
    expected = {"x": (x, problem.x_shape(n)), "w": (w, problem.w_shape()), "y": (y, problem.y_shape(n))}
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise InvalidInputError(f"{name} has shape {tuple(tensor.shape)}; {problem} with N={n} needs {shape}")
        if tensor.dtype != getattr(torch, problem.dtype):
            raise InvalidInputError(f"{name} has dtype {tensor.dtype}; {problem} needs torch.{problem.dtype}")
        if not tensor.is_contiguous(memory_format=TORCH_FORMATS[problem.memory_format]):
            raise InvalidInputError(f"{name} does not lie {problem.memory_format}; make a copy that does")
