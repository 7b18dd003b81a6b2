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

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from mucudnn.kernels.contract.epilogue import Epilogue
from mucudnn.words.problem import ConvProblem, Operation

ALIGNMENT_BYTES = 64  # of both buffers; one cache line, one AVX-512 register


@dataclass(frozen=True, slots=True)
class Workspace:
    """Sizes of the buffers that an algorithm is handed.

    ``prepared_bytes`` live for the whole call, ``scratch_bytes`` for one step.
    """

    prepared_bytes: int = 0
    scratch_bytes: int = 0


class BaseAlgorithm:
    """Base of algorithms: what general code asks them. ``name``, ``version``, ``supports`` and ``step`` are their own.

    The other answers here are those of an algorithm on the CPU that promises nothing, shares nothing between
    micro-batches, takes slices of any size, and is handed no workspace. Bytes that torch allocates inside are counted
    by running it once.

    Algorithms are stateless: everything they need is handed in. Equal ones compute the same. Where a library fails
    they raise ``LibraryError``: what was tuned goes on with one of the ``alternatives``, or with torch's own.
    """

    __slots__ = ()

    if TYPE_CHECKING:  # no attributes at run time: dataclasses would take them for the defaults of their fields

        @property
        def name(self) -> str:
            """Name in databases: stable for ever. That of another package's algorithm is ``package/name``."""

        @property
        def version(self) -> int:
            """Part of the database key: raised when speed, workspace or numerics change."""

    @property
    def device_type(self) -> str:
        """Type of the devices on which it runs: ``cpu`` or ``cuda``."""
        return "cpu"

    @property
    def deterministic(self) -> bool:
        """Tell whether every run gives the same bits, for equal operands, slices, device and number of threads.

        True for all on the CPU: the work is cut by sizes and the number of threads, and each element of a result is
        summed by one thread in a fixed order, so that it does not matter which thread comes first. False is for sums to
        which several threads add in any order (atomics), as in some algorithms on GPUs.
        """
        return False

    @property
    def source(self) -> str | None:
        """Name of the ``AlgorithmSource`` that offers it; ``None`` for an algorithm that all problems share.

        What a source offers is compiled for each size, and its workspace is known exactly without running it.
        """
        return None

    def is_foreign(self, problem: ConvProblem) -> bool:
        """Tell whether a library computes it in a form that the user's own step does not run.

        Foreign code is proven before it is run: in a process of its own, between red zones, against float64, at every
        size. So is what a source offers, and what other packages bring, whatever they answer here.
        """
        return False

    @property
    def is_torchs_own(self) -> bool:
        """Tell whether it is torch's convolution, which is always measured."""
        return False

    @property
    def is_search(self) -> bool:
        """Tell whether the first run at each size builds and times what a library has, which takes seconds."""
        return False

    @property
    def is_last_resort(self) -> bool:
        """Tell whether it is for limits that no other algorithm fits; a quick tuning passes over it otherwise."""
        return False

    @property
    def alignment_bytes(self) -> int:
        """Power of two on whose multiples x, w and y begin, else it is not called; 1: they may begin anywhere."""
        return 1

    def supports(self, problem: ConvProblem) -> str | None:
        """Return ``None`` if the problem can be computed, else the reason why not, in words."""
        raise NotImplementedError

    def is_local(self, problem: ConvProblem) -> bool:
        """Tell whether an element of x or dy that is NaN or infinite spoils no other results than with torch's own.

        Each result is then a sum of the products that the definition names, and of nothing else. Not so for transforms,
        which mix the elements of a tile or of an image, nor where zeros that only fill up memory meet other elements,
        since 0 * NaN is NaN. (The zeros of the padding may, as they do in some of torch's own backends: for dy and w.)
        False too where it is not known. No algorithm may hide such an element from a result that depends on it.
        """
        return False

    def least_flops(self, problem: ConvProblem, micro_batch_size: int) -> int:
        """Count multiplications and additions that a step cannot do without; 0: unknown.

        A quick tuning passes over what cannot be the fastest even at the machine's full rate.
        """
        return 0

    def supports_micro_batch(self, problem: ConvProblem, micro_batch_size: int) -> str | None:
        """Answer like ``supports``, for slices of one size of a supported problem."""
        return None

    def can_run_undivided(self, problem: ConvProblem) -> bool:
        """Tell whether a whole mini-batch can be computed at once, even where slices of its size cannot."""
        return self.is_torchs_own

    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        """Return what to hand in for micro-batches of this size, with the current thread count. Allocates nothing."""
        return Workspace()

    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        """Return the most that libraries allocate by themselves in ``open``, one ``step`` or ``close``.

        It depends on the thread count. It cannot be handed in, but counts as scratch; 0 for algorithms that allocate
        nothing. Where there is no formula it is counted by running once, and cached: so ask only for what is going to
        be measured.
        """
        from mucudnn.kernels.contract.allocation import counted_internal_bytes  # which runs algorithms

        return counted_internal_bytes(self, problem, micro_batch_size, self.device_type)

    def why_not_here(self, problem: ConvProblem, micro_batch_size: int) -> str | None:
        """Tell why it must not run now, although it was chosen; ``None``: it may.

        Asked when a configuration is made ready to run: the device or torch's settings may be others than in tuning.
        """
        return None

    def alternatives(self, problem: ConvProblem, micro_batch_size: int) -> Iterable[Algorithm]:
        """List what may run in its place after it has failed, best first.

        Each is at least as exact, and deterministic and local where this one is: the bounds under which it was chosen
        are not known any more. It may run here and now.
        """
        return ()

    def build(self, problem: ConvProblem, micro_batch_size: int) -> None:
        """Build whatever steps of this size need, so that they can be captured in a CUDA graph."""

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
        """Compute one micro-batch. x: (n, C, H, W), y: (n, K, P, Q), in the problem's memory format and dtype.

        bias: (K,), added to y, only in FORWARD. prepared, scratch: 1-D uint8, aligned.
        """
        raise NotImplementedError

    def close(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        """Add what is still in ``prepared`` to ``w``, in BACKWARD_FILTER; otherwise do nothing."""

    def fuses(self, problem: ConvProblem) -> bool:
        """Tell whether ``step`` computes an ``Epilogue`` where it writes y, of any activation and any addition.

        Of problems that are FORWARD and supported. ``step`` then takes the epilogue as a last argument, of which what
        is added lies as y does; y is not read and written once more.
        """
        return False

    def bound(
        self,
        problem: ConvProblem,
        batch_size: int,
        slices: Sequence[slice],
        workspace: Workspace,
        *,
        is_open: bool = False,
    ) -> BoundStage | None:
        """Bind these slices of a mini-batch, buffers of these sizes, and the current thread count to one call.

        It has the results of ``open``, ``step`` and ``close``, which are three Python calls and more for each slice.
        is_open: ``prepared`` is what ``open`` has made of the filter in another call, and is only read. ``None``: it
        cannot be done for this problem here.
        """
        return None


Algorithm = BaseAlgorithm


class BoundStage(Protocol):
    """Part of a configuration that one algorithm computes, with everything resolved that is constant across calls."""

    @property
    def entry(self) -> tuple[int, int] | None:
        """Addresses of a function of C and of its first argument, where there is one, for callers that need no Python.

        It takes the six addresses too, then null, and does what a call does. It returns a negative number where a call
        raises.
        """

    def __call__(
        self,
        x: int,
        w: int,
        y: int,
        bias: int | None,
        prepared: int,
        scratch: int,
        epilogue: Epilogue | None = None,
        /,
    ) -> object:
        """Open, take every slice in turn, and close. Takes addresses: of x, w and y whole, dense and as the problem
        says; of the bias, or ``None``; of both buffers. Raises what ``step`` raises.

        epilogue: of all of y; only of an algorithm that ``fuses``.
        """


def fuses(algorithm: Algorithm, problem: ConvProblem) -> bool:
    """Tell whether an algorithm computes epilogues of a problem that it supports."""
    return problem.operation is Operation.FORWARD and algorithm.fuses(problem)


class AlgorithmSource(Protocol):
    """Offers algorithms that depend on the problem, as a library does that knows many ways to compute each."""

    @property
    def name(self) -> str:
        """Name by which users allow all that it offers: ``cudnn``. The algorithms' names begin with it and a colon."""

    def offered(self, problem: ConvProblem, micro_batch_sizes: Sequence[int]) -> Sequence[Algorithm]:
        """Algorithms that can compute slices of at least one of these sizes. Runs nothing."""

    def measuring(self) -> AbstractContextManager[object]:
        """Context in which those of one problem are measured: what is built for that alone is given back at its end."""
