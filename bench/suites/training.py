"""Times of networks' training steps with torch, with torch in benchmark mode, with mucudnn, and compiled.

A step consists of forward pass, loss, backward pass and stochastic gradient descent with momentum. The variants of one
network, precision and memory format are interleaved in one run, each in its own process (see ``apart``). Their rows
have the same subject (identifying columns) in the result folder.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import groupby, product
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mucudnn
from mucudnn.bench.results.bounds import kinds_table
from mucudnn.bench.results.reading import Header, LeftOut, ResultFolder, bound_in_words, with_time
from mucudnn.bench.results.variants import PRECISIONS, VARIANTS, How, Precision, Variant, require_supported
from mucudnn.bench.results.writing import Row, config_record, open_folder
from mucudnn.bench.sources.models import blamed_in_training, importable, in_format, load_model
from mucudnn.bench.sources.networks import NETWORKS, input_shape_of
from mucudnn.bench.sources.trainee import Batch, Loss, Trainee, labelled_batches, loss_for
from mucudnn.bench.suites.shared.apart import SAMPLED, Entrant, Ready, contestant, pickled, sampled
from mucudnn.bench.suites.shared.processes import WorkerError
from mucudnn.bench.suites.shared.step_costs import (
    KindTimes,
    StepSplit,
    StepSplitter,
    allocator_peak_bytes,
    median_by_kind,
)
from mucudnn.core.config import Config
from mucudnn.core.errors import MucudnnError, first_line
from mucudnn.core.problem import MemoryFormat
from mucudnn.core.tables import Table, images_per_s, milliseconds, new_table, ratio
from mucudnn.core.terminal import Progress, share_of, silent
from mucudnn.core.torch_settings import rounding_to_tf32, searching
from mucudnn.core.values import format_bytes
from mucudnn.kernels.memory import format_of
from mucudnn.measuring.clocks import Clock, wall_clock
from mucudnn.measuring.operands import input_shape
from mucudnn.measuring.turns import T
from mucudnn.running.devices import current_environment

ROUNDS = 9
SPLIT_ON = ("cpu",)  # Splitting a step on a GPU would need CUDA events, which is untested.
COLUMNS = ("network", "batch_size", "precision", "memory_format", "how")

_Shape = tuple[int, ...]
Subject = tuple[nn.Module, Batch, Loss]  # a model on the CPU, which each variant copies, with a batch to train it on
_Parts = tuple[StepSplit, Mapping[str, float]] | str  # of steps, and seconds by kind of layer; or why there are none


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting in which the variants of a training step are compared. device: ``cpu`` or ``cuda``."""

    network: str
    batch_size: int
    device: str
    precision: Precision
    memory_format: MemoryFormat
    how: How = How.OPTIMIZE

    def __str__(self) -> str:
        return f"{self.network}, batch {self.batch_size}, {self.precision} {self.memory_format}"

    def subject(self) -> dict[str, Any]:
        """Return the columns that identify the result rows of this setting."""
        return {name: getattr(self, name) for name in COLUMNS}


@dataclass(frozen=True, slots=True)
class StepJob:
    """A picklable job for another process: builds, tunes or compiles a variant's model and prepares its step.

    subject: returns the model to train. threads: number of torch's threads. clock: times the steps. A call of the job
    warms up, and returns the step to time and its peak bytes; the job can also split steps into parts. Raises any error
    of building, tuning, compiling and of a step.
    """

    subject: Callable[[], Subject]
    setting: Setting
    variant: Variant
    config: Config
    threads: int
    clock: Clock

    def __call__(self) -> Ready[int]:
        torch.set_num_threads(self.threads)
        setting, variant = self.setting, self.variant
        original, batch, loss = self.subject()
        is_enabled = variant.is_ours and setting.how is How.ENABLE
        autocast: torch.dtype | None = getattr(torch, setting.precision) if setting.precision.is_half else None
        model = in_format(copy.deepcopy(original).to(setting.device), setting.memory_format)
        images, labels = (tensor.to(setting.device) for tensor in batch)
        images = images.contiguous(memory_format=format_of(setting.memory_format, images.dim()))
        if variant.is_ours and not is_enabled:
            # Rounding affects which algorithms may run.
            with _rounding(setting), torch.autocast(setting.device, autocast, enabled=autocast is not None):
                model = mucudnn.optimize(model, images, self.config, progress=False)
        called: Any = torch.compile(model) if variant.is_compiled else model
        trainee = Trainee(called, loss=loss)

        def step() -> None:
            with searching(asked=variant is Variant.TORCH_BENCHMARK):
                trainee.step(images, labels, autocast)

        def run(function: Callable[[], T], /) -> T:
            """Call a function that runs steps, under the settings of this variant, and return its result."""
            with _rounding(setting), mucudnn.tuned(self.config) if is_enabled else nullcontext():
                return function()

        @cache
        def recorders() -> tuple[StepSplitter, KindTimes]:
            kinds = KindTimes(step, self.clock, run, is_compiled=variant.is_compiled)
            return StepSplitter(step, self.clock, run), kinds

        def parts(steps: int) -> _Parts:
            try:
                splitter, kinds = recorders()
                return splitter.sample(steps), kinds.sample()
            except (MucudnnError, RuntimeError, MemoryError) as error:
                return f"not split: {first_line(error)}"

        if is_enabled:
            run(step)  # The first step tunes all convolutions.
        peak_bytes = run(lambda: allocator_peak_bytes(step, setting.device))
        return Ready(step, peak_bytes, run, self.clock, parts if setting.device in SPLIT_ON else None)


def _rounding(setting: Setting) -> AbstractContextManager[None]:
    """Switch TF32 on or off in convolutions and matrix products for a context; other precisions change nothing."""
    if setting.device == "cpu" or setting.precision.is_half:
        return nullcontext()
    return rounding_to_tf32(allowed=setting.precision is Precision.TF32)


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Options of the benchmark of training steps.

    precisions: None for all that the device supports except float16, which can be slow on CPUs. variants: None for all
    that the device supports; torch's own variant is always added. rounds: time samples of each variant, each of one or
    more steps. seconds: the time limit, after which no further setting is started, or None. how: the way mucudnn is
    applied to the step. clock: times the steps, but not the tuning; None for a wall clock.
    """

    config: Config = field(default_factory=Config)
    precisions: Sequence[Precision] | None = None
    memory_formats: Sequence[MemoryFormat] = tuple(MemoryFormat)
    variants: Sequence[Variant] | None = None
    rounds: int = ROUNDS
    seconds: float | None = None
    how: How = How.OPTIMIZE
    clock: Clock | None = None


def benchmark_training(
    sources: Sequence[str],
    batch_sizes: Sequence[int],
    options: TrainingOptions,
    out: Path,
    *,
    input_size: _Shape | None = None,
    device: str = "cpu",
    progress: Progress = silent,
) -> None:
    """Measure training steps of each source's model; write rows into ``out``, skipping settings that it already has.

    sources: networks by name, and the user's own models, as for ``load_model``; the latter are trained to give small
    outputs. batch_sizes: one for each source. Duplicates are measured once. input_size: (C, H, W) of an image; None for
    each network's own. A variant that fails gets a row with the reason.

    Raises ``InvalidInputError`` before anything is measured if a source has no model or cannot be trained, if a batch
    is too large, or if the device does not support a precision or variant; and the errors of ``open_folder``.
    """
    require_supported("precision", options.precisions or (), PRECISIONS[device], device)
    require_supported("variant", options.variants or (), VARIANTS[device], device)
    usual = [one for one in PRECISIONS[device] if one is not Precision.FLOAT16]
    precisions = usual if options.precisions is None else options.precisions
    shapes = {pair: _shape_of(*pair, input_size) for pair in dict.fromkeys(zip(sources, batch_sizes, strict=True))}
    kinds = [*product(precisions, options.memory_formats)]
    settings = [Setting(*pair, device, *kind, options.how) for pair in shapes for kind in kinds]
    described = {
        "batch_sizes": list(batch_sizes),
        "precisions": list(precisions),
        "memory_formats": list(options.memory_formats),
        "rounds": options.rounds,
        "how": options.how,
        **({} if options.variants is None else {"variants": list(options.variants)}),
        **config_record(options.config),
    }
    environment = current_environment(device)
    header = Header("training", ", ".join(sources), described, environment, COLUMNS, wanted=len(settings))
    with open_folder(out, header) as folder:
        left = {one: "the run was stopped before" for one in settings if not folder.known(one.subject())}
        end_s = inf if options.seconds is None else time.monotonic() + options.seconds
        try:
            for index, ((source, batch_size), shape) in enumerate(shapes.items()):
                mine = [one for one in left if (one.network, one.batch_size) == (source, batch_size)]
                if not mine:
                    continue
                torch.manual_seed(0)  # parameters do not depend on earlier models
                model, _ = load_model(source, input_shape=shape)
                (batch,) = labelled_batches(1, batch_size, shape)
                subject = (model.train(), batch, loss_for(source))
                with importable(source):  # The processes inherit the import path.
                    for number, setting in enumerate(mine):
                        if time.monotonic() > end_s:
                            left[setting] = f"not begun: the {options.seconds:g} s were over"
                            continue
                        share = 1 / len(shapes) / len(mine)
                        part = share_of(progress, index / len(shapes) + number * share, share)
                        part(str(setting), 0.0)
                        folder.add(measured_rows(setting, subject, options, part))
                        del left[setting]
        finally:
            folder.write_summary([LeftOut(str(one), why) for one, why in left.items()])


def _shape_of(source: str, batch_size: int, input_size: _Shape | None) -> _Shape:
    """Return the shape (C, H, W) of an image for a model; check a user's own model by running a training step."""
    if source in NETWORKS:
        shape = input_size or input_shape_of(source)
        input_shape(batch_size, shape)
        return shape
    model, shape = load_model(source, input_shape=input_size)
    ((images, labels),) = labelled_batches(1, batch_size, shape)
    with blamed_in_training(source, images.shape):
        Trainee(copy.deepcopy(model).train(), loss=loss_for(source)).learn(images, labels)
    return shape


def measured_rows(
    setting: Setting, subject: Subject, options: TrainingOptions, progress: Progress = silent
) -> list[Row]:
    """Measure the variants of one setting, interleaved, and return a row for each variant.

    The model is left unchanged.
    """
    threads, clock = torch.get_num_threads(), options.clock or wall_clock(setting.device)
    asked = options.variants
    variants = [one for one in VARIANTS[setting.device] if asked is None or one in (Variant.TORCH, *asked)]
    entrants: dict[Variant, Entrant[int]] = {}
    parts: dict[Variant, list[_Parts]] = {variant: [] for variant in variants}
    with pickled(subject) as handed, ExitStack() as stack:
        for index, variant in enumerate(variants):
            work = "starts" + ", is tuned" * variant.is_ours + ", is compiled" * variant.is_compiled
            progress(f"{setting}: {variant} {work}", 0.5 * index / len(variants))
            job = StepJob(handed, setting, variant, options.config, threads, clock)
            entrants[variant] = Entrant(stack.enter_context(contestant(job)))
        samples = [partial(_sample_with_parts, one, parts[variant], setting) for variant, one in entrants.items()]
        for done in sampled(samples, options.rounds):
            progress(
                f"{setting}: {done} of {options.rounds} samples of each variant", 0.5 + 0.5 * done / options.rounds
            )
        return [
            Row(
                setting.subject(),
                variant,
                one.samples_s,
                failure=one.failure,
                more={} if one.failure else {"peak_bytes": one.found, **_median_parts(parts[variant])},
            )
            for variant, one in entrants.items()
        ]


def _sample_with_parts(entrant: Entrant[int], parts: list[_Parts], setting: Setting) -> None:
    """Time a sample, and add the parts of as many steps, unless a step or this has failed before."""
    entrant.timer.sample()
    if setting.device not in SPLIT_ON or entrant.failure or (parts and isinstance(parts[-1], str)):
        return
    try:
        steps = min(SAMPLED.max_calls, round(SAMPLED.sample_s / entrant.timer.samples_s[-1]))
        parts.append(entrant.ask(max(1, steps)))
    except WorkerError as error:
        entrant.timer.error = error


def _median_parts(parts: Sequence[_Parts]) -> dict[str, Any]:
    """Return columns with the median seconds of a step's parts, or the reason why steps cannot be split."""
    failure = next((part for part in parts if isinstance(part, str)), None)
    known = [part for part in parts if not isinstance(part, str)]
    if failure or not known:
        return {"not_split": failure}
    split = StepSplit.median([one for one, _ in known])
    return {
        "forward_convolutions_s": split.forward_s,
        "backward_convolutions_s": split.backward_s,
        "rest_s": split.rest_s,
        "kinds_s": median_by_kind([kinds_s for _, kinds_s in known]),
    }


Cell = dict[str, Any]  # a row of the folder, with what ``_cells_of`` adds

_LEFT = ("precision", "memory format", "convolutions")


def training_tables(folder: ResultFolder) -> Iterator[Table | str]:
    """Yield up to three tables for each network, a summary if there are several networks, and the settings left out."""
    cells, bound = _cells_of(folder), bound_in_words(folder.header.settings)
    networks = [[*group] for _, group in groupby(cells, lambda cell: (cell["network"], cell["batch_size"]))]
    for group in networks:
        title = f"{group[0]['network']}, batch {group[0]['batch_size']}"
        yield _steps_table(group, f"{title}: training steps, {bound}")
        if any(cell["convolutions_s"] for cell in group):
            yield _split_table(group, f"{title}: where the time of a step goes")
        if rows := [(cell["left"], cell["kinds_s"]) for cell in group if cell.get("kinds_s")]:
            table = kinds_table(title, _LEFT, rows)
            table.caption = "timed in place in separate steps; in compiled steps, all but convolutions is the rest"
            yield table
    if len(networks) > 1:
        yield _summary(cells, f"training steps, {bound}")
    for cell in cells:
        if reason := cell.get("not_split"):
            yield f"{cell['network']}, {cell['contestant']}: {reason}"
    for one in folder.left_out:
        yield f"{one.what}: {one.reason}"


def _cells_of(folder: ResultFolder) -> list[Cell]:
    """Return the rows with the keys of ``spread`` and others.

    torch: torch's row in the same setting, None if it failed. left: the leftmost cells of a table; mucudnn is marked if
    it was enabled (tuned during a warm-up step) rather than optimized (tuned beforehand). convolutions_s: None if the
    step is not split. speedup, memory, convolutions_speedup, rest_ratio: relative to torch, empty texts if either is
    unknown.
    """
    cells: list[Cell] = [with_time(line) for line in folder.lines]
    torchs = {_setting(cell): cell for cell in cells if cell["contestant"] == Variant.TORCH and cell["samples_s"]}
    for cell in cells:
        is_enabled = cell["contestant"] == Variant.MUCUDNN and cell["how"] == How.ENABLE
        name = f"{cell['contestant']}, enabled" if is_enabled else cell["contestant"]
        is_split = cell.get("rest_s") is not None
        cell["left"] = (cell["precision"], cell["memory_format"], name)
        cell["convolutions_s"] = cell["forward_convolutions_s"] + cell["backward_convolutions_s"] if is_split else None
    for cell in cells:
        baseline = cell["torch"] = torchs.get(_setting(cell))
        cell |= dict.fromkeys(("speedup", "memory", "convolutions_speedup", "rest_ratio"), "")
        if baseline is not None and not cell["failure"]:
            cell["speedup"] = ratio(baseline["time_s"] / cell["time_s"])
            cell["memory"] = f"{cell['peak_bytes'] / baseline['peak_bytes']:.3f}"
            if cell["convolutions_s"] and baseline["convolutions_s"]:
                cell["convolutions_speedup"] = ratio(baseline["convolutions_s"] / cell["convolutions_s"])
                cell["rest_ratio"] = f"{cell['rest_s'] / baseline['rest_s']:.3f}"
    return cells


def _setting(line: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in COLUMNS)


def _steps_table(cells: Sequence[Cell], title: str) -> Table:
    """Return a table of one network's step times and memory peaks."""
    columns = ("step ms", "images/s", "IQR / median", "speedup", "peak memory", "ratio")
    printed = new_table(title, _LEFT, columns)
    for cell in cells:
        if cell["failure"]:
            printed.add_row(*cell["left"], cell["failure"])
            continue
        times = milliseconds(cell["time_s"]), images_per_s(cell["batch_size"], cell["time_s"]), f"{cell['noise']:.1%}"
        printed.add_row(*cell["left"], *times, cell["speedup"], format_bytes(cell["peak_bytes"]), cell["memory"])
    printed.caption = "speedup and memory relative to PyTorch in the same precision and memory format"
    return printed


def _split_table(cells: Sequence[Cell], title: str) -> Table:
    """Return a table of one network's times in convolutions and in all other parts of a step."""
    printed = new_table(title, _LEFT, ("forward ms", "backward ms", "speedup", "rest ms", "rest ratio"))
    for cell in cells:
        if cell["convolutions_s"]:
            names = ("forward_convolutions_s", "backward_convolutions_s", "rest_s")
            forward, backward, rest = (milliseconds(cell[name]) for name in names)
            printed.add_row(*cell["left"], forward, backward, cell["convolutions_speedup"], rest, cell["rest_ratio"])
    printed.caption = (
        "forward, backward: convolutions, timed in place in rounds of their own; rest: all that is not a convolution"
    )
    return printed


def _summary(cells: Sequence[Cell], title: str) -> Table:
    """Return a table of mucudnn's step against torch's, with a row for each network, precision and memory format."""
    columns = ("PyTorch ms", "mucudnn ms", "speedup", "in convolutions", "their share", "rest ratio")
    printed = new_table(title, ("network", "batch", "precision", "memory format"), columns)
    for cell in (cell for cell in cells if cell["contestant"] == Variant.MUCUDNN):
        baseline = cell["torch"]
        left = cell["network"], str(cell["batch_size"]), cell["precision"], cell["memory_format"]
        if cell["failure"] or baseline is None:
            printed.add_row(*left, cell["failure"] or "PyTorch's own failed")
            continue
        share = ""
        if cell["convolutions_speedup"]:
            share = f"{baseline['convolutions_s'] / (baseline['convolutions_s'] + baseline['rest_s']):.0%}"
        times = milliseconds(baseline["time_s"]), milliseconds(cell["time_s"])
        printed.add_row(*left, *times, cell["speedup"], cell["convolutions_speedup"], share, cell["rest_ratio"])
    printed.caption = (
        "speedups of the step and of its convolutions in place; their share of PyTorch's step; rest: all other layers"
    )
    return printed
