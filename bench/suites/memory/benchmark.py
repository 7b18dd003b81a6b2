"""Measures memory and time of a model's training step: torch's convolutions and mucudnn's, each compiled, too.

Each contestant has a process of its own, and they take turns. Ours are tuned before, so that no process has what only
tuning needs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from statistics import median_high

import torch
from torch import Tensor, nn

import mucudnn
from mucudnn.bench.contests.apart import Apart, Entrant
from mucudnn.bench.contests.peak_memory import has_resident_peak, resident_peak_bytes
from mucudnn.bench.contests.variants import Variant, chosen_variants
from mucudnn.bench.suites.memory.result import Contestant, MemoryBenchmark, StepMemory
from mucudnn.bench.suites.memory.step_job import StepJob, Subject
from mucudnn.measuring.timing.rounds import sample_in_rounds
from mucudnn.measuring.timing.synchronized_clock import wall_clock
from mucudnn.measuring.timing.timer import Clock
from mucudnn.running.devices import device_of, made_current
from mucudnn.running.environment import current_environment
from mucudnn.words.config import DEFAULT_WORKSPACE_LIMIT, HEADROOM, Config
from mucudnn.words.errors import UnavailableError
from mucudnn.words.progress import Progress, share_of, silent

ROUNDS = 9
RUNS = 3


def benchmark_memory(
    model: nn.Module,
    x: Tensor | tuple[Tensor, ...],
    config: Config | None = None,
    *,
    name: str = "model",
    rounds: int = ROUNDS,
    runs: int = RUNS,
    variants: Sequence[Variant] | None = None,
    clock: Clock | None = None,
    apart: Callable[[], Apart] | None = None,
    progress: Progress | None = None,
) -> MemoryBenchmark:
    """Optimize copies of ``model`` and measure training steps: forward, the sum of the output, backward.

    There is no optimizer: its time and memory are the same for all. x: (N, C, H, W), or a tuple of all arguments, x the
    first. config: ``None``: within the headroom. rounds: samples of each, of a step or several. runs: processes for
    each resident peak, of which it is the median; 0: none, as always for a model on CUDA. variants: those beside
    torch's own; ``None``: all of the device. clock: clock of the steps (not of the tuning); ``None``: a wall clock.
    apart: makes the place in which contestants are apart; ``None``: ``Apart``. progress: as for ``tune``.

    One that fails has a result with the reason. Raises what ``optimize`` and ``resident_peak_bytes`` raise,
    ``InvalidInputError`` for a model on several devices or a variant that its device does not have, and
    ``UnavailableError`` where the model cannot be pickled or torch itself fails.
    """
    report, config = progress or silent, config or Config(workspace_limit=HEADROOM)
    device, arguments = device_of(model), x if isinstance(x, tuple) else (x,)
    runs = runs if has_resident_peak(device.type) else 0
    contestants = contestants_of(config, chosen_variants(variants, device.type))
    with made_current(device), (apart or Apart)() as place:
        subjects, handed = dict[Config | None, Subject](), dict[Config | None, Callable[[], Subject]]()
        for tuned, subject in _subjects(model, arguments, contestants, share_of(report, 0.0, 0.5)):
            subjects[tuned], handed[tuned] = subject, place.handed(subject)
        environment, threads = current_environment(device.type), torch.get_num_threads()
        entrants = list[Entrant[int]]()
        for index, one in enumerate(contestants):
            report(f"{one.variant} gets ready", 0.5 + 0.2 * index / len(contestants))
            job = StepJob(handed[one.config], one.variant, threads, clock or wall_clock(device.type))
            entrants.append(Entrant.started(place, job))
        report("peaks of memory", 0.7)
        peaks = _resident_peaks(contestants, entrants, subjects, runs)
        report("training steps", 0.9)
        for _ in islice(sample_in_rounds([one.timer for one in entrants if one.timer is not None]), rounds):
            pass
        torchs, *others = map(_result, contestants, entrants, peaks)
    if torchs.failure:
        raise UnavailableError(f"torch, with which all others are compared, fails: {torchs.failure}")
    shape = tuple(arguments[0].shape)
    return MemoryBenchmark(name, shape, environment, config, torchs, tuple(others), runs)


def contestants_of(config: Config, variants: Sequence[Variant]) -> list[Contestant]:
    """Return who takes part: ours with this config, and uncompiled also with a plain limit, where that is another."""
    contrast = replace(config, workspace_limit=DEFAULT_WORKSPACE_LIMIT, workspace_budget=None)
    found = []
    for variant in variants:
        found.append(Contestant(variant, config if variant.is_ours else None))
        if variant is Variant.MUCUDNN and config != contrast:
            found.append(Contestant(variant, contrast))
    return found


def _subjects(
    model: nn.Module, arguments: tuple[Tensor, ...], contestants: Sequence[Contestant], progress: Progress
) -> Iterator[tuple[Config | None, Subject]]:
    """Yield the model for each config, torch's own first: contestants with the same one have it from one tuning."""
    configs = [*dict.fromkeys(one.config for one in contestants)]
    for index, config in enumerate(configs):
        own = copy.deepcopy(model)
        if config is not None:
            share = share_of(progress, index / len(configs), 1 / len(configs))
            own = mucudnn.optimize(own, arguments, config, progress=share)
        yield config, (own, arguments)


def _resident_peaks(
    contestants: Sequence[Contestant],
    entrants: Sequence[Entrant[int]],
    subjects: Mapping[Config | None, Subject],
    runs: int,
) -> list[int | None]:
    """Bytes of each that got ready, each run in a fresh process, in turns."""
    peaks: list[list[int]] = [[] for _ in contestants]
    for _ in range(runs):
        for own, one, entrant in zip(peaks, contestants, entrants, strict=True):
            if not entrant.failure:
                own.append(resident_peak_bytes(*subjects[one.config], is_compiled=one.variant.is_compiled))
    return [median_high(own) if own else None for own in peaks]


def _result(one: Contestant, entrant: Entrant[int], resident_bytes: int | None) -> StepMemory:
    if entrant.process is None or entrant.timer is None or entrant.failure:
        return StepMemory(one, failure=entrant.failure)
    return StepMemory(one, entrant.process.found, resident_bytes, tuple(entrant.timer.samples_s))
