"""Times of networks' training steps with torch, with torch in benchmark mode, with mucudnn, and compiled.

A step consists of forward pass, loss, backward pass and stochastic gradient descent with momentum. The variants of one
network, precision and memory format are interleaved in one run, each in its own process (see ``apart``). Their rows
have the same subject (identifying columns) in the result folder.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import torch

from mucudnn.bench.results.reading import Header, LeftOut
from mucudnn.bench.results.variants import PRECISIONS, How, Precision, Variant, chosen_variants
from mucudnn.bench.results.writing import FolderWriter, Row, config_record, open_folder
from mucudnn.bench.sources.models import blamed_in_training, importable, load_model
from mucudnn.bench.sources.networks import NETWORKS, input_shape_of
from mucudnn.bench.sources.networks.objectives import loss_for
from mucudnn.bench.sources.trainee import Trainee, labelled_batches
from mucudnn.bench.suites.shared.apart import SAMPLED, Apart, Entrant, sampled
from mucudnn.bench.suites.shared.processes import OwnProcessError
from mucudnn.bench.suites.shared.step_parts import StepSplit, median_by_kind
from mucudnn.bench.suites.training.step_job import COLUMNS, SPLIT_ON, Setting, StepJob, StepParts, Subject
from mucudnn.core.config import Config
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import MemoryFormat
from mucudnn.core.terminal import Progress, share_of, silent
from mucudnn.measuring.clocks import Clock, wall_clock
from mucudnn.measuring.operands import input_shape
from mucudnn.running.environment import current_environment

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
