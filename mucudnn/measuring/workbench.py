"""Operands and buffers of one convolution problem, allocated once, for timing and checking candidates."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import cycle
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from mucudnn.core.errors import CANDIDATE_ERRORS, UnavailableError, UnsoundError, raise_interruption
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.values import format_bytes
from mucudnn.kernels.memory import give_back_cache, is_out_of_memory, peak_allocated_bytes
from mucudnn.measuring.candidates import Candidate
from mucudnn.measuring.float64_results import Float64Results
from mucudnn.measuring.guard_zones import GuardedBuffer
from mucudnn.measuring.operands import Operands, operand_bytes, random_operands, written_shape
from mucudnn.measuring.proofs import Proof

_WRONG = 0.1  # a relative error that rounding cannot explain: bfloat16 has less than 0.01
_MEMORY_INFO = Path("/proc/meminfo")


class Workbench:
    """Operands of a problem, a scratch buffer shared by all candidates, and prepared buffers, for interleaved timing.

    The peak of memory, for any number of candidates, is (G: bytes of a guard zone)::

        x + w + y                        operand_bytes(problem, batch_size)
        + largest scratch + 2 G
        + prepared buffers + 2 G each    one for each algorithm that needs one; for BACKWARD_FILTER only the largest
        + 2 G + 2 G                      around the tensor that is written, and for all that prepare nothing
        + 2 G                            comparing the zones
        + comparing in float64           Float64Results.peak_bytes()
        + the most that a candidate allocates inside

    For BACKWARD_FILTER the prepared buffers hold sums, and timed steps may share one.

    If the whole mini-batch does not fit in memory, the number of samples in ``operands`` is halved until it does, and
    larger micro-batches fail with a ``MemoryError``.

    Raises ``UnavailableError`` if not even one sample fits.
    """

    def __init__(self, problem: ConvProblem, batch_size: int, device: str = "cpu") -> None:
        self.problem, self._device = problem, device
        self._result = GuardedBuffer(device)
        self.operands = self._operands_that_fit(batch_size)
        self._expected = Float64Results(problem, self.operands)
        self._scratch = GuardedBuffer(device)
        self._prepared: dict[str, GuardedBuffer] = defaultdict(partial(GuardedBuffer, device))
        self._opened: dict[str, tuple[str, int]] = {}  # prepared buffer -> the algorithm that filled it, and its bytes

    def stream(self, candidate: Candidate) -> Callable[[], None]:
        """Return a function that computes the next micro-batch at each call and wraps around after the last one.

        The caches are then as cold as in a run of the whole mini-batch. Raises ``MemoryError`` and torch's
        out-of-memory errors.
        """
        self._require(candidate)
        if self._opened.get(self._place(candidate)) != _content(candidate):
            self._open(candidate)
        slices = cycle(self.operands.slices(candidate.micro_batch_size))
        step, problem, w, sizes = candidate.algorithm.step, self.problem, self.operands.w, candidate.workspace
        prepared, scratch = self._prepared[self._place(candidate)], self._scratch

        def next_step() -> None:
            x, y = next(slices)
            step(problem, x, w, y, None, prepared.part(sizes.prepared_bytes), scratch.part(sizes.scratch_bytes))

        return next_step

    def slice_count(self, candidate: Candidate) -> int:
        """Return the number of calls after which ``stream`` wraps around to the first micro-batch."""
        return self.operands.batch_size // candidate.micro_batch_size

    def set_up(self, candidate: Candidate) -> Callable[[], None]:
        """Return a function that opens and closes the algorithm: its setup, once per mini-batch."""
        self._require(candidate)
        algorithm, problem, w = candidate.algorithm, self.problem, self.operands.w

        def open_and_close() -> None:
            self._open(candidate)
            algorithm.close(problem, w, self._prepared_part(candidate))

        return open_and_close

    def proof(self, candidate: Candidate, *, has_bias: bool = True) -> Proof:
        """Check the candidate's result and count the bytes that it allocates. Raises the errors of ``relative_error``.

        On the CPU one run does both.

        has_bias: whether to add a bias to y, which is a stricter check: oneDNN pads the bias to whole blocks, and some
        of its code is wrong only with a bias.
        """
        counts = candidate.counts_any_run and self._device == "cpu"
        internal_bytes = 0 if counts else candidate.count_scratch_bytes() - candidate.workspace.scratch_bytes
        time_s = 0.0

        def counted(run: Callable[[], None]) -> None:
            nonlocal internal_bytes, time_s
            began_s = time.perf_counter()
            if counts:
                internal_bytes = peak_allocated_bytes(run)
            else:
                run()
            time_s = time.perf_counter() - began_s

        return Proof(self.relative_error(candidate, counted, has_bias=has_bias), internal_bytes, time_s)

    def relative_error(
        self,
        candidate: Candidate,
        around: Callable[[Callable[[], None]], None] = lambda run: run(),
        *,
        has_bias: bool = False,
    ) -> float:
        """Run the candidate between guard zones; return its relative L2 error against float64.

        The run covers one micro-batch.

        around: wrapper that calls the run.
        has_bias: whether to add a bias of zeros.

        Raises ``UnsoundError`` if the candidate writes outside its result or workspace, or if the result is not finite
        or has a larger error than rounding can cause.
        """
        self._require(candidate)
        n, workspace = candidate.micro_batch_size, candidate.workspace
        buffers = {
            "the result": (self._result, self.problem.item_bytes * prod(written_shape(self.problem, n))),
            "what it prepares": (self._prepared[self._place(candidate)], workspace.prepared_bytes),
            "its scratch": (self._scratch, workspace.scratch_bytes),
        }
        self._opened.pop(self._place(candidate), None)
        for buffer, size_bytes in buffers.values():
            buffer.arm(size_bytes)
        is_forward = self.problem.operation is Operation.FORWARD
        bias = self.operands.w.new_zeros(self.problem.k) if has_bias and is_forward else None
        around(partial(self._run, candidate, bias))
        written = self.operands.first(n).written(self.problem.operation)
        for name, (buffer, size_bytes) in buffers.items():
            if where := buffer.trespass(size_bytes):
                raise UnsoundError(f"it wrote around {name}: {where}")
        values = self._result.part(buffers["the result"][1]).view(written.dtype)  # in memory order: no copy
        if not all(bool(extreme.isfinite()) for extreme in torch.aminmax(values)):
            raise UnsoundError("the result is not finite")
        error = self._expected.error(written, n)
        if not error <= _WRONG:
            raise UnsoundError(f"the result is wrong: its relative error is {error:.2g}")
        return error

    def _run(self, candidate: Candidate, bias: Tensor | None) -> None:
        """Run the candidate on the first micro-batch."""
        operands = self.operands.first(candidate.micro_batch_size)
        written = operands.written(self.problem.operation)
        if self.problem.operation is Operation.BACKWARD_FILTER:
            written.zero_()
        prepared = self._prepared_part(candidate)
        scratch = self._scratch.part(candidate.workspace.scratch_bytes)
        self._open(candidate)
        adds = self.problem.operation is Operation.BACKWARD_FILTER
        is_others = candidate.is_foreign and not candidate.algorithm.is_torchs_own
        repeats = 2 if adds and is_others else 1  # the second run shows whether it accumulates
        for _ in range(repeats):
            candidate.algorithm.step(self.problem, operands.x, operands.w, operands.y, bias, prepared, scratch)
        candidate.algorithm.close(self.problem, operands.w, prepared)
        if repeats > 1:
            written.div_(repeats)  # exact: a power of two

    def _open(self, candidate: Candidate) -> None:
        candidate.algorithm.open(self.problem, self.operands.w, self._prepared_part(candidate))
        self._opened[self._place(candidate)] = _content(candidate)

    def _require(self, candidate: Candidate) -> None:
        """Allocate memory for every buffer that the candidate's algorithm needs from its caller."""
        if candidate.micro_batch_size > self.operands.batch_size:
            raise MemoryError(
                f"there is memory for the tensors of {self.operands.batch_size} samples only, beside what is in use"
            )
        self._require_memory(candidate.handed_bytes)
        if candidate.proofs is not None or not (candidate.is_foreign and candidate.counts_any_run):
            self._require_memory(candidate.count_workspace_bytes())  # counting may take a run, which fits now
        place = self._place(candidate)
        if self._prepared[place].require(candidate.workspace.prepared_bytes):
            self._opened.pop(place, None)
        if self._scratch.require(candidate.workspace.scratch_bytes):
            self._scratch.part(candidate.workspace.scratch_bytes).zero_()  # the first touch of a page takes long

    def _place(self, candidate: Candidate) -> str:
        """Return the key of the prepared buffer that the candidate uses; candidates with the same key share it."""
        shared = self.problem.operation is Operation.BACKWARD_FILTER or not candidate.workspace.prepared_bytes
        return "" if shared else candidate.algorithm.name

    def _prepared_part(self, candidate: Candidate) -> Tensor:
        return self._prepared[self._place(candidate)].part(candidate.workspace.prepared_bytes)

    def _operands_that_fit(self, batch_size: int) -> Operands:
        n = batch_size
        while n:
            operands = self._try_operands(n)
            if operands is not None:
                return operands
            self._result.release()
            give_back_cache()
            n //= 2
        needed = format_bytes(operand_bytes(self.problem, 1))
        raise UnavailableError(
            f"{self.problem}: one sample takes {needed}, and there is not enough free memory on {self._device} to "
            "measure with it; free some, or use a machine with more"
        )

    def _try_operands(self, n: int) -> Operands | None:
        """Return operands of ``n`` samples; None if there is no memory for them or for comparing their results."""
        try:
            self._require_memory(operand_bytes(self.problem, n))
            self._result.require(self.problem.item_bytes * prod(written_shape(self.problem, n)))
            result = self._result.part(self._result.capacity_bytes)
            operands = random_operands(self.problem, n, self._device, written=result)
            comparing_bytes = Float64Results(self.problem, operands).peak_bytes()
            self._require_memory(comparing_bytes)
            if self._device != "cpu":
                torch.empty(comparing_bytes, dtype=torch.uint8, device=self._device)
        except CANDIDATE_ERRORS as error:
            raise_interruption(error)
            if is_out_of_memory(error):
                return None
            raise
        return operands

    def _require_memory(self, size_bytes: int) -> None:
        """Raise ``MemoryError`` if this many bytes are not available: Linux would overcommit, then kill the process."""
        available = available_bytes() if self._device == "cpu" else None
        if available is not None and size_bytes > available:
            needed = format_bytes(size_bytes)
            raise MemoryError(f"needs {needed}; {format_bytes(available)} of memory are available")


def available_bytes() -> int | None:
    """Return Linux's estimate of the memory available without swapping, in bytes; None if unknown."""
    if not _MEMORY_INFO.exists():
        return None
    fields = dict(line.split(":", 1) for line in _MEMORY_INFO.read_text(encoding="ascii").splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None


def _content(candidate: Candidate) -> tuple[str, int]:
    """Return a key that differs between candidates whose prepared buffers have different contents."""
    return candidate.algorithm.name, candidate.workspace.prepared_bytes
