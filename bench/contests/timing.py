"""Interleaved timing of contestants: each round times every contestant, so that slow moments of the machine hit all.

PyTorch's own convolution is a contestant with the user's settings and, on CUDA, in benchmark mode. On CUDA each of
these variants runs in its own thread. The CUDA variants have not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import ParamSpec, Self, TypeVar

import torch

from mucudnn.bench.contests.variants import TORCH
from mucudnn.kernels.torch_ops.native_cuda import cudnn_benchmark
from mucudnn.measuring.timing.timer import EVERY_ROUND, Clock, Runner, StoppingRule, T, Timer, here, sample_in_rounds


@dataclass(frozen=True, slots=True)
class Contestant:
    """A call to be timed. runner: makes the call and reads the clock, so that the runner's overhead is not timed."""

    call: Callable[[], object]
    runner: Runner = here


Samples = tuple[float, ...]  # seconds, one per round, in order


@dataclass(frozen=True, slots=True)
class TurnRounds:
    """A rule for the number of rounds: from ``least`` to ``most``, until contestants took ``short_s`` s on average.

    So short calls get more samples, since interruptions weigh more in short times.
    """

    least: int
    most: int
    short_s: float

    def is_enough(self, done: int, timers: Sequence[Timer]) -> bool:
        """Whether the contestants need no further round after the ``done`` rounds so far."""
        if done < self.least:
            return False
        return done >= self.most or sum(timer.spent_s for timer in timers) >= self.short_s * len(timers)


def try_in_turns(
    contestants: Sequence[Contestant], rounds: TurnRounds, clock: Clock, rule: StoppingRule = EVERY_ROUND
) -> list[Samples | Exception]:
    """Return for each contestant its times, after a warm-up call, or its error.

    A contestant that fails does not stop the others.
    """
    timers = [Timer(contestant.call, clock, rule, runner=contestant.runner) for contestant in contestants]
    for done in sample_in_rounds(timers):
        if rounds.is_enough(done, timers):
            break
    return [timer.error or tuple(timer.samples_s) for timer in timers]


def time_in_turns(
    contestants: Sequence[Contestant], rounds: int, clock: Clock, rule: StoppingRule = EVERY_ROUND
) -> list[Samples]:
    """Return the seconds of one call of each contestant per round, after a warm-up call of each.

    Raises the first error of a contestant.
    """
    found = []
    for times in try_in_turns(contestants, TurnRounds(rounds, rounds, 0.0), clock, rule):
        if isinstance(times, Exception):
            raise times
        found.append(times)
    return found


_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class OwnThread:
    """A thread that runs functions, including their backward passes. As a context manager, ends the thread."""

    def __init__(self, device: str = "cpu") -> None:
        """Start the thread. device: ``cpu``, or ``cuda`` to use the caller's current device and stream."""
        stream = torch.cuda.current_stream() if device == "cuda" else None
        self._executor = ThreadPoolExecutor(1, initializer=_prepare, initargs=(stream,))

    def call(self, function: Callable[_Given, _Result], *args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        """Call a function in the thread; return its result, or raise its error."""
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
    """Provide by name the runners, each of which calls functions under one choice of torch's convolution settings.

    The first is ``TORCH``, with the user's settings, on the CPU the only one. On CUDA, functions run on the current
    device and stream of the calling thread.
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
