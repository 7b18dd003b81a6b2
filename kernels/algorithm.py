"""The interface of an algorithm, which computes a convolution on one micro-batch (some samples of a mini-batch).

Data that micro-batches share (the transformed filter, a gradient accumulator) is *prepared* once per call; each
micro-batch is a *step*. All three operations use the tensors x, w and y, and differ in which of them is written:

    =================  =====  ==========  =====
    operation          reads  reads       writes
    =================  =====  ==========  =====
    FORWARD            x      w           y
    BACKWARD_DATA      y      w           x
    BACKWARD_FILTER    x      y           w (added to)
    =================  =====  ==========  =====

In the backward operations, ``y`` is dy, the written ``x`` is dx and the written ``w`` is dw. A call consists of ``open,
step, step, ..., close`` over consecutive slices along N, the dimension of samples. For BACKWARD_FILTER, ``w`` is zero
before the first ``open``; an algorithm *adds* to ``w``, in any step or in ``close``, and must sum micro-batches in at
least float32.

The epilogue of a convolution, which can be fused into writing y: an addition and an activation, in inference, or the
moments of its channels, for batch norm in training.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.torch_settings import TorchSettings
from mucudnn.kernels.memory import aligned_buffer, empty_activation, peak_allocated_bytes


@dataclass(frozen=True, slots=True)
class Workspace:
    """Sizes in bytes of the two temporary buffers that the caller of an algorithm provides.

    The prepared buffer holds data that micro-batches share and lives for the whole call. The scratch buffer is used by
    one micro-batch at a time.
    """

    prepared_bytes: int = 0
    scratch_bytes: int = 0


class BaseAlgorithm:
    """Base class of algorithms. Subclasses must define ``name``, ``version``, ``supports`` and ``step``.

    The defaults describe an algorithm on the CPU that gives no guarantees, shares nothing between micro-batches, takes
    slices of any size, and needs no workspace. Bytes that torch allocates inside an algorithm are counted by running
    the algorithm once.

    Algorithms are stateless: everything they need is passed as an argument. Algorithms that compare equal compute the
    same results. If a library fails, the algorithm raises ``LibraryError``, and torch's own convolution runs instead.
    """

    __slots__ = ()

    if TYPE_CHECKING:  # Declared for type checkers only: dataclasses would take them for field defaults.

        @property
        def name(self) -> str:
            """Name of the algorithm in databases, which must never change; ``package/name`` for other packages."""

        @property
        def version(self) -> int:
            """Version of the algorithm in the database key; increment it when speed, workspace or numerics change."""

    # Device type on which the algorithm runs: ``cpu`` or ``cuda``.
    device_type: str = "cpu"
    # Name of the ``AlgorithmSource`` (such as cuDNN) that lists this algorithm for some problems, or None. Algorithms
    # listed by a source are compiled for each size, and their workspace is known exactly without running them.
    source: str | None = None
    # Whether this is torch's own convolution, which tuning always measures.
    is_torchs_own: bool = False
    # Whether quick tuning measures this algorithm only for workspace limits that exclude all others.
    is_last_resort: bool = False
    # Whether any method may be called with a problem of volumes, whose tensors have a depth.
    takes_volumes: bool = False
    # Required alignment of the addresses of x, w and y in bytes, a power of two; 1 if there is none.
    alignment_bytes: int = 1

    @property
    def deterministic(self) -> bool:
        """Return whether every run gives the same bits, for equal operands, slices, device and number of threads.

        All of mucudnn's algorithms on the CPU are deterministic: the sizes and the number of threads determine how the
        work is divided, and each element is summed by one thread in a fixed order. Sums by atomic operations, as on
        GPUs, are not deterministic.
        """
        return False

    def is_foreign(self, problem: ConvProblem) -> bool:
        """Return whether the algorithm runs library code that the user's own step would not run.

        The results of foreign code are checked at every size before it runs in this process: in a separate process,
        against float64, with guard bytes around the buffers. Algorithms that a source (such as cuDNN) lists and
        algorithms of other packages are always checked.
        """
        return False

    def supports(self, problem: ConvProblem) -> str | None:
        """Return None if the problem is supported, otherwise the reason why it is not, as text."""
        raise NotImplementedError

    def is_local(self, problem: ConvProblem) -> bool:
        """Return whether NaN and Inf in x or dy affect no more results than with torch's own convolution.

        Each result must then be a sum of exactly the products of the definition. Transforms are not local, because they
        mix the elements of a tile or an image. Products with zeros that fill up memory are not local either, because
        zero times NaN is NaN. (Zeros of the padding may be multiplied by dy and w, as in some of torch's own backends.)
        Return False if unknown. NaN and Inf must always propagate to the results that depend on them.
        """
        return False

    def least_flops(self, problem: ConvProblem, micro_batch_size: int) -> int:
        """Return a lower bound on the multiplications and additions of one micro-batch of this size; 0 if unknown.

        Quick tuning skips algorithms that cannot be the fastest even at the machine's peak rate.
        """
        return 0

    def supports_micro_batch(self, problem: ConvProblem, micro_batch_size: int) -> str | None:
        """Return None if micro-batches of this size are supported, otherwise the reason. The problem is supported."""
        return None

    def can_run_undivided(self, problem: ConvProblem) -> bool:
        """Return whether a whole mini-batch can run at once, even if micro-batches of its size are not supported."""
        return self.is_torchs_own

    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        """Return the buffer sizes for micro-batches of this size at the current thread count. Allocates no buffer."""
        return Workspace()

    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        """Return the peak bytes that libraries allocate by themselves in ``open``, one ``step`` or ``close``.

        These bytes count as scratch, and depend on the thread count. By default they are counted by running the
        algorithm once, and the result is cached. Call this only for candidates that are going to be measured.
        """
        return counted_internal_bytes(self, problem, micro_batch_size)

    def why_not_here(self, problem: ConvProblem, micro_batch_size: int) -> str | None:
        """Return why the algorithm must not run in the current environment; None if it may.

        This is called when a configuration (algorithms with micro-batch sizes) is prepared to run, because the device
        or torch's settings may have changed since tuning.
        """
        return None

    def build(self, problem: ConvProblem, micro_batch_size: int) -> None:
        """Build everything that micro-batches of this size need, so that a CUDA graph can capture the computation."""

    def open(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        """Write the data that micro-batches share to ``prepared``.

        w: (K, C // groups, R, S).
        prepared: 1-D uint8, aligned.
        """

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
        """Compute one micro-batch, whose tensors have the problem's memory format and dtype.

        x: (n, C, H, W).
        w: (K, C // groups, R, S).
        y: (n, K, P, Q).
        bias: (K,), added to y in FORWARD only.
        prepared: filled by ``open``, 1-D uint8, aligned.
        scratch: 1-D uint8, aligned.
        """
        raise NotImplementedError

    def close(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        """Add the gradient summed in ``prepared``, if any, to ``w`` in BACKWARD_FILTER; otherwise do nothing."""

    def fuses(self, problem: ConvProblem) -> bool:
        """Return whether ``bound`` and ``band`` give stages that compute any ``Epilogue`` (addition, activation).

        Called for supported FORWARD problems only. The epilogue's ``added`` tensor has the strides of y.
        """
        return False

    def fuses_moments(self, problem: ConvProblem) -> bool:
        """Return whether ``bound`` gives stages that compute ``Epilogue.moments``. For supported FORWARD problems."""
        return False

    def fuses_normalization(self, problem: ConvProblem) -> bool:
        """Return whether ``normalizing`` gives stages that compute any ``Prologue``.

        Called for supported problems of FORWARD and BACKWARD_FILTER, which read x.
        """
        return False

    def bound(
        self,
        problem: ConvProblem,
        batch_size: int,
        slices: Sequence[slice],
        workspace: Workspace,
    ) -> BoundStage | None:
        """Return a callable that runs these slices of a mini-batch, for these buffer sizes and this number of threads.

        The callable gives the results of ``open``, ``step`` and ``close``, without their overhead in Python. Return
        None if there is no such callable. The number of threads is torch's current one.
        """
        return None

    def normalizing(
        self, problem: ConvProblem, batch_size: int, slices: Sequence[slice]
    ) -> tuple[BoundStage, Workspace] | None:
        """Return a callable as ``bound`` does, for calls with a prologue, and its workspace."""
        return None

    def band(
        self, problem: ConvProblem, n: int, rows: tuple[int, int], above: int
    ) -> tuple[BoundStage, Workspace] | None:
        """Return a callable for some rows of ``n`` samples, whose filter ``open`` has prepared, and its workspace.

        Of volumes, frames take the place of rows. Return None if bands are not supported.

        problem: of whole images, FORWARD or BACKWARD_DATA.
        rows: of x and y, which are dense in channels_last if there is one sample.
        above: rows of zeros above those of x.
        """
        return None


Algorithm = BaseAlgorithm


class BoundStage(Protocol):
    """A callable that runs one algorithm's micro-batches, with all arguments resolved that are constant over calls."""

    @property
    def entry(self) -> tuple[int, int] | None:
        """The addresses of a C function and of its first argument, for callers outside Python; None if there is none.

        The other arguments are the six addresses of ``__call__`` and null. A negative result corresponds to an error
        raised by ``__call__``.
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
        prologue: Prologue | None = None,
        /,
    ) -> object:
        """Run ``open``, a ``step`` for every slice, and ``close``. Raises the errors of ``step``.

        The arguments are addresses: of the whole x, w and y, dense and in the problem's memory format; of the bias, or
        None; of the prepared and the scratch buffer.

        epilogue: for the whole y, only if the algorithm ``fuses``, with moments only if it ``fuses_moments``.
        prologue: of x, for stages of ``normalizing`` only, which need one.
        """


def why_unsupported(algorithm: Algorithm, problem: ConvProblem) -> str | None:
    """Return the reason why an algorithm does not support a problem; None if it does."""
    if problem.is_volume and not algorithm.takes_volumes:
        return f"x has a depth of {problem.d}; {algorithm.name} is for images"
    return algorithm.supports(problem)


def is_local(algorithm: Algorithm, problem: ConvProblem) -> bool:
    """Return whether an algorithm spreads NaN and Inf no further than torch's own; True if it does not compute it."""
    return why_unsupported(algorithm, problem) is not None or algorithm.is_local(problem)


def fuses(algorithm: Algorithm, problem: ConvProblem) -> bool:
    """Return whether an algorithm computes epilogues (addition, activation) itself for a problem that it supports."""
    return problem.operation is Operation.FORWARD and algorithm.fuses(problem)


def fuses_moments(algorithm: Algorithm, problem: ConvProblem) -> bool:
    """Return whether an algorithm computes the moments of y itself for a problem that it supports."""
    return problem.operation is Operation.FORWARD and algorithm.fuses_moments(problem)


def fuses_normalization(algorithm: Algorithm, problem: ConvProblem) -> bool:
    """Return whether an algorithm normalizes x as it reads x for a problem that it supports."""
    return problem.operation is not Operation.BACKWARD_DATA and algorithm.fuses_normalization(problem)


class AlgorithmSource(Protocol):
    """A provider of algorithms that depend on the problem, such as a library with many convolution engines."""

    @property
    def name(self) -> str:
        """Name such as ``cudnn``, by which users allow all algorithms of the source.

        The names of its algorithms begin with this name and a colon: ``cudnn:``.
        """

    def offered(self, problem: ConvProblem, micro_batch_sizes: Sequence[int]) -> Sequence[Algorithm]:
        """Return the algorithms that support micro-batches of at least one of these sizes. None of them is run."""

    def measuring(self) -> AbstractContextManager[object]:
        """Return a context manager for measuring one problem's algorithms, which frees their builds on exit."""


# Activations by name, in the order of their numbers in the C++ code; each works in place.
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"ReLU": torch.relu_, "ReLU6": partial(F.relu6, inplace=True), "SiLU": partial(F.silu, inplace=True)}
)


@dataclass(frozen=True, slots=True)
class Epilogue:
    """The computation activation(y + added) on the output y of a convolution, after the bias.

    activation: a name in ``ACTIVATIONS``, or None.
    added: (N, K, P, Q), in y's dtype, None for no addition.
    moments: where those of the result, as it is stored, are added (``zero_moments``); None if they are not wanted.
    """

    activation: str | None = None
    added: Tensor | None = None
    moments: Tensor | None = None

    def apply(self, y: Tensor) -> Tensor:
        """Apply the addition and the activation, without moments, to y in place with torch operators; return y."""
        if self.added is not None:
            y = y.add_(self.added)
        return y if self.activation is None else ACTIVATIONS[self.activation](y)


@dataclass(frozen=True, slots=True)
class Prologue:
    """The computation function((x - mean) * inverse * weight + bias) on the x that a convolution reads, in float32.

    mean, inverse: (C,), in float32.
    weight, bias: (C,) of one dtype, or None.
    function: the name of an activation of groups (``kernels.compiled.normalization``), or None.
    slope: of leaky_relu.
    """

    mean: Tensor
    inverse: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    function: str | None = None
    slope: float = 0.01


MOMENT_ROWS, MOMENT_PADDING = 4, 16  # as in the C++ code


def zero_moments(channels: int) -> Tensor:
    """Return a buffer for ``Epilogue.moments`` with the current number of threads: (threads + 1, 4, K + 16), float64.

    Stages add to ``[0, :3, :K]``: how many values each channel has, their means, and their sums of squared deviations.
    The rest is for threads. In all calls with the same number of threads the same bits are added.
    """
    shape = torch.get_num_threads() + 1, MOMENT_ROWS, channels + MOMENT_PADDING
    return torch.zeros(shape, dtype=torch.float64)


# Bytes that algorithms allocate themselves

_counted: dict[Hashable, int] = {}


def counted_internal_bytes(algorithm: Algorithm, problem: ConvProblem, micro_batch_size: int) -> int:
    """Return the peak bytes that torch allocates inside one ``open, step, close`` of this algorithm, by running it.

    On the CPU the result is cached for each thread count, because libraries allocate scratch for each thread. The first
    run, in which oneDNN creates its primitives, allocates no more than later ones.

    On CUDA the result is the bytes that a first run leaves allocated, such as cuBLAS's workspace (32 MiB on Hopper),
    plus the peak of a second run. All cuBLAS workspaces are freed first, so that the workspace is counted for every
    algorithm that needs one, although algorithms share a workspace for each thread and stream. Memory that only the
    first run needs, such as for torch's search among cuDNN's engines, is not counted. The result is cached for each
    device and the settings of that search.
    """
    is_on_cuda = algorithm.device_type == "cuda"
    here = (torch.cuda.current_device(), TorchSettings.current()) if is_on_cuda else torch.get_num_threads()
    key = algorithm.name, algorithm.version, problem, micro_batch_size, algorithm.device_type, here
    if key not in _counted:
        _counted[key] = _count(algorithm, problem, micro_batch_size, algorithm.device_type)
    return _counted[key]


def _count(algorithm: Algorithm, problem: ConvProblem, n: int, device_type: str) -> int:
    workspace = algorithm.workspace(problem, n)
    prepared, scratch = (
        aligned_buffer(size, device_type) for size in (workspace.prepared_bytes, workspace.scratch_bytes)
    )
    x, w, y = (  # The values do not affect the allocations.
        empty_activation(problem, shape, device_type)
        for shape in (problem.x_shape(n), problem.w_shape(), problem.y_shape(n))
    )
    # The bias makes this an upper bound: oneDNN pads it to whole blocks of channels.
    bias = w.new_zeros(problem.k) if problem.operation is Operation.FORWARD else None

    @torch.no_grad()
    def run() -> None:
        algorithm.open(problem, w, prepared)
        algorithm.step(problem, x, w, y, bias, prepared, scratch)
        algorithm.close(problem, w, prepared)

    if device_type != "cuda":
        return peak_allocated_bytes(run)
    give_back = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # a private function, which may be missing
    torch.cuda.synchronize()
    if give_back is not None:
        give_back()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    stays = max(torch.cuda.memory_allocated() - before, 0)
    return stays + peak_allocated_bytes(run, device_type)
