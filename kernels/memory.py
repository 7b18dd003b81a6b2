"""Buffers of algorithms: views of them, the bytes that torch allocates beside them, and lack of memory.

On the CPU, torch and some libraries raise a plain ``RuntimeError`` when out of memory, so its message decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

import psutil
import torch
from torch import Tensor
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch.autograd.profiler import record_function

from mucudnn.core.errors import LibraryError
from mucudnn.core.problem import ITEM_BYTES, ConvProblem, MemoryFormat

ALIGNMENT_BYTES = 64  # alignment of prepared and scratch buffers: one cache line, one AVX-512 register
TORCH_FORMATS = {
    MemoryFormat.CONTIGUOUS: torch.contiguous_format,
    MemoryFormat.CHANNELS_LAST: torch.channels_last,
}  # of images
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}


class Part(NamedTuple):
    """One array in a workspace buffer: contiguous, starting at a multiple of ``ALIGNMENT_BYTES``."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def carved_bytes(parts: Sequence[Part]) -> int:
    """Return the size in bytes of the smallest buffer that ``carve`` can divide into these arrays."""
    *before, last = parts or (Part((0,), torch.uint8),)
    return sum(aligned(part.size_bytes) for part in before) + last.size_bytes


def carve(buffer: Tensor, parts: Sequence[Part]) -> list[Tensor]:
    """Divide ``buffer`` (1-D uint8, aligned) into arrays, and return a view of each ``Part``.

    >>> [tuple(view.shape) for view in carve(torch.zeros(128, dtype=torch.uint8), [Part((2, 3), torch.float32)])]
    [(2, 3)]
    """
    views = []
    start = 0
    for part in parts:
        views.append(buffer[start : start + part.size_bytes].view(part.dtype).view(part.shape))
        start += aligned(part.size_bytes)
    return views


def torch_dtype(problem: ConvProblem) -> torch.dtype:
    return _DTYPES[problem.dtype]


def compute_dtype(problem: ConvProblem) -> torch.dtype:
    """Return the dtype in which to compute: the problem's, or float32 if the problem's dtype has lower precision."""
    return torch.promote_types(torch_dtype(problem), torch.float32)


def format_of(memory_format: MemoryFormat, dims: int) -> torch.memory_format:
    """Return torch's memory format of tensors with this number of dimensions: 3, which are contiguous, 4 or 5."""
    if dims == 3:
        return torch.contiguous_format
    is_last = memory_format is MemoryFormat.CHANNELS_LAST
    return torch.channels_last_3d if is_last and dims == 5 else TORCH_FORMATS[memory_format]


def torch_format(problem: ConvProblem) -> torch.memory_format:
    """Return torch's memory format of the problem's tensors."""
    return format_of(problem.memory_format, 2 + len(problem.extent))


def dense_strides(shape: Sequence[int], memory_format: MemoryFormat) -> tuple[int, ...]:
    """Return the strides of a dense tensor, (N, C, ...), as torch sets them.

    >>> dense_strides((2, 3, 4, 5), MemoryFormat.CHANNELS_LAST)
    (60, 1, 15, 3)
    """
    axes = range(len(shape))
    order = (1, *reversed(axes[2:]), 0) if memory_format is MemoryFormat.CHANNELS_LAST else tuple(reversed(axes))
    strides, step = [0] * len(shape), 1
    for axis in order:
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def empty_activation(problem: ConvProblem, shape: Sequence[int], device_type: str = "cpu") -> Tensor:
    """Return an uninitialised tensor, (N, C, ...), in the problem's dtype and memory format."""
    return torch.empty(shape, dtype=torch_dtype(problem), device=device_type, memory_format=torch_format(problem))


def aligned(size_bytes: int) -> int:
    """Return the next multiple of ``ALIGNMENT_BYTES``."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def suggests_channels_last(tensor: Tensor) -> bool:
    """Return whether torch regards a tensor as channels_last, by its sizes and strides.

    The function repeats ``suggest_memory_format`` of torch's C++; torch's Python version takes seconds to import.
    """
    if tensor.dim() not in (4, 5) or tensor.stride(1) == 0:
        return False
    least = 0
    for axis in (1, *range(tensor.dim() - 1, 1, -1), 0):
        size, stride = tensor.shape[axis], tensor.stride(axis)
        if size == 0 or stride < least or (axis == 0 and least == tensor.stride(1)):
            return False
        least = stride * size if size > 1 else stride
    return True


# Bytes that torch allocates

# CUDA's caching allocator returns blocks of multiples of 512 bytes. Blocks of at most 1 MiB are split to size; larger
# blocks keep a remainder of up to 1 MiB, which depends on what is cached. This follows ``should_split`` of torch's
# ``CUDACachingAllocator.cpp``, with the defaults of ``PYTORCH_CUDA_ALLOC_CONF``.
BLOCK_BYTES = 512
MOST_IN_SMALL_POOL_BYTES = 2**20
MOST_UNCUT_BYTES = 2**20


def peak_allocated_bytes(function: Callable[[], object], device_type: str = "cpu", *, in_blocks: bool = True) -> int:
    """Return the peak of the live bytes that ``function`` allocates through torch, including its result.

    On the CPU, allocations of the calling thread are counted, including oneDNN's scratchpads and reorders, which use
    the same allocator. The allocations are read from the events of torch's legacy profiler; ``torch.profiler`` sees the
    same bytes, but writes to standard error each time, and costs 40 times more.

    On CUDA, all allocations on the current device are counted: in blocks of the caching allocator (multiples of 512
    bytes), or if not ``in_blocks``, the bytes that are requested. This includes allocations that a first call keeps,
    such as the workspace of a cuBLAS handle; to exclude them, call ``function`` once before. Raises the errors of
    ``function``, including ``torch.OutOfMemoryError``.
    """
    return max(peaks_between_marks(function, device_type, in_blocks=in_blocks))


def peaks_between_marks(
    function: Callable[[], object], device_type: str = "cpu", *, in_blocks: bool = True
) -> list[int]:
    """Return the peaks of ``peak_allocated_bytes`` before, between and after the calls of ``mark`` in ``function``."""
    global _marked
    if device_type == "cuda":
        kind = f"{'allocated' if in_blocks else 'requested'}_bytes.all"
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()[f"{kind}.current"]
        _marked = on_cuda = _MarksOnCuda([], f"{kind}.peak", before)
        try:
            function()
        finally:
            _marked = None
        torch.cuda.synchronize()
        on_cuda.mark()
        return on_cuda.peaks
    memory_only = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    _enable_profiler_legacy(memory_only)
    try:
        function()
    finally:
        threads = _disable_profiler_legacy()
    changes, marks, gradients = [0], [], set[int]()
    for event in (event for thread in threads for event in thread):
        kind, name = str(event.kind()), event.name()
        if kind == "memory_alloc":
            changes.append(event.cpu_memory_usage())
        elif kind == "push" and name.startswith(_MARK):
            marks.append((len(changes), int(name.removeprefix(_MARK))))
        elif kind == "push" and name.startswith(_GRADIENT):
            # The last allocation of its size is the gradient's, which is not counted.
            size = int(name.removeprefix(_GRADIENT))
            places = (place for place in range(len(changes) - 1, 0, -1) if changes[place] == size)
            place = next((place for place in places if place not in gradients), None)
            if place is not None:
                gradients.add(place)
                changes[place] = 0
    live = list(accumulate(changes))
    places = (place + (size > 0 and changes[place : place + 1] == [-size]) for place, size in marks)
    bounds = [0, *accumulate(places, max), len(live)]  # another mark may come before the tensor is freed
    # An interval without allocations has the bytes of the one before.
    return [int(max(live[max(0, start - 1) : stop])) for start, stop in pairwise(bounds)]


def mark_gradient(size_bytes: int) -> None:
    """Have ``peaks_between_marks`` not count a gradient of so many bytes, which has just been allocated.

    On CUDA it counts.
    """
    if _marked is None and torch._C._autograd._profiler_enabled():
        with record_function(f"{_GRADIENT}{size_bytes}"):
            pass


def mark(freed_bytes: int = 0) -> None:
    """Begin another interval of ``peaks_between_marks``.

    freed_bytes: of a tensor that is freed next, before the interval; on CUDA it is freed in the interval.
    """
    if _marked is not None:
        _marked.mark()
    elif torch._C._autograd._profiler_enabled():
        with record_function(f"{_MARK}{freed_bytes}"):
            pass


@dataclass(slots=True)
class _MarksOnCuda:
    peaks: list[int]
    statistic: str
    before: int

    def mark(self) -> None:
        self.peaks.append(int(torch.cuda.memory_stats()[self.statistic] - self.before))
        torch.cuda.reset_peak_memory_stats()


_MARK = "mucudnn: allocations after "
_GRADIENT = "mucudnn: gradient of "
_marked: _MarksOnCuda | None = None


def aligned_buffer(size_bytes: int, device_type: str = "cpu") -> torch.Tensor:
    """Return an uninitialised 1-D uint8 tensor of exactly this size, aligned to ``ALIGNMENT_BYTES``."""
    raw = torch.empty(size_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device=device_type)
    start = -raw.data_ptr() % ALIGNMENT_BYTES
    return raw[start : start + size_bytes]


def block_bytes(size_bytes: int, device_type: str) -> int:
    """Return the bytes that torch's allocator uses for a request: whole blocks on CUDA, the exact size on the CPU.

    >>> block_bytes(1000, "cuda"), block_bytes(1000, "cpu")
    (1024, 1000)
    """
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES if device_type == "cuda" else size_bytes


def largest_within(free_bytes: int, device_type: str) -> int:
    """Return the largest request that takes at most ``free_bytes``, in bytes, regardless of the allocator's cache."""
    if device_type != "cuda":
        return free_bytes
    small, large = min(free_bytes, MOST_IN_SMALL_POOL_BYTES), free_bytes - MOST_UNCUT_BYTES
    return max(small, large) // BLOCK_BYTES * BLOCK_BYTES


# Lack of memory

_WORDS = (  # Substrings of the messages of torch's CPU allocator, C++, MKL, the CUDA runtime and its libraries.
    "DefaultCPUAllocator",
    "std::bad_alloc",
    "oneMKL DFTI ERROR: Not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    # Torch tries cuDNN's engines one after another and swallows their errors; it raises this if all have failed.
    "was unable to find an engine to execute this computation",
)


def is_free(nbytes: int, device: torch.device) -> bool:
    """Return whether half of the free memory of a device is enough for so many bytes."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return bool(nbytes < free / 2)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means a lack of memory, so that a retry with more free memory may succeed."""
    if isinstance(error, LibraryError):
        return error.is_lack_of_memory
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(words in str(error) for words in _WORDS)


def give_back_cache() -> None:
    """Free the GPU memory that torch's allocator caches, since a library may have failed for lack of memory."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
