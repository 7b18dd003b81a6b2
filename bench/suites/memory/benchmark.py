"""Measures memory and time of a model's training step with torch's convolutions and with mucudnn's, in one run."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

import mucudnn
from mucudnn.bench.contests.peak_memory import compare_peaks_with, has_resident_peak, repeatable_step
from mucudnn.bench.measure.whole_runs import Machine
from mucudnn.bench.suites.memory.result import MemoryBenchmark, MemoryVariant
from mucudnn.bench.timing.comparison import Comparison, Rounds, compare_in_turns
from mucudnn.bench.timing.timer import Clock
from mucudnn.running.devices import device_of, made_current
from mucudnn.words.config import DEFAULT_WORKSPACE_LIMIT, HEADROOM, Config
from mucudnn.words.progress import Progress, silent

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
    clock: Clock | None = None,
    progress: Progress | None = None,
) -> MemoryBenchmark:
    """Optimize copies of ``model`` and measure training steps: forward, the sum of the output, backward.

    There is no optimizer: its time and memory are the same for all. x: (N, C, H, W), or a tuple of all arguments, x the
    first. config: ``None``: within the headroom. rounds: steps of each that are timed. runs: processes for each
    resident peak; 0: none, as always for a model on CUDA. clock: clock of the steps (not of the tuning); ``None``: that
    of the model's device. progress: as for ``tune``.

    Raises what ``optimize`` and ``compare_peaks_with`` raise, and whatever the model raises.
    """
    report = progress or silent
    configs = configs_of(config or Config(workspace_limit=HEADROOM))
    device = device_of(model)
    runs = runs if has_resident_peak(model) else 0
    with made_current(device):
        machine = Machine.current(device.type)
        torchs = copy.deepcopy(model)
        ours = [mucudnn.optimize(copy.deepcopy(model), x, one, progress=progress) for one in configs]
        report("peaks of memory", 0.5)
        peaks = compare_peaks_with(torchs, ours, x, runs)
        report("training steps", 0.9)
        steps = _time(torchs, ours, x, rounds, clock or machine.clock)
    variants = tuple(map(MemoryVariant, configs, peaks, steps))
    images = x[0] if isinstance(x, tuple) else x
    return MemoryBenchmark(name, tuple(images.shape), machine.environment, variants, runs)


def configs_of(config: Config) -> list[Config]:
    """Return the config that is asked for, and one with a plain limit for contrast, where it is another."""
    contrast = replace(config, workspace_limit=DEFAULT_WORKSPACE_LIMIT, workspace_budget=None)
    return [config] if config == contrast else [config, contrast]


def _time(
    torchs: nn.Module, ours: Sequence[nn.Module], x: Tensor | tuple[Tensor, ...], rounds: int, clock: Clock
) -> list[Comparison]:
    baseline, *steps = (repeatable_step(one, x) for one in (torchs, *ours))
    outcomes = compare_in_turns(baseline, steps, clock, Rounds(rounds, rounds))
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return [outcome for outcome in outcomes if isinstance(outcome, Comparison)]
