"""The contract of an algorithm: how one micro-batch of a convolution problem is computed.

What micro-batches share (the transformed filter, a gradient accumulator) is *prepared* once a call, what they do not
share is done in each *step*. Every operation touches the same three tensors, the operation says which is written:

    =================  =====  ==========  =====
    operation          reads  reads       writes
    =================  =====  ==========  =====
    FORWARD            x      w           y
    BACKWARD_DATA      y      w           x
    BACKWARD_FILTER    x      y           w (added to)
    =================  =====  ==========  =====

(``y`` holds dy in the backward operations, ``x`` holds dx, ``w`` holds dw.) The call is
``open, step, step, ..., close`` over consecutive slices along N. For BACKWARD_FILTER ``w`` is zero before the first
open; an algorithm *adds* its part to it, in any step or in ``close``, and must sum micro-batches in at least float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from mucudnn.words.problem import ConvProblem

ALIGNMENT_BYTES = 64  # of both buffers; one cache line, one AVX-512 register


@dataclass(frozen=True, slots=True)
class Workspace:
    """Sizes of the buffers that an algorithm is handed.

    ``prepared_bytes`` live for the whole call, ``scratch_bytes`` for one step.
    """

    prepared_bytes: int = 0
    scratch_bytes: int = 0


@runtime_checkable
class Algorithm(Protocol):
    """See the module's docstring. Implementations are stateless: everything they need is handed in."""

    @property
    def name(self) -> str:
        """As stored in databases: stable for ever."""

    @property
    def version(self) -> int:
        """Part of the database key: raised when speed, workspace or numerics change."""

    @property
    def deterministic(self) -> bool:
        """Whether every run gives the same bits, for equal operands, slices, device and number of threads.

        True for all on the CPU: the work is cut by sizes and the number of threads, and each element of a result is
        summed by one thread in a fixed order, so that it does not matter which thread comes first. False is for sums to
        which several threads add in any order (atomics), as in some algorithms on GPUs.
        """

    def supports(self, problem: ConvProblem) -> str | None:
        """``None`` if the problem can be computed, else the reason why not, in words."""

    def is_local(self, problem: ConvProblem) -> bool:
        """Whether an element of x or dy that is NaN or infinite spoils no other results than with torch's own.

        Each result is then a sum of the products that the definition names, and of nothing else. Not so for transforms,
        which mix the elements of a tile or of an image, nor where zeros that only fill up memory meet other elements,
        since 0 * NaN is NaN. (The zeros of the padding may, as they do in some of torch's own backends: for dy and w.)
        False too where it is not known. No algorithm may hide such an element from a result that depends on it.
        """

    def supports_micro_batch(self, problem: ConvProblem, micro_batch_size: int) -> str | None:
        """Like ``supports``, for slices of one size of a supported problem."""

    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        """What to hand in for micro-batches of this size, with the current thread count. Runs and allocates nothing."""

    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        """Most that libraries allocate by themselves in ``open``, one ``step`` or ``close``, with this thread count.

        It cannot be handed in, but counts as scratch; 0 for algorithms that allocate nothing. Where there is no formula
        it is counted by running once, and cached: so ask only for what is going to be measured.
        """

    def open(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        """Prepare what micro-batches share. w: (K, C // groups, R, S); prepared: 1-D uint8, aligned."""

    def step(
        self,
        problem: ConvProblem,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        bias: Tensor | None,
        prepared: Tensor,
        scratch: Tensor,
    ) -> None:
        """One micro-batch. x: (n, C, H, W), y: (n, K, P, Q), in the problem's memory format and dtype.

        bias: (K,), added to y, only in FORWARD. prepared, scratch: 1-D uint8, aligned.
        """

    def close(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        """BACKWARD_FILTER: add what is still in ``prepared`` to ``w``. Otherwise nothing."""


class AlgorithmSource(Protocol):
    """Offers algorithms that depend on the problem, as a library does that knows many ways to compute each."""

    @property
    def name(self) -> str:
        """What users allow all that it offers by: ``cudnn``. The algorithms' names begin with it and a colon."""

    def offered(self, problem: ConvProblem, micro_batch_sizes: Sequence[int]) -> Sequence[Algorithm]:
        """Those that can compute slices of at least one of these sizes. Runs nothing."""

    def measuring(self) -> AbstractContextManager[object]:
        """Entered while those of one problem are measured: what is built for that alone is given back at its end."""
