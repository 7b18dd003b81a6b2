"""Memory and time of a model's step with torch's convolutions and with mucudnn's, eager and compiled.

Each contestant has its own process, and their steps are interleaved. Models with mucudnn's convolutions are tuned
beforehand, so that no process holds memory that only tuning needs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median_high
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

import mucudnn
from mucudnn.bench.contests.apart import Apart, Entrant, Ready, require_torch, sampled
from mucudnn.bench.contests.peak_memory import (
    allocator_peak_bytes,
    has_resident_peak,
    repeatable_step,
    resident_peak_bytes,
)
from mucudnn.bench.contests.variants import Variant, chosen_variants
from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.reading import ResultFolder
from mucudnn.bench.folders.rows import Line, Row
from mucudnn.bench.folders.writing import open_folder
from mucudnn.bench.report.records import config_record
from mucudnn.bench.report.tables import images_per_s, memory_bound, milliseconds, new_table, ratio
from mucudnn.measuring.timing.cuda_clock import wall_clock
from mucudnn.measuring.timing.timer import Clock, T
from mucudnn.running.devices import device_of, made_current
from mucudnn.running.environment import current_environment
from mucudnn.words.config import DEFAULT_WORKSPACE_LIMIT, Config
from mucudnn.words.problem import MemoryFormat
from mucudnn.words.progress import Progress, share_of, silent
from mucudnn.words.results import WholeRun
from mucudnn.words.torch_settings import searching
from mucudnn.words.units import format_bytes

ROUNDS = 9
RUNS = 3

_Contestant = tuple[Variant, Config | None]  # a variant and its config, which is None for torch's convolutions


def benchmark_memory(
    model: nn.Module,
    arguments: tuple[Tensor, ...],
    config: Config,
    out: Path,
    *,
    name: str = "model",
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS,
    rounds: int = ROUNDS,
    runs: int = RUNS,
    variants: Sequence[Variant] | None = None,
    clock: Clock | None = None,
    progress: Progress = silent,
) -> None:
    """Measure memory and time of steps of copies of ``model``; write rows into the folder ``out``.

    Nothing is measured if the folder already has the rows. A step is a forward pass, the sum of the output, and a
    backward pass, without an optimizer, whose costs are the same for all. With ``config.memory_budget`` it is a call of
    the model, which is in ``eval()``, and mucudnn is measured without a budget, too. arguments: all arguments of the
    model, first x: (N, C, H, W) in ``memory_format``. rounds: time samples of each contestant, each of one or more
    steps. runs: processes for each resident peak, which is their median; 0 to skip it, as on CUDA. variants: measured
    in addition to torch's own; None for all that the device has. clock: times the steps, not tuning; None for a wall
    clock.

    A contestant that fails gets a row with the reason. Raises the errors of ``open_folder``, ``optimize`` and
    ``resident_peak_bytes``, ``InvalidInputError`` for a model on several devices or an unsupported variant, and
    ``UnavailableError`` if the model cannot be pickled or torch itself fails.
    """
    device = device_of(model)
    runs = runs if has_resident_peak(device.type) else 0
    contestants = _contestants(config, chosen_variants(variants, device.type))
    if variants is None and not _trains(config):  # a model in bands is not compiled
        contestants = [one for one in contestants if one[0] is not Variant.MUCUDNN_COMPILE]
    settings = {
        "input_shape": list(arguments[0].shape),
        "rounds": rounds,
        "runs": runs,
        **({} if variants is None else {"variants": list(variants)}),
        **config_record(config),
    }
    subject = {"network": name, "batch_size": len(arguments[0]), "memory_format": str(memory_format)}
    with made_current(device):
        environment = current_environment(device.type)
        header = Header("memory", name, settings, environment, subject_columns=tuple(subject), wanted=1)
        with open_folder(out, header) as folder:
            if not folder.known(subject):
                clock = clock or wall_clock(device.type)
                entrants, peaks = _measured((model, arguments), contestants, rounds, runs, clock, progress)
                rows = [_row(subject, *given) for given in zip(contestants, entrants, peaks, strict=True)]
                folder.add(rows)
            folder.write_summary()


def _measured(
    given: Subject, contestants: Sequence[_Contestant], rounds: int, runs: int, clock: Clock, progress: Progress
) -> tuple[list[Entrant[int]], list[int | None]]:
    """Measure the contestants; return them and their resident peaks. given: model and arguments before tuning."""
    trains = all(config is None or _trains(config) for _, config in contestants)
    with Apart() as place:
        subjects = dict(_subjects(*given, contestants, share_of(progress, 0.0, 0.5)))
        handed = {config: place.handed(subject) for config, subject in subjects.items()}
        entrants = list[Entrant[int]]()
        for index, (variant, config) in enumerate(contestants):
            progress(f"{variant} gets ready", 0.5 + 0.2 * index / len(contestants))
            job = StepJob(handed[config], variant, torch.get_num_threads(), clock, trains)
            entrants.append(Entrant.started(place, job))
        progress("peaks of memory", 0.7)
        peaks = _resident_peaks(contestants, entrants, subjects, runs, trains)
        progress("training steps" if trains else "calls", 0.9)
        for _ in sampled(entrants, rounds):
            pass
        require_torch(entrants[0])
    return entrants, peaks


def _contestants(config: Config, variants: Sequence[Variant]) -> list[_Contestant]:
    """Return the contestants, pairs of a variant and its config, which is None for torch's convolutions.

    Unless the config has the default workspace limit, uncompiled mucudnn is also measured with the default; if it has a
    memory budget, without one.
    """
    contrast = replace(config, workspace_limit=DEFAULT_WORKSPACE_LIMIT, workspace_budget=None)
    if not _trains(config):
        contrast = replace(config, memory_budget=None, fuse=True)
    found = list[_Contestant]()
    for variant in variants:
        found.append((variant, config if variant.is_ours else None))
        if variant is Variant.MUCUDNN and config != contrast:
            found.append((variant, contrast))
    return found


def _subjects(
    model: nn.Module, arguments: tuple[Tensor, ...], contestants: Sequence[_Contestant], progress: Progress
) -> Iterator[tuple[Config | None, Subject]]:
    """Yield each config with a copy of the model tuned under it; the config of torch's model is None."""
    configs = [*dict.fromkeys(config for _, config in contestants)]
    for index, config in enumerate(configs):
        own = copy.deepcopy(model)
        if config is not None:
            share = share_of(progress, index / len(configs), 1 / len(configs))
            own = mucudnn.optimize(own, arguments, config, progress=share)
        yield config, (own, arguments)


def _resident_peaks(
    contestants: Sequence[_Contestant],
    entrants: Sequence[Entrant[int]],
    subjects: Mapping[Config | None, Subject],
    runs: int,
    trains: bool,
) -> list[int | None]:
    """Return each contestant's peak resident bytes, the median over ``runs`` new processes; None if it failed.

    The processes of different contestants are interleaved.
    """
    peaks: list[list[int]] = [[] for _ in contestants]
    for _ in range(runs):
        for own, (variant, config), entrant in zip(peaks, contestants, entrants, strict=True):
            if not entrant.failure:
                own.append(resident_peak_bytes(*subjects[config], is_compiled=variant.is_compiled, trains=trains))
    return [median_high(own) if own else None for own in peaks]


def _row(subject: Mapping[str, Any], one: _Contestant, entrant: Entrant[int], resident_bytes: int | None) -> Row:
    variant, config = one
    return Row(
        subject,
        str(variant),
        entrant.samples_s,
        policy=None if config is None else str(config.policy),
        limit_bytes=None if config is None else _limit_bytes(config),
        failure=entrant.failure,
        more={
            "allocator_peak_bytes": entrant.found,
            "resident_peak_bytes": resident_bytes,
            "bound": None if config is None else _bound(config),
        },
    )


def _trains(config: Config) -> bool:
    return config.memory_budget is None


def _bound(config: Config) -> str:
    is_contrast = config.fuse and _trains(config)  # models that train are not fused
    return "without a memory budget" if is_contrast else memory_bound(config)


def _limit_bytes(config: Config) -> int | None:
    if not _trains(config):
        return config.memory_budget_bytes
    return None if config.has_headroom_limit else config.workspace_limit_bytes


Subject = tuple[nn.Module, tuple[Tensor, ...]]  # a model, already tuned for mucudnn's contestants, and its arguments


@dataclass(frozen=True, slots=True)
class StepJob:
    """A picklable job for another process: prepares a contestant's step and measures its peak memory.

    subject: returns the contestant's own copy of the model and its arguments. threads: of torch. clock: of the steps.
    trains: whether a step trains, or only calls the model.

    A call of the job compiles the model if needed and returns the step to time and its peak bytes in torch's allocator.
    Raises any error of compiling and of a step.
    """

    subject: Callable[[], Subject]
    variant: Variant
    threads: int
    clock: Clock
    trains: bool

    def __call__(self) -> Ready[int]:
        torch.set_num_threads(self.threads)
        model, arguments = self.subject()
        called: Any = torch.compile(model) if self.variant.is_compiled else model
        step, device = repeatable_step(called, arguments, trains=self.trains), device_of(model)
        run = partial(_run, device, self.variant is Variant.TORCH_BENCHMARK)
        return Ready(step, run(lambda: allocator_peak_bytes(step, device.type)), run, self.clock)


def _run(device: torch.device, is_searching: bool, function: Callable[[], T], /) -> T:
    with made_current(device), searching(is_searching):
        return function()


_PEAKS = ("allocator_peak_bytes", "resident_peak_bytes")


def memory_tables(folder: ResultFolder) -> Iterator[Table | str]:
    """Yield a table with a row for each contestant, torch first, and lines that compare each contestant with torch.

    Ratios are relative to torch, and speedups are of the whole step.
    """
    torchs = folder.lines[0]
    n = torchs["batch_size"]
    columns = ("allocator peak", "ratio", "resident peak", "ratio", "step ms", "images/s", "speedup")
    step = "one call" if folder.header.settings.get("memory_budget") else "one training step"
    printed = new_table(f"{torchs['network']}, batch {n}: {step}", ("convolutions",), columns)
    lines = []
    for line in folder.lines:
        if line["failure"]:
            printed.add_row(_name(line), line["failure"])
            lines.append(f"{_name(line)}: {line['failure']}")
            continue
        run = WholeRun.of(torchs["samples_s"], line["samples_s"])
        speedup = "" if line is torchs else f"{ratio(run.speedup)} ± {run.noise:.2f}"
        peaks = (cell for name in _PEAKS for cell in _peak(line[name], torchs[name]))
        printed.add_row(_name(line), *peaks, milliseconds(run.time_s), images_per_s(n, run.time_s), speedup)
        if line is not torchs:
            needed = line["allocator_peak_bytes"] / torchs["allocator_peak_bytes"]
            lines.append(f"{_name(line)}: {needed:.3f} of PyTorch's memory, {ratio(run.speedup)} as fast")
    yield printed
    counted = "allocator: on top of parameters, buffers and input"
    if runs := folder.header.settings["runs"]:
        counted += f"; resident: of a whole process, median of {runs}"
    yield "\n".join((*lines, counted))


def _name(line: Line) -> str:
    return f"{line['contestant']}, {line['bound']}" if line["bound"] else line["contestant"]


def _peak(size_bytes: int | None, torchs_bytes: int | None) -> tuple[str, str]:
    """Format a memory peak and its ratio to torch's peak; both texts are empty if one of the peaks is unknown."""
    if size_bytes is None or torchs_bytes is None:
        return "", ""
    return format_bytes(size_bytes), f"{size_bytes / torchs_bytes:.3f}"
