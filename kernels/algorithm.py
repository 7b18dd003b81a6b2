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

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from mucudnn.problem import ConvProblem

ALIGNMENT_BYTES = 64  # of both buffers; one cache line, one AVX-512 register


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes that an algorithm needs beside its tensors, torch's internal allocations included.

    ``prepared_bytes`` live for the whole call, ``scratch_bytes`` for one step. ``internal_bytes`` is the part of the
    scratch that a library allocates by itself: it is counted and declared, but cannot be handed in.
    """

    prepared_bytes: int = 0
    scratch_bytes: int = 0
    internal_bytes: int = 0

    @property
    def handed_scratch_bytes(self) -> int:
        """Size of the ``scratch`` buffer that ``step`` receives."""
        return self.scratch_bytes - self.internal_bytes


@runtime_checkable
class Algorithm(Protocol):
    """See the module's docstring. Implementations are stateless: everything they need is handed in."""

    @property
    def name(self) -> str:
        """As stored in databases: stable for ever."""

    @property
    def version(self) -> int:
        """Part of the database key: raised when speed, workspace or numerics change."""

    def supports(self, problem: ConvProblem) -> str | None:
        """``None`` if the problem can be computed, else the reason why not, in words."""

    def supports_micro_batch(self, problem: ConvProblem, micro_batch_size: int) -> str | None:
        """Like ``supports``, for one micro-batch size of a supported problem."""

    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        """Bytes for micro-batches of this size, exact for the current thread count."""

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
