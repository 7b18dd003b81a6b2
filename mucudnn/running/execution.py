"""Runs a configuration: one workspace, and each algorithm stepping over consecutive slices of the mini-batch.

What can be known beforehand (algorithms, slices, where everything lies in the workspace) is resolved once into a
``Recipe``, so that a call does little more than the arithmetic.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from mucudnn.kernels.contract.algorithm import Algorithm
from mucudnn.kernels.contract.buffers import TORCH_FORMATS
from mucudnn.kernels.registry import algorithm as algorithm_named
from mucudnn.running.devices import made_current
from mucudnn.running.huge_pages import on_huge_pages
from mucudnn.words.errors import InvalidInputError, LibraryError, MisalignedError
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.results import Configuration, MicroConfig

BUFFER_BYTES = 256  # on whose multiples each buffer begins: as CUDA allocates, and libraries may count on


class StepError(LibraryError):
    """A step of a problem that was chosen cannot be built or executed: in its library's words."""

    def __init__(self, problem: ConvProblem, micro_config: MicroConfig, error: LibraryError) -> None:
        super().__init__(str(error))
        self.problem, self.micro_config, self._error = problem, micro_config, error

    def __reduce__(self) -> tuple[object, ...]:
        return StepError, (self.problem, self.micro_config, self._error)

    @property
    def is_lack_of_memory(self) -> bool:
        return self._error.is_lack_of_memory


@dataclass(frozen=True, slots=True)
class Part:
    """What one algorithm does of a configuration: its slices along N, in turn, and where its prepared bytes are.

    ``is_kept``: they are in a buffer of their own, which outlives the call, instead of in the workspace.
    """

    algorithm: Algorithm
    slices: tuple[slice, ...]
    prepared: slice
    is_kept: bool = False


@dataclass(frozen=True, slots=True)
class Recipe:
    """A configuration of one problem, resolved for one thread count and one device.

    ``workspace_bytes`` is what is handed to the algorithms: their prepared buffers side by side, then the largest
    scratch, each from a multiple of ``BUFFER_BYTES``. What libraries allocate by themselves comes on top.
    """

    problem: ConvProblem
    configuration: Configuration
    parts: tuple[Part, ...]
    scratch: slice
    keeps_workspace: bool = True
    alignment_bytes: int = 1

    @classmethod
    def of(
        cls,
        problem: ConvProblem,
        configuration: Configuration,
        kept: str | None = None,
        *,
        device_type: str = "cpu",
        keeps_workspace: bool = True,
    ) -> Recipe:
        """``kept``: the algorithm whose prepared buffer is handed to ``execute``, as ``prepare`` has filled it.
        ``device_type``: of the device that it is for, which is the current one. ``keeps_workspace``: whether the CPU's
        workspace outlives a call.

        Raises ``InvalidInputError`` for an algorithm that is not registered, or cannot compute the problem;
        ``LibraryError`` and ``UnavailableError`` for one of a library that is not there.
        """
        sizes_of = {
            name: [m.micro_batch_size for m in configuration.micro_configs if m.algorithm == name]
            for name in configuration.algorithms
        }
        placed = iter(_placed(list(chain.from_iterable(sizes_of.values()))))
        parts = []
        prepared_end = scratch_bytes = 0
        for name, sizes in sizes_of.items():
            chosen = _capable(name, problem, device_type)
            workspaces = [chosen.workspace(problem, size) for size in set(sizes)]
            prepared = _aligned(0 if name == kept else prepared_end, max(w.prepared_bytes for w in workspaces))
            parts.append(Part(chosen, tuple(islice(placed, len(sizes))), prepared, name == kept))
            if name != kept:
                prepared_end = prepared.stop
            scratch_bytes = max(scratch_bytes, *(w.scratch_bytes for w in workspaces))
        scratch = _aligned(prepared_end, scratch_bytes)
        alignment_bytes = max((part.algorithm.alignment_bytes for part in parts), default=1)
        return cls(problem, configuration, tuple(parts), scratch, keeps_workspace, alignment_bytes)

    @property
    def steps(self) -> Iterator[tuple[Algorithm, int]]:
        """Each algorithm with each micro-batch size that it runs, once."""
        for part in self.parts:
            for size in dict.fromkeys(micro_batch.stop - micro_batch.start for micro_batch in part.slices):
                yield part.algorithm, size

    def build(self) -> None:
        """Have ready what is built once, so that ``execute`` can be captured in a CUDA graph.

        Raises ``StepError`` where a step cannot be built.
        """
        for algorithm, size in self.steps:
            self.build_step(algorithm, size)

    def build_step(self, algorithm: Algorithm, micro_batch_size: int) -> None:
        """One of ``steps``, as ``build``."""
        try:
            algorithm.build(self.problem, micro_batch_size)
        except LibraryError as error:
            raise StepError(self.problem, MicroConfig(algorithm.name, micro_batch_size), error) from error

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
        problem's memory format, and N is the configuration's: this is not checked here. kept: what ``prepare`` returned
        for this w; only for a recipe with a kept algorithm. Their device is the current one.

        Raises ``MisalignedError``; ``StepError`` where a library fails; what torch raises for lack of memory.
        """
        problem, alignment_bytes = self.problem, self.alignment_bytes
        if alignment_bytes > 1 and (x.data_ptr() | w.data_ptr() | y.data_ptr()) % alignment_bytes:
            raise MisalignedError(
                f"{self.configuration} needs tensors that begin on a multiple of {alignment_bytes} bytes; clone views"
            )
        if problem.operation is Operation.BACKWARD_FILTER:
            w.zero_()
        workspace = _workspace(self.workspace_bytes, x.device, self.keeps_workspace)
        scratch = workspace[self.scratch]
        for part in self.parts:
            micro_batch = part.slices[0]
            try:
                if part.is_kept:
                    assert kept is not None
                    prepared = kept
                else:
                    prepared = workspace[part.prepared]
                    part.algorithm.open(problem, w, prepared)
                for micro_batch in part.slices:
                    x_in, y_in = _taken(x, micro_batch), _taken(y, micro_batch)
                    part.algorithm.step(problem, x_in, w, y_in, bias, prepared, scratch)
                part.algorithm.close(problem, w, prepared)
            except LibraryError as error:
                failed = MicroConfig(part.algorithm.name, micro_batch.stop - micro_batch.start)
                raise StepError(problem, failed, error) from error


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

    Raises ``InvalidInputError`` for tensors that do not fit the problem or the configuration, and what the methods of
    ``Recipe`` raise: what fails is not replaced here.
    """
    _check(problem, configuration, x, w, y)
    _check_bias(problem, x, bias)
    with made_current(x.device):
        recipe = _cached_recipe(problem, configuration, x.device, torch.get_num_threads(), keeps_workspace)
        recipe.execute(x, w, y, bias)


def release_workspaces() -> None:
    """Give back the workspace that every thread keeps for the CPU, and all kept filters; the next call that needs them
    allocates and prepares them again.
    """
    with _listing:
        every = list(_releasable)
    for kept in every:
        kept.release()


def make_releasable(kept: Releasable) -> None:
    """From now on ``release_workspaces`` gives it back."""
    with _listing:
        _releasable.add(kept)


class Releasable(Protocol):
    """Memory that is kept for speed alone."""

    def release(self) -> None:
        """Give it back."""

    def unlock(self) -> None:
        """Forget locks that other threads held: in a process that was forked off."""


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

    def unlock(self) -> None:
        pass


class _OfThisThread(threading.local):
    def __init__(self) -> None:
        self.kept = _KeptWorkspace()
        make_releasable(self.kept)


_releasable: WeakSet[Releasable] = WeakSet()
_listing = threading.Lock()  # threads begin while another one releases


def _unlock_in_child() -> None:
    """A forked process has no other thread that could give a lock back."""
    global _listing
    _listing = threading.Lock()
    for kept in list(_releasable):
        kept.unlock()


os.register_at_fork(after_in_child=_unlock_in_child)
_of_this_thread = _OfThisThread()


def _lasting_buffer(size_bytes: int) -> Tensor:
    """On the CPU, 1-D uint8; not an inference tensor, which a later training step could not write to."""
    with torch.inference_mode(False):
        return on_huge_pages(torch.empty(size_bytes, dtype=torch.uint8, device="cpu"))  # whatever the default is


def _workspace(size_bytes: int, device: torch.device, kept: bool) -> Tensor:
    """1-D uint8 of at least ``size_bytes``; both allocators align to 64 bytes or more."""
    if kept and device.type == "cpu":
        return _of_this_thread.kept.at_least(size_bytes)
    return on_huge_pages(torch.empty(size_bytes, dtype=torch.uint8, device=device))


@lru_cache(maxsize=1024)
def _cached_recipe(
    problem: ConvProblem, configuration: Configuration, device: torch.device, threads: int, keeps_workspace: bool
) -> Recipe:
    """``threads`` is part of the key because what algorithms need can depend on it."""
    recipe = Recipe.of(problem, configuration, device_type=device.type, keeps_workspace=keeps_workspace)
    recipe.build()
    return recipe


def _capable(name: str, problem: ConvProblem, device_type: str) -> Algorithm:
    chosen = algorithm_named(name, device_type)
    reason = chosen.supports(problem)
    if reason is not None:
        raise InvalidInputError(f"algorithm {name!r} cannot compute {problem}: {reason}")
    return chosen


def _taken(images: Tensor, micro_batch: slice) -> Tensor:
    """These samples. All of them are the tensor itself: making a view takes a microsecond."""
    return images if micro_batch.stop - micro_batch.start == len(images) else images[micro_batch]


def _aligned(end: int, size: int) -> slice:
    """The next ``size`` bytes after ``end`` that begin on a multiple of the alignment."""
    start = -(-end // BUFFER_BYTES) * BUFFER_BYTES
    return slice(start, start + size)


def _placed(sizes: Sequence[int]) -> list[slice]:
    """Where slices of these sizes lie along N, side by side.

    Each begins on a multiple of the largest power of two that divides its own size, whatever the order in which they
    run: they lie in descending order of these powers. So all sizes before a slice are multiples of its power, and so is
    their sum, at which it begins. Libraries may count on it.
    """
    slices = [slice(0)] * len(sizes)
    start = 0
    for index in sorted(range(len(sizes)), key=lambda index: sizes[index] & -sizes[index], reverse=True):
        slices[index] = slice(start, start + sizes[index])
        start += sizes[index]
    return slices


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
        _check_memory(name, tensor, x.device)


def _check_bias(problem: ConvProblem, x: Tensor, bias: Tensor | None) -> None:
    if bias is None:
        return
    if bias.shape != (problem.k,) or bias.dtype != x.dtype or not bias.is_contiguous():
        given = f"shape {tuple(bias.shape)}, dtype {bias.dtype}, stride {bias.stride()}"
        raise InvalidInputError(f"bias has {given}; {problem} needs ({problem.k},), dense, {x.dtype}")
    _check_memory("bias", bias, x.device)


def _check_memory(name: str, tensor: Tensor, device: torch.device) -> None:
    """Algorithms read its bytes, in which a sign or a zero that torch only remembers is not."""
    if tensor.device != device:
        raise InvalidInputError(f"{name} is on {tensor.device} and x on {device}; all must be on one device")
    if tensor.is_meta:
        raise InvalidInputError(
            f"{name} is on the device meta, which holds no values; give tensors of the CPU or a GPU"
        )
    if tensor.is_neg() or tensor._is_zerotensor():
        raise InvalidInputError(f"{name} is a lazy negation or zero; give {name}.resolve_neg().clone()")
