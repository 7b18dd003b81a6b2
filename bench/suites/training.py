"""Preparation of a model's training step in its own process, for one variant of its convolutions."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby, product
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mucudnn
from mucudnn.bench.results.bounds import kinds_table
from mucudnn.bench.results.reading import Header, LeftOut, ResultFolder, bound_in_words
from mucudnn.bench.results.speedups import spread
from mucudnn.bench.results.variants import PRECISIONS, How, Precision, Variant, chosen_variants
from mucudnn.bench.results.writing import FolderWriter, Row, config_record, open_folder
from mucudnn.bench.sources.models import blamed_in_training, importable, load_model
from mucudnn.bench.sources.networks import NETWORKS, input_shape_of
from mucudnn.bench.sources.trainee import Batch, Loss, Trainee, labelled_batches, loss_for
from mucudnn.bench.suites.shared.apart import SAMPLED, Apart, Entrant, Ready, sampled
from mucudnn.bench.suites.shared.peak_memory import allocator_peak_bytes
from mucudnn.bench.suites.shared.processes import OwnProcessError
from mucudnn.bench.suites.shared.step_parts import KindTimes, StepSplit, StepSplitter, median_by_kind
from mucudnn.core.config import Config
from mucudnn.core.errors import InvalidInputError, MucudnnError, first_line
from mucudnn.core.problem import MemoryFormat
from mucudnn.core.tables import Table, images_per_s, milliseconds, new_table, ratio
from mucudnn.core.terminal import Progress, share_of, silent
from mucudnn.core.torch_settings import rounding_to_tf32, searching
from mucudnn.core.values import format_bytes
from mucudnn.kernels.memory import TORCH_FORMATS
from mucudnn.measuring.clocks import Clock, wall_clock
from mucudnn.measuring.operands import input_shape
from mucudnn.measuring.turns import Runner, T, here
from mucudnn.running.environment import current_environment

SPLIT_ON = ("cpu",)  # Splitting a step on a GPU would need CUDA events, which is untested.
COLUMNS = ("network", "batch_size", "precision", "memory_format", "how")


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting in which the variants of a training step are compared. device: ``cpu`` or ``cuda``."""

    network: str
    batch_size: int
    device: str
    precision: Precision
    memory_format: MemoryFormat
    how: How = How.OPTIMIZE

    @property
    def subject(self) -> dict[str, Any]:
        """Return the columns that identify the result rows of this setting."""
        return {name: getattr(self, name) for name in COLUMNS}

    def __str__(self) -> str:
        return f"{self.network}, batch {self.batch_size}, {self.precision} {self.memory_format}"


@dataclass(frozen=True, slots=True)
class Subject:
    """A model on the CPU, which each variant copies before training, with the images and labels of a batch."""

    model: nn.Module
    batch: Batch
    loss: Loss

    def on_device(self, setting: Setting) -> Batch:
        """Return the batch on the setting's device, images in its memory format."""
        images, labels = (tensor.to(setting.device) for tensor in self.batch)
        return images.contiguous(memory_format=TORCH_FORMATS[setting.memory_format]), labels


@dataclass(frozen=True, slots=True)
class StepParts:
    """The times of a few training steps, split into convolutions and the rest, and by kind of layer.

    failure: why the steps could not be split; empty if they were split.
    """

    split: StepSplit | None = None
    kinds_s: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True, slots=True)
class StepJob:
    """A picklable job for another process: builds, tunes or compiles a variant's model and prepares its step.

    subject: returns the model to train. threads: number of torch's threads. clock: times the steps. A call of the job
    warms up, and returns the step to time and its peak bytes; the job can also measure ``StepParts``. Raises any error
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
        with _rounding(self.setting):  # It affects which algorithms may run.
            return self._ready()

    def _ready(self) -> Ready[int]:
        model, step = self._model_and_step(self.subject())
        if self._is_enabled:
            with mucudnn.tuned(self.config):
                step()  # The first step tunes all convolutions.
        peak_bytes = self._run(lambda: allocator_peak_bytes(step, self.setting.device))
        parts = _Parts(model, step, self.clock, self._run, self.variant.is_compiled) if self._is_split else None
        return Ready(step, peak_bytes, self._run, self.clock, parts)

    @property
    def _is_split(self) -> bool:
        return self.setting.device in SPLIT_ON

    @property
    def _is_enabled(self) -> bool:
        return self.variant.is_ours and self.setting.how is How.ENABLE

    def _run(self, function: Callable[[], T], /) -> T:
        """Call a function that runs steps, under the settings of this variant, and return its result."""
        with _rounding(self.setting):
            if not self._is_enabled:
                return function()
            with mucudnn.tuned(self.config):
                return function()

    def _model_and_step(self, subject: Subject) -> tuple[nn.Module, Callable[[], None]]:
        """Return a copy of the model, and a function that trains it for one step.

        Gradients are None before and after the step.
        """
        setting = self.setting
        autocast: torch.dtype | None = getattr(torch, setting.precision) if setting.precision.is_half else None
        torch_format = TORCH_FORMATS[setting.memory_format]
        own = copy.deepcopy(subject.model).to(setting.device, memory_format=torch_format)  # type: ignore[call-overload]
        images, labels = subject.on_device(setting)
        if self.variant.is_ours and not self._is_enabled:
            with torch.autocast(setting.device, autocast, enabled=autocast is not None):
                own = mucudnn.optimize(own, images, self.config, progress=False)
        called: Any = torch.compile(own) if self.variant.is_compiled else own
        trainee = Trainee(called, loss=subject.loss)

        def step() -> None:
            with searching(self.variant is Variant.TORCH_BENCHMARK):
                trainee.learn(images, labels, autocast)
            trainee.optimizer.zero_grad()

        return own, step


@dataclass(slots=True, eq=False)
class _Parts:
    """A callable that splits steps into their parts. After a failure it returns that failure and does not try again."""

    model: nn.Module
    step: Callable[[], None]
    clock: Clock
    runner: Runner = here
    is_compiled: bool = False
    splitter: StepSplitter | None = None
    kinds: KindTimes | None = None
    failure: str = ""

    def __call__(self, steps: int) -> StepParts:
        if self.failure:
            return StepParts(failure=self.failure)
        try:
            if self.splitter is None or self.kinds is None:
                self.splitter = StepSplitter(self.step, self.clock, self.runner)
                self.kinds = KindTimes(self.step, self.clock, self.runner, is_compiled=self.is_compiled)
            self.splitter.sample(steps)
            return StepParts(self.splitter.samples[-1], self.kinds.sample())
        except (MucudnnError, RuntimeError, MemoryError) as error:
            self.failure = f"not split: {first_line(error)}"
            return StepParts(failure=self.failure)


@contextmanager
def _rounding(setting: Setting) -> Iterator[None]:
    """Switch TF32 on or off in convolutions and matrix products for this context; other precisions change nothing."""
    if setting.device == "cpu" or setting.precision.is_half:
        yield
        return
    with rounding_to_tf32(setting.precision is Precision.TF32):
        yield


ROUNDS = 9

_Shape = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Options of the benchmark of training steps.

    precisions: None for ``known_precisions``. variants: None for all that the device supports; torch's own variant is
    always added. rounds: time samples of each variant, each of one or more steps. seconds: the time limit, after which
    no further setting is started, or None. how: the way mucudnn is applied to the step. clock: times the steps, but not
    the tuning; None for a wall clock. apart: starts the processes of the variants.
    """

    config: Config = field(default_factory=Config)
    precisions: Sequence[Precision] | None = None
    memory_formats: Sequence[MemoryFormat] = tuple(MemoryFormat)
    variants: Sequence[Variant] | None = None
    rounds: int = ROUNDS
    seconds: float | None = None
    how: How = How.OPTIMIZE
    clock: Clock | None = None
    apart: Callable[[], Apart] = Apart


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
    precisions = known_precisions(options.precisions, device)
    chosen_variants(options.variants, device)
    pairs = dict.fromkeys(zip(sources, batch_sizes, strict=True))
    shapes = {pair: _shape_of(*pair, input_size) for pair in pairs}
    settings = {
        pair: [Setting(*pair, device, *each, options.how) for each in product(precisions, options.memory_formats)]
        for pair in pairs
    }
    header = _header(sources, batch_sizes, precisions, options, device, sum(map(len, settings.values())))
    with open_folder(out, header) as folder:
        left = {one: "the run was stopped before" for every in settings.values() for one in every}
        left = {one: why for one, why in left.items() if not folder.known(one.subject)}
        end_s = inf if options.seconds is None else time.monotonic() + options.seconds
        try:
            for index, (pair, shape) in enumerate(shapes.items()):
                part = share_of(progress, index / len(shapes), 1 / len(shapes))
                mine = [one for one in settings[pair] if one in left]
                _measure_source(shape, mine, left, options, folder, end_s, part)
        finally:
            folder.write_summary([LeftOut(str(one), why) for one, why in left.items()])


def known_precisions(precisions: Sequence[Precision] | None, device: str) -> Sequence[Precision]:
    """Return the given precisions; if None, all that the device supports except float16, which can be slow on CPUs.

    Raises ``InvalidInputError`` for a precision that the device does not support.
    """
    allowed = PRECISIONS[device]
    for precision in precisions or ():
        if precision not in allowed:
            raise InvalidInputError(f"precision is {precision}; device {device!r} has {', '.join(allowed)}")
    return tuple(one for one in allowed if one is not Precision.FLOAT16) if precisions is None else precisions


def _header(
    sources: Sequence[str],
    batch_sizes: Sequence[int],
    precisions: Sequence[Precision],
    options: TrainingOptions,
    device: str,
    wanted: int,
) -> Header:
    settings = {
        "batch_sizes": list(batch_sizes),
        "precisions": list(precisions),
        "memory_formats": list(options.memory_formats),
        "rounds": options.rounds,
        "how": options.how,
        **({} if options.variants is None else {"variants": list(options.variants)}),
        **config_record(options.config),
    }
    environment = current_environment(device)
    return Header("training", ", ".join(sources), settings, environment, subject_columns=COLUMNS, wanted=wanted)


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


def _measure_source(
    shape: _Shape,
    settings: Sequence[Setting],
    left: dict[Setting, str],
    options: TrainingOptions,
    folder: FolderWriter,
    end_s: float,
    progress: Progress,
) -> None:
    """Measure one model in its settings and remove these from ``left``; settings beyond the time limit remain there."""
    if not settings:
        return
    source = settings[0].network
    torch.manual_seed(0)  # parameters do not depend on earlier models
    model, _ = load_model(source, input_shape=shape)
    (batch,) = labelled_batches(1, settings[0].batch_size, shape)
    subject = Subject(model.train(), batch, loss_for(source))
    with importable(source):  # The processes inherit the import path.
        for index, setting in enumerate(settings):
            if time.monotonic() > end_s:
                left[setting] = f"not begun: the {options.seconds:g} s were over"
                continue
            part = share_of(progress, index / len(settings), 1 / len(settings))
            part(str(setting), 0.0)
            folder.add(measured_rows(setting, subject, options, part))
            del left[setting]


def measured_rows(
    setting: Setting, subject: Subject, options: TrainingOptions, progress: Progress = silent
) -> list[Row]:
    """Measure the variants of one setting, interleaved, and return a row for each variant.

    The model is left unchanged.
    """
    threads, clock = torch.get_num_threads(), options.clock or wall_clock(setting.device)
    with options.apart() as apart:
        handed = apart.handed(subject)
        variants, measured = chosen_variants(options.variants, setting.device), list[_MeasuredVariant]()
        for index, variant in enumerate(variants):
            progress(f"{setting}: {variant} gets ready", index / len(variants))
            job = StepJob(handed, setting, variant, options.config, threads, clock)
            measured.append(_MeasuredVariant(setting, variant, Entrant.started(apart, job)))
        for _ in sampled((one.entrant for one in measured), options.rounds):
            for one in measured:
                one.sample_parts()
        return [one.row() for one in measured]


@dataclass(slots=True, eq=False)
class _MeasuredVariant:
    """A variant that is being measured, with its process and the parts of its steps timed so far."""

    setting: Setting
    variant: Variant
    entrant: Entrant[int]
    parts: list[StepParts] = field(default_factory=list)

    def sample_parts(self) -> None:
        """Time the parts of as many steps as a time sample has, unless a step has failed before."""
        timer, process = self.entrant.timer, self.entrant.process
        if self.setting.device not in SPLIT_ON or timer is None or process is None or timer.error is not None:
            return
        try:
            found = process.ask(max(1, round(SAMPLED.sample_s / timer.samples_s[-1])))
        except OwnProcessError as error:
            timer.error = error
        else:
            self.parts.append(found)

    def row(self) -> Row:
        """Return the variant's result row, with its time samples or the reason why there are none."""
        more = {} if self.entrant.failure else {"peak_bytes": self.entrant.found, **self._split()}
        failure = self.entrant.failure
        return Row(self.setting.subject, self.variant, self.entrant.samples_s, failure=failure, more=more)

    def _split(self) -> dict[str, Any]:
        """Return columns with the median seconds of a step's parts, or the reason why steps cannot be split."""
        splits = [part.split for part in self.parts if part.split is not None]
        failure = next((part.failure for part in self.parts if part.failure), None)
        if failure or not splits:
            return {"not_split": failure}
        split = StepSplit.median(splits)
        return {
            "forward_convolutions_s": split.forward_s,
            "backward_convolutions_s": split.backward_s,
            "rest_s": split.rest_s,
            "kinds_s": median_by_kind([part.kinds_s for part in self.parts if part.kinds_s]),
        }


Cell = Mapping[str, Any]  # a row of the folder, with ``time_s``, ``noise`` and ``torch``, torch's row of the setting

_NUMBERS: Mapping[str, Callable[[Cell], str]] = {
    "step ms": lambda cell: milliseconds(cell["time_s"]),
    "images/s": lambda cell: images_per_s(cell["batch_size"], cell["time_s"]),
    "IQR / median": lambda cell: f"{cell['noise']:.1%}",
    "speedup": lambda cell: _to_torch(cell, lambda one: float(one["time_s"]), ratio),
    "peak memory": lambda cell: format_bytes(cell["peak_bytes"]),
    "ratio": lambda cell: _to_torch(cell, lambda one: 1 / one["peak_bytes"], "{:.3f}".format),
}
_LEFT = ("precision", "memory format", "convolutions")
_SPLIT = ("forward ms", "backward ms", "speedup", "rest ms", "rest ratio")
_SUMMARY = ("PyTorch ms", "mucudnn ms", "speedup", "in convolutions", "their share", "rest ratio")


def cells_of(folder: ResultFolder) -> list[Cell]:
    """Return the rows with three additional keys: ``time_s``, ``noise`` (IQR / median), and ``torch``.

    ``torch`` is torch's row in the same setting.
    """
    lines = [{**line, **spread(line["samples_s"])} for line in folder.lines]
    torchs = {_setting(line): line for line in lines if line["contestant"] == Variant.TORCH and line["samples_s"]}
    return [{**line, "torch": torchs.get(_setting(line))} for line in lines]


def training_tables(folder: ResultFolder) -> Iterator[Table | str]:
    """Yield up to three tables for each network, a summary if there are several networks, and the settings left out."""
    cells, bound = cells_of(folder), bound_in_words(folder.header.settings)
    networks = [[*group] for _, group in groupby(cells, lambda cell: (cell["network"], cell["batch_size"]))]
    for group in networks:
        yield training_steps_table(group, bound)
        if any(map(_is_split, group)):
            yield training_split_table(group)
        if any(cell.get("kinds_s") for cell in group):
            yield training_kinds_table(group)
    if len(networks) > 1:
        yield training_summary(cells, bound)
    for cell in cells:
        if reason := cell.get("not_split"):
            yield f"{cell['network']}, {cell['contestant']}: {reason}"
    for one in folder.left_out:
        yield f"{one.what}: {one.reason}"


def training_summary(cells: Sequence[Cell], bound: str) -> Table:
    """Return a table of mucudnn's step against torch's, with a row for each network, precision and memory format."""
    title = f"training steps, {bound}"
    printed = new_table(title, ("network", "batch", "precision", "memory format"), _SUMMARY)
    for cell in cells:
        if cell["contestant"] == Variant.MUCUDNN:
            left = cell["network"], str(cell["batch_size"]), cell["precision"], cell["memory_format"]
            printed.add_row(*left, *_summed_up(cell))
    printed.caption = (
        "speedups of the step and of its convolutions in place; their share of PyTorch's step; rest: all other layers"
    )
    return printed


def training_split_table(cells: Sequence[Cell]) -> Table:
    """Return a table of one network's times in convolutions and in all other parts of a step.

    Ratios are relative to torch in the same precision and memory format.
    """
    printed = _table(cells, "where the time of a step goes", _SPLIT)
    for cell in filter(_is_split, cells):
        printed.add_row(*_left(cell), *_parts(cell))
    printed.caption = (
        "forward, backward: convolutions, timed in place in rounds of their own; rest: all that is not a convolution"
    )
    return printed


def training_kinds_table(cells: Sequence[Cell]) -> Table:
    """Return a table of the share of each kind of layer in the time of one network's steps."""
    rows = [(_left(cell), cell["kinds_s"]) for cell in cells if cell.get("kinds_s")]
    printed = kinds_table(_title(cells), _LEFT, rows)
    printed.caption = "timed in place in separate steps; in compiled steps, all but convolutions is the rest"
    return printed


def training_steps_table(cells: Sequence[Cell], bound: str) -> Table:
    """Return a table of one network's step times and memory peaks.

    Ratios are relative to torch in the same precision and memory format.
    """
    printed = _table(cells, f"training steps, {bound}", [*_NUMBERS])
    for cell in cells:
        numbers = [cell["failure"]] if cell["failure"] else [shown(cell) for shown in _NUMBERS.values()]
        printed.add_row(*_left(cell), *numbers)
    printed.caption = "speedup and memory relative to PyTorch in the same precision and memory format"
    return printed


def _table(cells: Sequence[Cell], what: str, columns: Sequence[str]) -> Table:
    return new_table(f"{_title(cells)}: {what}", _LEFT, columns)


def _title(cells: Sequence[Cell]) -> str:
    return f"{cells[0]['network']}, batch {cells[0]['batch_size']}"


def _left(cell: Cell) -> tuple[str, str, str]:
    """Return the leftmost cells of a row: precision, memory format, and variant.

    The variant is marked if mucudnn was enabled (tuned during a warm-up step) rather than optimized (tuned beforehand).
    """
    is_enabled = cell["contestant"] == Variant.MUCUDNN and cell["how"] == How.ENABLE
    name = f"{cell['contestant']}, enabled" if is_enabled else cell["contestant"]
    return cell["precision"], cell["memory_format"], name


def _setting(line: Cell) -> tuple[Any, ...]:
    return tuple(line[name] for name in COLUMNS)


def _to_torch(cell: Cell, of: Callable[[Cell], float], shown: Callable[[float], str]) -> str:
    """Format the ratio of torch's number to this row's number; return an empty text if torch failed."""
    return "" if cell["torch"] is None else shown(of(cell["torch"]) / of(cell))


def _is_split(cell: Cell | None) -> bool:
    return cell is not None and cell.get("rest_s") is not None


def _convolutions_s(cell: Cell) -> float:
    return float(cell["forward_convolutions_s"] + cell["backward_convolutions_s"])


def _parts(cell: Cell) -> list[str]:
    """Return the cells of a row in the columns ``_SPLIT``: times of convolutions and of the rest, next to torch's."""
    times = map(milliseconds, (cell["forward_convolutions_s"], cell["backward_convolutions_s"], cell["rest_s"]))
    forward, backward, rest = times
    if not _is_split(cell["torch"]):
        return [forward, backward, "", rest, ""]
    speedup, rest_ratio = (
        _convolutions_s(cell["torch"]) / _convolutions_s(cell),
        cell["rest_s"] / cell["torch"]["rest_s"],
    )
    return [forward, backward, ratio(speedup), rest, f"{rest_ratio:.3f}"]


def _summed_up(cell: Cell) -> list[str]:
    """Return the cells of a row in the columns ``_SUMMARY``, or the reason if there is nothing to compare."""
    torchs = cell["torch"]
    if cell["failure"] or torchs is None:
        return [cell["failure"] or "PyTorch's own failed"]
    texts = [milliseconds(torchs["time_s"]), milliseconds(cell["time_s"]), ratio(torchs["time_s"] / cell["time_s"])]
    if not (_is_split(cell) and _is_split(torchs)):
        return texts
    share = _convolutions_s(torchs) / (_convolutions_s(torchs) + torchs["rest_s"])
    _, _, speedup, _, rest_ratio = _parts(cell)
    return [*texts, speedup, f"{share:.0%}", rest_ratio]
