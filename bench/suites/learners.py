"""Throughput of several learners on one device: processes that train on their own, at the same time.

On CPUs each learner has its part of the threads, and CPUs of its own. It is tuned while the others of its group tune,
since what is fastest alone may not be so beside others that use the same caches and memory. Then all learners of a
group run steps together, as often as each other; the slowest ends the measurement. The groups, one for each number of
learners, take turns. The exchange of parameters between learners is not part of the steps.

After CROSSBOW (Koliousis et al., PVLDB 2019), which adds learners to a device as long as its throughput grows.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from operator import methodcaller
from statistics import median
from time import sleep
from typing import Any

import torch

from mucudnn.bench.results.columns import Columns, table_of
from mucudnn.bench.results.variants import Variant, shown_name
from mucudnn.bench.sources.models import blamed_in_training, seeded_model
from mucudnn.bench.sources.trainee import Trainee, loss_for
from mucudnn.bench.suites.shared.apart import PAUSE_S
from mucudnn.bench.suites.shared.processes import Worker, WorkerError
from mucudnn.core.config import Config
from mucudnn.core.errors import InvalidInputError, UnavailableError
from mucudnn.core.statistics import spread
from mucudnn.core.tables import Table, ratio
from mucudnn.core.terminal import Progress, silent
from mucudnn.measuring.clocks import wall_clock
from mucudnn.measuring.turns import in_turns
from mucudnn.optimizing.optimize import optimize

KNEE = 0.95  # share of the best throughput that is enough
_SAMPLE_S = 0.5  # of steps; the ends of the learners differ by less than a step
_TUNING = 0.7  # share of the progress bar
BOTH = (Variant.TORCH, Variant.MUCUDNN)


@dataclass(frozen=True, slots=True)
class LearnersSetting:
    """What every learner trains.

    device: ``cpu`` or ``cuda``, the current GPU.
    local_batches: numbers of samples in a step of one learner.
    sizes: keywords of ``seeded_model``.
    """

    source: str
    device: str
    local_batches: tuple[int, ...]
    config: Config
    sizes: Mapping[str, Any]


class Learner:
    """A learner in its own process: a copy of the model for each local batch, with each kind of convolutions.

    cpus: numbers of the CPUs to run on; none for all.
    gpu: number of the GPU, if it is on one.
    """

    def __init__(self, setting: LearnersSetting, threads: int, cpus: Sequence[int], gpu: int | None) -> None:
        if cpus:
            os.sched_setaffinity(0, cpus)  # before threads are started, which inherit it
        if gpu is not None:
            torch.cuda.set_device(gpu)
        torch.set_num_threads(threads)
        model, x = seeded_model(setting.source, max(setting.local_batches), setting.device, **setting.sizes)
        labels = torch.zeros(len(x), dtype=torch.long, device=x.device)
        self._clock = wall_clock(setting.device)
        self._steps: dict[tuple[int, Variant], Callable[[], None]] = {}
        model.train()
        with blamed_in_training(setting.source, x.shape):
            for n in setting.local_batches:
                ours = optimize(deepcopy(model), x[:n], setting.config, progress=False)
                for variant, network in zip(BOTH, (deepcopy(model), ours), strict=True):
                    trainee = Trainee(network, learning_rate=0.0, loss=loss_for(setting.source))
                    self._steps[n, variant] = partial(trainee.step, x[:n], labels[:n])
                    trainee.step(x[:n], labels[:n])

    def run(self, local_batch: int, variant: Variant, steps: int) -> tuple[float, float]:
        """Run training steps; return when they began and ended, in seconds of a clock that processes share."""
        begun_s = self._clock.now()
        for _ in range(steps):
            self._steps[local_batch, variant]()
        return begun_s, self._clock.now()


@dataclass(frozen=True, slots=True)
class Throughput:
    """Measured throughput of a number of learners together, which is a row of the CSV file.

    threads: of each learner.
    images_per_s: median over the rounds.
    noise: IQR / median.
    gain: the throughput over that of the fewest learners, with the same local batch and convolutions.
    """

    learners: int
    threads: int
    local_batch: int
    convolutions: Variant
    images_per_s: float
    noise: float
    gain: float


def measure_learners(
    setting: LearnersSetting, learners: Sequence[int], *, rounds: int = 5, progress: Progress = silent
) -> list[Throughput]:
    """Measure the throughput of each number of learners, ascending, at each local batch, in turns.

    The threads are torch's in this process, at most one for each CPU. A learner alone uses the stored measurements of
    the database; several measure anew, for themselves.

    Raises ``InvalidInputError`` for more learners than threads, and ``UnavailableError`` if a learner fails.
    """
    cpus = sorted(os.sched_getaffinity(0))
    threads = min(torch.get_num_threads(), len(cpus))
    gpu = torch.cuda.current_device() if setting.device == "cuda" else None
    if gpu is None and max(learners) > threads:
        raise InvalidInputError(
            f"{max(learners)} learners need a thread and a CPU each, and there are {threads}: give fewer --learners"
        )
    keys = [(n, count, variant) for n in setting.local_batches for count in learners for variant in BOTH]
    samples = []
    with ExitStack() as stack:
        # Let each group of learners tune, while no other does.
        groups: dict[int, list[Worker]] = {}
        for index, count in enumerate(learners):
            progress(f"tuning of {count} learners", _TUNING * index / len(learners))
            each = max(1, threads // count)
            tuned = setting if count == 1 else replace(setting, config=replace(setting.config, database=":memory:"))
            parts = [() if gpu is not None else cpus[each * i : each * (i + 1)] for i in range(count)]
            groups[count] = [stack.enter_context(Worker(Learner, tuned, each, part, gpu)) for part in parts]
            _together(groups[count], methodcaller("run", setting.local_batches[0], Variant.TORCH, 0))
        # Let them run steps: one at first, then as many as make up a sample, in turns.
        calls = []
        for n, count, variant in keys:
            rate = _images_per_s(groups[count], n, variant, 1)
            steps = max(1, round(_SAMPLE_S * rate / (count * n)))
            calls.append(partial(_images_per_s, groups[count], n, variant, steps))
        for number, rates in enumerate(islice(in_turns(calls), rounds), 1):
            progress(f"round {number} of {rounds}", _TUNING + (1 - _TUNING) * number / rounds)
            samples.append(rates)
    by_key = dict(zip(keys, zip(*samples, strict=True), strict=True))
    return [
        Throughput(
            learners=count,
            threads=max(1, threads // count),
            local_batch=n,
            convolutions=variant,
            images_per_s=median(rates),
            noise=spread(rates),
            gain=median(rates) / median(by_key[n, learners[0], variant]),
        )
        for (n, count, variant), rates in by_key.items()
    ]


def _images_per_s(workers: Sequence[Worker], local_batch: int, variant: Variant, steps: int) -> float:
    """Let all learners run so many steps at the same time; return the images a second of all together."""
    sleep(PAUSE_S)
    spans = _together(workers, methodcaller("run", local_batch, variant, steps))
    begins_s, ends_s = zip(*spans, strict=True)
    return float(len(workers) * local_batch * steps / (max(ends_s) - min(begins_s)))


def _together(workers: Sequence[Worker], function: Callable[[Any], Any]) -> list[Any]:
    """Call a function of all learners together; return its results. Raises ``UnavailableError`` if a learner fails."""
    for worker in workers:
        worker.request(function)
    try:
        return [worker.answer() for worker in workers]
    except WorkerError as error:
        sys.stderr.write(error.trace)
        raise UnavailableError(f"one of {len(workers)} learners failed: {error}") from error


# Rows of torch's convolutions and of mucudnn's.
_LEFT: Columns[tuple[Throughput, Throughput]] = {"local batch": lambda row: str(row[0].local_batch)}
_RIGHT: Columns[tuple[Throughput, Throughput]] = {
    "learners": lambda row: str(row[0].learners),
    "threads each": lambda row: str(row[0].threads),
    "PyTorch images/s": lambda row: f"{row[0].images_per_s:.1f}",
    "PyTorch ±": lambda row: f"{row[0].noise:.1%}",
    "mucudnn images/s": lambda row: f"{row[1].images_per_s:.1f}",
    "mucudnn ±": lambda row: f"{row[1].noise:.1%}",
    "gain": lambda row: ratio(row[1].gain),
}


def learners_table(title: str, throughputs: Sequence[Throughput]) -> Table:
    """Return a table with a row for each local batch and number of learners."""
    torchs, ours = (
        [one for one in throughputs if one.convolutions is variant] for variant in (Variant.TORCH, Variant.MUCUDNN)
    )
    return table_of(
        zip(torchs, ours, strict=True),
        title,
        _LEFT,
        _RIGHT,
        caption="images a second of all learners together; ±: IQR / median; gain: mucudnn's, over the fewest learners",
    )


def knee(throughputs: Sequence[Throughput], local_batch: int, variant: Variant) -> int:
    """Return the fewest learners that reach ``KNEE`` of the best throughput at a local batch."""
    rates = {
        one.learners: one.images_per_s
        for one in throughputs
        if (one.local_batch, one.convolutions) == (local_batch, variant)
    }
    return min(count for count, rate in rates.items() if rate >= KNEE * max(rates.values()))


def knees_in_words(throughputs: Sequence[Throughput]) -> str:
    """Return a sentence with the knee at each local batch."""
    knees = "; ".join(
        f"{n} samples: " + ", ".join(f"{shown_name(variant)} {knee(throughputs, n, variant)}" for variant in BOTH)
        for n in dict.fromkeys(one.local_batch for one in throughputs)
    )
    return f"the knee, the fewest learners within {1 - KNEE:.0%} of the best images/s: {knees}"
