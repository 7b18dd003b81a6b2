"""Interleaved timing of contestants: each round times every contestant, so that slow phases of the machine affect all.

PyTorch's own convolution is a contestant with the user's settings and, on CUDA, in benchmark mode. On CUDA each of
these variants runs in its own thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import ParamSpec, Self

import torch

from mucudnn.bench.results.variants import TORCH
from mucudnn.measuring.clocks import Clock, StoppingRule
from mucudnn.measuring.turns import Rounds, Runner, T, Timer, here, in_turns


@dataclass(frozen=True, slots=True)
class Contestant:
    """A call to be timed. runner: makes the call and reads the clock, so that its own overhead is not timed."""

    call: Callable[[], object]
    runner: Runner = here


Samples = tuple[float, ...]  # seconds, in the order of the rounds


def try_in_turns(
    contestants: Sequence[Contestant], rounds: Rounds, clock: Clock, rule: StoppingRule | None = None
) -> list[Samples | Exception]:
    """Time the contestants in turns, after a warm-up call of each; return the samples or the error of each.

    If a contestant fails, the others continue. The time limit of the rounds is of one contestant on average, so that
    short calls get more samples: interruptions distort short times more. It includes what the clock does beside the
    calls, such as emptying caches. rule: of each contestant's samples; by default the clock's.
    """
    rule, began_s = rule or clock.every_round, perf_counter()
    timers = [Timer(contestant.call, clock, rule, runner=contestant.runner) for contestant in contestants]
    for done, _ in enumerate(in_turns([timer.sample for timer in timers]), 1):
        spent_s = max(sum(timer.spent_s for timer in timers), perf_counter() - began_s)
        if not timers or rounds.is_enough(done, spent_s / len(timers)):
            break
    return [timer.error or tuple(timer.samples_s) for timer in timers]


_Given = ParamSpec("_Given")


class OwnThread:
    """A thread that runs functions and their backward passes. Leaving the context ends the thread."""

    def __init__(self, device: str = "cpu") -> None:
        """Start the thread. device: ``cpu``, or ``cuda`` to use the caller's current device and stream."""
        stream = torch.cuda.current_stream() if device == "cuda" else None
        self._executor = ThreadPoolExecutor(1, initializer=_prepare, initargs=(stream,))

    def call(self, function: Callable[_Given, T], *args: _Given.args, **kwargs: _Given.kwargs) -> T:
        """Call a function in the thread; return its result, or raise its error."""
        return self._executor.submit(function, *args, **kwargs).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown()


def _prepare(stream: torch.cuda.Stream | None) -> None:
    if stream is not None:
        torch.cuda.set_stream(stream)  # This also sets the current device to that of the stream.
    torch.autograd.set_multithreading_enabled(False)  # Otherwise backward passes would run in a shared thread.


# Values of torch.backends.cudnn.benchmark_limit: the number of engines timed in benchmark mode, 0 for all.
_BENCHMARK_LIMITS = {"torch-benchmark-10": 10, "torch-benchmark-0": 0}


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
        variants: dict[str, Runner] = {TORCH: threads.enter_context(OwnThread(device)).call}
        for name, limit in _BENCHMARK_LIMITS.items():
            variants[name] = _searching(threads.enter_context(OwnThread(device)), limit)
        yield variants


def _searching(thread: OwnThread, benchmark_limit: int) -> Runner:
    """Return a runner with cuDNN's ``benchmark = True`` and this limit, which restores both, even after errors.

    ``torch.backends.cudnn.flags`` would also set all other settings, and reading the settings of TF32 can raise.
    """

    def run(function: Callable[[], T], /) -> T:
        cudnn = torch.backends.cudnn
        found = cudnn.benchmark, cudnn.benchmark_limit
        try:
            cudnn.benchmark, cudnn.benchmark_limit = True, benchmark_limit
            return thread.call(function)
        finally:
            cudnn.benchmark, cudnn.benchmark_limit = found

    return run
