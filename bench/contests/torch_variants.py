"""Torch's own convolution, as benchmarks compare with it: with the user's settings and, on CUDA, in benchmark mode.

Each variant has a thread of its own (see ``own_thread``). Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from mucudnn.bench.contests.names import TORCH
from mucudnn.bench.contests.own_thread import OwnThread
from mucudnn.kernels.torch_ops.native_cuda import cudnn_benchmark
from mucudnn.measuring.timing.timer import Runner, T, here

# Name -> benchmark_limit, with torch.backends.cudnn.benchmark = True: how many engines are timed; 0: all.
_BENCHMARK_LIMITS = {"torch-benchmark-10": 10, "torch-benchmark-0": 0}


@contextmanager
def torch_variants(device: str) -> Iterator[Mapping[str, Runner]]:
    """Yield name -> how to call torch under its settings. ``TORCH`` is the first, and on the CPU the only one.

    On CUDA, functions run on the current device and stream of the thread that enters this context.
    """
    if device != "cuda":
        yield {TORCH: here}
        return
    with ExitStack() as threads:
        variants: dict[str, Runner] = {TORCH: threads.enter_context(OwnThread(device)).call}
        for name, limit in _BENCHMARK_LIMITS.items():
            variants[name] = _searching(threads.enter_context(OwnThread(device)), limit)
        yield variants


def _searching(thread: OwnThread, benchmark_limit: int) -> Runner:
    def run(function: Callable[[], T], /) -> T:
        with cudnn_benchmark(benchmark_limit):
            return thread.call(function)

    return run
