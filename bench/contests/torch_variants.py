"""PyTorch's own convolution as a baseline: with the user's settings and, on CUDA, in benchmark mode.

Each variant runs in its own thread. This has not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import ParamSpec, Self, TypeVar

import torch

from mucudnn.bench.contests.variants import TORCH
from mucudnn.kernels.torch_ops.native_cuda import cudnn_benchmark
from mucudnn.measuring.timing.timer import Runner, T, here

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class OwnThread:
    """A thread in which calls run, including backward passes. A context manager: the thread ends with it."""

    def __init__(self, device: str = "cpu") -> None:
        """Start the thread. device: ``cpu``, or ``cuda`` for a thread with the current device and stream."""
        stream = torch.cuda.current_stream() if device == "cuda" else None
        self._executor = ThreadPoolExecutor(1, initializer=_prepare, initargs=(stream,))

    def call(self, function: Callable[_Given, _Result], *args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        """Call the function in the thread, and return or raise what it does."""
        return self._executor.submit(function, *args, **kwargs).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown()


def _prepare(stream: torch.cuda.Stream | None) -> None:
    if stream is not None:
        torch.cuda.set_stream(stream)  # also sets the device of the stream
    torch.autograd.set_multithreading_enabled(False)  # otherwise backward passes run in a shared thread


# Values of torch.backends.cudnn.benchmark_limit in benchmark mode: how many engines are timed, or 0 for all.
_BENCHMARK_LIMITS = {"torch-benchmark-10": 10, "torch-benchmark-0": 0}


@contextmanager
def torch_variants(device: str) -> Iterator[Mapping[str, Runner]]:
    """Yield a runner for each variant of torch's settings, by name. The first, on the CPU the only one, is ``TORCH``.

    On CUDA, functions run on the current device and stream of the calling thread.
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
