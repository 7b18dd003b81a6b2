"""Measures a batch divided over ranks of unequal speed on one machine, with fewer threads or competing processes.

Each rank measures steps of several local batches while the others compute. The best shares, and equal ones, are then
run on all ranks, interleaved, and compared with the predicted times.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

from mucudnn.bench.report.records import Record, record_header
from mucudnn.bench.report.tables import memory_bound, milliseconds, new_table, ratio
from mucudnn.bench.scaling.local_batches import along
from mucudnn.bench.scaling.steps import measure_steps
from mucudnn.bench.sources.models import blamed_in_training, importable, seeded_model
from mucudnn.bench.sources.networks import arguments_for
from mucudnn.distributed.link import gathered
from mucudnn.measuring.timing.timer import Clock, WallClock
from mucudnn.optimizing.optimize import optimize
from mucudnn.running.environment import Environment, current_environment
from mucudnn.solver.shares import Shares, best_shares, equal_shares
from mucudnn.tracing.own_step import OwnStep
from mucudnn.words.config import Config
from mucudnn.words.errors import UnavailableError
from mucudnn.words.progress import progress_bar, silent

_SIZES = 5  # number of local batches at which whole steps are measured


@dataclass(frozen=True, slots=True)
class Place:
    """The processor of a rank: its threads, each on its own core, and the number of busy processes on these cores."""

    threads: int
    load: int = 0

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}"
        return f"{threads}, {self.load} busy process{'es' * (self.load != 1)} beside" if self.load else threads


@dataclass(frozen=True, slots=True)
class MeasuredShares:
    """Predicted and measured steps of a batch that is divided over the ranks ``places``.

    best, equal: shares with predicted seconds. best_s, equal_s: measured seconds by round and rank. alone_s: predicted
    seconds of the whole batch on each rank.
    """

    source: str
    batch: int
    places: tuple[Place, ...]
    config: Config
    environment: Environment
    best: Shares
    equal: Shares
    best_s: tuple[tuple[float, ...], ...]
    equal_s: tuple[tuple[float, ...], ...]
    alone_s: tuple[float, ...]

    @property
    def speedup_over_equal(self) -> float:
        """The median over the rounds of the measured time with equal shares over that with the best shares."""
        return median(max(equal) / max(best) for best, equal in zip(self.best_s, self.equal_s, strict=True))

    @property
    def over_predicted(self) -> float:
        """The measured time of a step with the best shares over the predicted time."""
        return _step_s(self.best_s) / self.best.step_s


def measure_shares(
    source: str, sizes: dict[str, Any], places: Sequence[Place], batch: int, config: Config, rounds: int
) -> MeasuredShares:
    """Divide a batch over the ranks of the default process group, and run the shares; every rank must call this.

    sizes: additional arguments of ``seeded_model``. places: one for each rank, on the CPU. Gradients are not exchanged,
    because that takes the same time with any shares.

    Raises ``UnavailableError`` if the machine has too few cores, and the errors of ``optimize``.
    """
    rank, place, clock = dist.get_rank(), places[dist.get_rank()], WallClock()
    with ExitStack() as stack:
        cores = stack.enter_context(_on_own_cores([one.threads for one in places], rank))
        progress = stack.enter_context(progress_bar()) if rank == 0 else silent
        stack.enter_context(importable(source))
        model, (x, *_) = seeded_model(source, batch, **sizes)
        model.train()
        stack.enter_context(blamed_in_training(source, x.shape))
        own = replace(config, confirm=False, share_tuning=False)
        optimize(model, arguments_for(source, x), own, progress=progress)
        dist.barrier()
        stack.enter_context(_busy(cores, place.load))
        measured = measure_steps(
            model,
            lambda n: arguments_for(source, x[:n]),
            sorted({max(1, round(batch * part / _SIZES)) for part in range(1, _SIZES + 1)}),
            clock,
            rounds=rounds,
            together=dist.barrier,
            progress=progress,
        )
        curve = along({0: 0.0} | {step.local_batch: step.step_s for step in measured.steps}, batch).tolist()
        curves = gathered(curve)
        best, equal = best_shares(curves, batch), equal_shares(curves, batch)
        steps = [_step_of(model, arguments_for(source, x[: each.samples[rank]])) for each in (best, equal)]
        best_s, equal_s = _interleaved(steps, clock, rounds)
        environment = current_environment()
    return MeasuredShares(
        *(source, batch, tuple(places), config, environment),
        *(best, equal, best_s, equal_s),
        tuple(each[batch] for each in curves),
    )


def _step_of(model: torch.nn.Module, arguments: tuple[Any, ...]) -> Callable[[], None]:
    """Return a function that trains for one step; it does nothing if there are no samples."""
    if not len(arguments[0]):
        return lambda: None
    own, optimizer = OwnStep(arguments), torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)

    def step() -> None:
        own(model)
        optimizer.step()

    return step


def _interleaved(
    steps: Sequence[Callable[[], None]], clock: Clock, rounds: int
) -> Iterator[tuple[tuple[float, ...], ...]]:
    """Time the steps of all ranks, which start together; yield for each step the seconds by round and rank."""
    own: list[list[float]] = [[] for _ in steps]
    for number in range(rounds + 1):
        for times, step in zip(own, steps, strict=True):
            dist.barrier()
            seconds = clock.time(step, 1)
            if number:  # The first round is a warm-up.
                times.append(seconds)
    dist.barrier()
    for times in own:
        yield tuple(zip(*gathered(times), strict=True))


@contextmanager
def _on_own_cores(threads: Sequence[int], rank: int) -> Iterator[set[int]]:
    """Bind this process to as many cores as it has threads, which no other rank uses, and yield the cores."""
    if not hasattr(os, "sched_setaffinity"):
        raise UnavailableError("this system cannot bind processes to cores; measure on Linux")
    every = sorted(os.sched_getaffinity(0))
    if sum(threads) > len(every):
        raise UnavailableError(
            f"the ranks have {sum(threads)} threads, and this process {len(every)} cores; give fewer threads"
        )
    first, before = sum(threads[:rank]), torch.get_num_threads()
    own = set(every[first : first + threads[rank]])
    for thread in os.listdir("/proc/self/task"):  # noqa: PTH208  # names of threads, some of which exist by now
        os.sched_setaffinity(int(thread), own)
    torch.set_num_threads(threads[rank])
    try:
        yield own
    finally:
        torch.set_num_threads(before)
        os.sched_setaffinity(0, every)


@contextmanager
def _busy(cores: set[int], processes: int) -> Iterator[None]:
    """Keep processes busy on these cores within the context."""
    loads = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        for load in loads:
            os.sched_setaffinity(load.pid, cores)
        yield
    finally:
        for load in loads:
            load.kill()
            load.wait()


_COLUMNS = ("samples", "predicted ms", "measured ms", "equal share", "predicted ms", "measured ms")


def measured_shares_table(result: MeasuredShares) -> Table:
    """Return a table with a row for each rank. The footer has the time of the step, that of the slowest rank."""
    title = f"{result.source}, {result.batch} samples on {len(result.places)} ranks, {memory_bound(result.config)}"
    predicted = [milliseconds(shares.step_s) for shares in (result.best, result.equal)]
    measured = [milliseconds(_step_s(times)) for times in (result.best_s, result.equal_s)]
    footer = ("the step", "", "", predicted[0], measured[0], "", predicted[1], measured[1])
    printed = new_table(title, ("rank", "place"), _COLUMNS, footer)
    for row in measured_share_rows(result):
        printed.add_row(
            *(str(row["rank"]), row["place"], str(row["samples"])),
            *(milliseconds(row["predicted_s"]), milliseconds(row["time_s"]), str(row["equal_samples"])),
            *(milliseconds(row["equal_predicted_s"]), milliseconds(row["equal_time_s"])),
        )
    return printed


def measured_in_words(result: MeasuredShares) -> str:
    """Describe the measured speedup over equal shares, and the accuracy of the prediction."""
    return (
        f"measured {ratio(result.speedup_over_equal)} as fast as equal shares (predicted "
        f"{ratio(result.equal.step_s / result.best.step_s)}); the step takes {result.over_predicted:.2f} times the "
        f"predicted time; medians of {len(result.best_s)} rounds; gradients are not exchanged\n"
        f"UnevenBatchSampler(data, shares={result.best.samples})"
    )


def measured_share_record(result: MeasuredShares) -> Record:
    """Return the JSON object of ``mucudnn share --measure --json``."""
    return {
        **record_header(result.config, result.environment),
        "source": result.source,
        "batch": result.batch,
        "step_s": _step_s(result.best_s),
        "equal_step_s": _step_s(result.equal_s),
        "over_predicted": result.over_predicted,
        "speedup_over_equal": result.speedup_over_equal,
        "ranks": measured_share_rows(result),
    }


def measured_share_rows(result: MeasuredShares) -> list[Record]:
    """Return the rows of the CSV file, one for each rank."""
    return [
        {
            "rank": rank,
            "place": str(place),
            "threads": place.threads,
            "load": place.load,
            "samples": result.best.samples[rank],
            "predicted_s": result.best.times_s[rank],
            "time_s": median(times[rank] for times in result.best_s),
            "equal_samples": result.equal.samples[rank],
            "equal_predicted_s": result.equal.times_s[rank],
            "equal_time_s": median(times[rank] for times in result.equal_s),
            "alone_s": result.alone_s[rank],
        }
        for rank, place in enumerate(result.places)
    ]


def _step_s(times_s: Sequence[Sequence[float]]) -> float:
    """Return the median over the rounds of the slowest rank's seconds."""
    return median(map(max, times_s))
