"""Interleaved timing of contestants: each round times every contestant, so that slow phases of the machine affect all.

PyTorch's own convolution is a contestant with the user's settings and, on CUDA, in benchmark mode. On CUDA each of
these variants runs in its own thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from time import perf_counter

import torch

from mucudnn.bench.results.variants import TORCH
from mucudnn.bench.results.writing import Row
from mucudnn.core.errors import first_line
from mucudnn.measuring.turns import Rounds, Runner, Stop, T, Timer, here, in_turns


def time_in_turns(timers: Sequence[Timer], rounds: Rounds) -> None:
    """Let timers of contestants take their samples in turns, after a warm-up call of each.

    If a contestant fails, the others continue. The time limit of the rounds is of one contestant on average, so that
    short calls get more samples: interruptions distort short times more. It includes what the clock does beside the
    calls, such as emptying caches.
    """
    if not timers:
        return
    began_s = perf_counter()
    for done, _ in enumerate(in_turns([timer.sample for timer in timers]), 1):
        spent_s = max(sum(timer.spent_s for timer in timers), perf_counter() - began_s)
        if rounds.is_enough(done, spent_s / len(timers)):
            break


def failed(error: Exception) -> Timer:
    """Return the timer of a contestant that cannot be called."""
    return Timer(lambda: None, stop=Stop.FAILED, error=error)


def with_samples(row: Row, timer: Timer) -> Row:
    """Add to a row the samples of a contestant's timer, or the reason why it failed."""
    if timer.error is None:
        return replace(row, samples_s=tuple(timer.samples_s))
    return replace(row, failure=first_line(timer.error))


def own_thread(device: str) -> ThreadPoolExecutor:
    """Return a thread that runs functions and their backward passes.

    device: ``cpu``, or ``cuda`` to use the caller's current device and stream.
    """
    stream = torch.cuda.current_stream() if device == "cuda" else None

    def prepare() -> None:
        if stream is not None:
            torch.cuda.set_stream(stream)  # This also sets the current device to that of the stream.
        torch.autograd.set_multithreading_enabled(False)  # Otherwise backward passes would run in a shared thread.

    return ThreadPoolExecutor(1, initializer=prepare)


# Torch's variants, with their value of torch.backends.cudnn.benchmark_limit: the number of engines timed in benchmark
# mode, 0 for all. The first has the user's settings.
_BENCHMARK_LIMITS = {TORCH: None, "torch-benchmark-10": 10, "torch-benchmark-0": 0}


@contextmanager
def torch_variants(device: str) -> Iterator[Mapping[str, Runner]]:
    """Yield the runners by name, each of which calls functions under one choice of torch's convolution settings.

    The first is ``TORCH``, which has the user's settings; on the CPU it is the only one. On CUDA, functions run on the
    calling thread's current device and stream.
    """
    if device != "cuda":
        yield {TORCH: here}
        return
    with ExitStack() as threads:
        yield {
            name: partial(_run_in, threads.enter_context(own_thread(device)), limit)
            for name, limit in _BENCHMARK_LIMITS.items()
        }


def _run_in(thread: ThreadPoolExecutor, benchmark_limit: int | None, function: Callable[[], T], /) -> T:
    """Call a function in a thread; return its result, or raise its error.

    benchmark_limit: that of cuDNN's ``benchmark = True`` meanwhile, after which both are restored; None for the user's
    settings. ``torch.backends.cudnn.flags`` would also set all other settings, and reading the settings of TF32 can
    raise.
    """
    if benchmark_limit is None:
        return thread.submit(function).result()
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.benchmark_limit
    try:
        cudnn.benchmark, cudnn.benchmark_limit = True, benchmark_limit
        return thread.submit(function).result()
    finally:
        cudnn.benchmark, cudnn.benchmark_limit = before
