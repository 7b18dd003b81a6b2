"""Torch's own convolution as benchmarks compare with it: as the user has it and, on CUDA, with cuDNN's benchmark mode.

Torch keeps the engine that it has picked for a problem, per thread, under a key that does not say how it was picked
(``benchmark_cache`` in ATen/native/cudnn/Conv_v8.cpp). Two settings in one thread would both run what the first of them
picked; so each variant has a thread of its own. Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import torch

from mucudnn.bench.turns import Runner, T, here
from mucudnn.kernels.native_cuda import cudnn_benchmark

TORCH = "torch"
# torch.backends.cudnn.benchmark = True with a benchmark_limit: of engines that are timed; 0: all there are.
_BENCHMARK_LIMITS = {"torch-benchmark-10": 10, "torch-benchmark-0": 0}


@contextmanager
def torch_variants(device: str) -> Iterator[Mapping[str, Runner]]:
    """Name -> how to call torch under its settings. ``TORCH`` is the first, and on the CPU the only one.

    On CUDA, functions run on the current device and stream of the thread that enters this context.
    """
    if not device.startswith("cuda"):
        yield {TORCH: here}
        return
    stream = torch.cuda.current_stream()
    with ExitStack() as threads:

        def in_own_thread(benchmark_limit: int | None) -> Runner:
            return threads.enter_context(_own_thread(lambda: torch.cuda.set_stream(stream), benchmark_limit))

        benchmarked = {name: in_own_thread(limit) for name, limit in _BENCHMARK_LIMITS.items()}
        yield {TORCH: in_own_thread(None), **benchmarked}


@contextmanager
def _own_thread(start: Callable[[], object], benchmark_limit: int | None) -> Iterator[Runner]:
    """A thread that calls ``start`` first; limit None: ``torch.backends.cudnn`` stays as the user has it."""
    with ThreadPoolExecutor(1, "torch", start) as thread:

        def run(function: Callable[[], T]) -> T:
            if benchmark_limit is None:
                return thread.submit(function).result()
            with cudnn_benchmark(benchmark_limit):
                return thread.submit(function).result()

        yield run
