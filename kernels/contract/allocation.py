"""Counts bytes that torch allocates by itself: an algorithm declares the memory that it cannot be handed."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

from mucudnn.kernels.contract.algorithm import ALIGNMENT_BYTES, Algorithm
from mucudnn.kernels.contract.buffers import empty_activation
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.torch_settings import TorchSettings

# CUDA's caching allocator hands out blocks of multiples of 512 bytes. One of at most 1 MiB is cut to size out of a
# larger one, if need be; of a larger one a rest of up to 1 MiB is not cut off, which depends on what is cached. All
# follows ``should_split`` of torch's ``CUDACachingAllocator.cpp``, with the defaults of ``PYTORCH_CUDA_ALLOC_CONF``.
# Not run on a GPU yet.
BLOCK_BYTES = 512
MOST_IN_SMALL_POOL_BYTES = 2**20
MOST_UNCUT_BYTES = 2**20

_counted: dict[Hashable, int] = {}


def peak_allocated_bytes(function: Callable[[], object], device_type: str = "cpu") -> int:
    """Count the largest sum of live bytes that ``function`` newly takes from torch's allocator, its result included.

    On the CPU the allocations of the calling thread are counted, oneDNN's scratchpads and reorders among them: they go
    through the same allocator. The counter is torch's own event record, in the order of the events; the recorder of
    ``torch.profiler`` sees the same bytes, but writes lines to the standard error each time, and costs 40 times more.

    On CUDA all allocations on the current device are counted, in blocks of the caching allocator (multiples of 512
    bytes). What a first call allocates and keeps is among them, such as the workspace of a cuBLAS handle: where that is
    not meant, call ``function`` once before. Raises what ``function`` raises, among that ``torch.OutOfMemoryError``.
    """
    if device_type == "cuda":
        return _cuda_peak_allocated_bytes(function)
    memory_only = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    _enable_profiler_legacy(memory_only)
    try:
        function()
    finally:
        threads = _disable_profiler_legacy()
    live = peak = 0
    for event in (event for thread in threads for event in thread):
        if str(event.kind()) == "memory_alloc":
            live += event.cpu_memory_usage()
            peak = max(peak, live)
    return int(peak)


def _cuda_peak_allocated_bytes(function: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def counted_internal_bytes(
    algorithm: Algorithm, problem: ConvProblem, micro_batch_size: int, device_type: str = "cpu"
) -> int:
    """Count what torch allocates inside one ``open, step, close`` of this algorithm, by running it.

    On the CPU the answer is kept per thread count: libraries take scratch for each thread. It is the same on the first
    run, in which oneDNN creates its primitives, and on later ones.

    On CUDA it is what a first run leaves allocated, such as the workspace that torch gives to cuBLAS (32 MiB on
    Hopper), and what a second run takes on top. All workspaces of cuBLAS are given back before, so that every algorithm
    that needs one counts it, although a process has one for each thread and stream that all of them use. What only the
    first run takes and gives back is not counted: torch's search among cuDNN's engines. The answer is kept per device
    and per the settings by which torch chooses among cuDNN's engines.
    """
    key = _key(algorithm, problem, micro_batch_size, device_type)
    if key not in _counted:
        _counted[key] = _count(algorithm, problem, micro_batch_size, device_type)
    return _counted[key]


def _key(algorithm: Algorithm, problem: ConvProblem, micro_batch_size: int, device_type: str) -> Hashable:
    return algorithm.name, algorithm.version, problem, micro_batch_size, _depends_on(device_type)


def _depends_on(device_type: str) -> Hashable:
    if device_type == "cuda":
        return device_type, torch.cuda.current_device(), TorchSettings.current()
    return device_type, torch.get_num_threads()


def _count(algorithm: Algorithm, problem: ConvProblem, n: int, device_type: str) -> int:
    workspace = algorithm.workspace(problem, n)
    prepared, scratch = (
        aligned_buffer(size, device_type) for size in (workspace.prepared_bytes, workspace.scratch_bytes)
    )
    x, w, y = (  # of any values: they do not change what is allocated
        empty_activation(problem, shape, device_type)
        for shape in (problem.x_shape(n), problem.w_shape(), problem.y_shape(n))
    )
    # With a bias, to be on the safe side: oneDNN pads it to whole blocks of channels.
    bias = w.new_zeros(problem.k) if problem.operation is Operation.FORWARD else None

    @torch.no_grad()
    def run() -> None:
        algorithm.open(problem, w, prepared)
        algorithm.step(problem, x, w, y, bias, prepared, scratch)
        algorithm.close(problem, w, prepared)

    stays = _cuda_bytes_left_by(run) if device_type == "cuda" else 0
    return stays + peak_allocated_bytes(run, device_type)


def _cuda_bytes_left_by(first_run: Callable[[], object]) -> int:
    """Count what is allocated after a run and was not before, with no workspace of cuBLAS there yet."""
    give_back = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # private: without it, one that is there stays
    torch.cuda.synchronize()
    if give_back is not None:
        give_back()
    before = torch.cuda.memory_allocated()
    first_run()
    torch.cuda.synchronize()
    return max(torch.cuda.memory_allocated() - before, 0)


def aligned_buffer(size_bytes: int, device_type: str = "cpu") -> torch.Tensor:
    """Make an uninitialised 1-D uint8 tensor of exactly this size that starts on an ``ALIGNMENT_BYTES`` boundary."""
    raw = torch.empty(size_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device=device_type)
    start = -raw.data_ptr() % ALIGNMENT_BYTES
    return raw[start : start + size_bytes]


def block_bytes(size_bytes: int, device_type: str) -> int:
    """Return the least that an allocator takes for a request: on CUDA whole blocks, elsewhere what is asked for.

    >>> block_bytes(1000, "cuda"), block_bytes(1000, "cpu")
    (1024, 1000)
    """
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES if device_type == "cuda" else size_bytes


def largest_within(free_bytes: int, device_type: str) -> int:
    """Return the largest request for which an allocator takes no more than ``free_bytes``, whatever it has cached."""
    if device_type != "cuda":
        return free_bytes
    small, large = min(free_bytes, MOST_IN_SMALL_POOL_BYTES), free_bytes - MOST_UNCUT_BYTES
    return max(small, large) // BLOCK_BYTES * BLOCK_BYTES


def peak_requested_bytes(function: Callable[[], object], device_type: str) -> int:
    """Count like ``peak_allocated_bytes``, in bytes that were asked for: on CUDA the same whatever is cached.

    Counts on the current device. ``function`` must have run before, if it creates what libraries keep.
    """
    if device_type != "cuda":
        return peak_allocated_bytes(function, device_type)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    function()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    return int(after["requested_bytes.all.peak"] - before["requested_bytes.all.current"])
