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
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import torch

import mucudnn
from mucudnn.bench.results.bounds import kinds_table
from mucudnn.bench.results.columns import Columns, table_of
from mucudnn.bench.results.reading import Header, ResultFolder, bound_in_words, with_time
from mucudnn.bench.results.variants import PRECISIONS, VARIANTS, How, Precision, Variant, require_supported
from mucudnn.bench.results.writing import Row, config_record, open_folder
from mucudnn.bench.sources.models import blamed_in_training, importable, in_format, load_model
from mucudnn.bench.sources.networks import NETWORKS, input_shape_of
from mucudnn.bench.sources.trainee import Trainee, Workload, labelled_batches, loss_for, placed
from mucudnn.bench.suites.shared.apart import SAMPLED, Entrant, Ready, contestant, pickled, sampled
from mucudnn.bench.suites.shared.processes import WorkerError
from mucudnn.bench.suites.shared.step_costs import (
    BACKWARD_S,
    FORWARD_S,
    REST_S,
    StepTimes,
    allocator_peak_bytes,
    median_by_kind,
    medians,
)
from mucudnn.core.config import Config
from mucudnn.core.errors import MucudnnError, first_line
from mucudnn.core.problem import MemoryFormat
from mucudnn.core.tables import Table, images_per_s, milliseconds, ratio
from mucudnn.core.terminal import Progress, share_of, silent
from mucudnn.core.torch_settings import rounding_to_tf32, searching
from mucudnn.core.values import format_bytes
from mucudnn.measuring.clocks import Clock, wall_clock
from mucudnn.measuring.operands import input_shape
from mucudnn.measuring.turns import T
from mucudnn.running.devices import current_environment

ROUNDS = 9
SPLIT_ON = ("cpu",)  # Splitting a step on a GPU would need CUDA events, which is untested.
COLUMNS = ("network", "batch_size", "precision", "memory_format", "how")

_Shape = tuple[int, ...]
# Seconds of a step's parts by column, and by kind of layer; or why there are none.
_Parts = tuple[Mapping[str, float], Mapping[str, float]] | str


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting in which the variants of a training step are compared.

    device: ``cpu`` or ``cuda``.
    """

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


def prepare_step(
    workload: Callable[[], Workload], setting: Setting, variant: Variant, config: Config, threads: int, clock: Clock
) -> Ready[int]:
    """Build, tune or compile a variant's model in a process of its own, and run the first step.

    workload: returns the model, on the CPU, which is copied, its batch and its loss.
    threads: number of torch's threads.
    clock: times the steps.

    Return the step to time and its peak bytes, with a function that splits further steps into parts. Raises any error
    of building, tuning, compiling and of a step.
    """
    torch.set_num_threads(threads)
    original, batch, loss = workload()
    # The model, in its format and with its convolutions.
    is_enabled = variant.is_ours and setting.how is How.ENABLE
    autocast: torch.dtype | None = getattr(torch, setting.precision) if setting.precision.is_half else None
    model = in_format(copy.deepcopy(original).to(setting.device), setting.memory_format)
    images, labels = placed(batch, setting.device, setting.memory_format)
    if variant.is_ours and not is_enabled:
        # Rounding affects which algorithms may run.
        with _rounding(setting), torch.autocast(setting.device, autocast, enabled=autocast is not None):
            model = mucudnn.optimize(model, images, config, progress=False)
    called: Any = torch.compile(model) if variant.is_compiled else model
    trainee = Trainee(called, loss=loss)

    def step() -> None:
        with searching(asked=variant is Variant.TORCH_BENCHMARK):
            trainee.step(images, labels, autocast)

    def run(function: Callable[[], T], /) -> T:
        """Call a function that runs steps, under the settings of this variant, and return its result."""
        with _rounding(setting), mucudnn.tuned(config) if is_enabled else nullcontext():
            return function()

    @cache
    def recorder() -> StepTimes:
        return StepTimes(step, clock, run, is_compiled=variant.is_compiled)

    def parts(steps: int) -> _Parts:
        try:
            return recorder().parts(steps), recorder().kinds()
        except (MucudnnError, RuntimeError, MemoryError) as error:
            return f"not split: {first_line(error)}"

    # The first steps.
    if is_enabled:
        run(step)  # The first step tunes all convolutions.
    peak_bytes = run(lambda: allocator_peak_bytes(step, setting.device))
    return Ready(step, peak_bytes, run, clock, parts if setting.device in SPLIT_ON else None)


def _rounding(setting: Setting) -> AbstractContextManager[None]:
    """Switch TF32 on or off in convolutions and matrix products for a context; other precisions change nothing."""
    if setting.device == "cpu" or setting.precision.is_half:
        return nullcontext()
    return rounding_to_tf32(allowed=setting.precision is Precision.TF32)


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Options of the benchmark of training steps.

    precisions: None for all that the device supports except float16, which can be slow on CPUs.
    variants: None for all that the device supports; torch's own variant is always added.
    rounds: time samples of each variant, each of one or more steps.
    seconds: the time limit, after which no further setting is started, or None.
    how: the way mucudnn is applied to the step.
    clock: times the steps, but not the tuning; None for a wall clock.
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
    outputs.
    batch_sizes: one for each source. Duplicates are measured once.
    input_size: (C, H, W) of an image; None for each network's own.

    A variant that fails gets a row with the reason. Raises ``InvalidInputError`` before anything is measured if a
    source has no model or cannot be trained, if a batch is too large, or if the device does not support a precision or
    variant; and the errors of ``open_folder``.
    """
    require_supported("precision", options.precisions or (), PRECISIONS[device], device)
    require_supported("variant", options.variants or (), VARIANTS[device], device)
    # The settings, each with the shape of its model's images.
    usual = [precision for precision in PRECISIONS[device] if precision is not Precision.FLOAT16]
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
    header = Header(
        "training", ", ".join(sources), described, current_environment(device), COLUMNS, wanted=len(settings)
    )
    # Measure those that the folder lacks, as far as the time goes.
    with open_folder(out, header) as folder:
        missing = [setting for setting in settings if not folder.known(setting.subject())]
        left = dict.fromkeys(missing, "the run was stopped before")
        end_s = inf if options.seconds is None else time.monotonic() + options.seconds
        try:
            for (source, batch_size), group in groupby(missing, key=attrgetter("network", "batch_size")):
                torch.manual_seed(0)  # parameters do not depend on earlier models
                model, shape = load_model(source, input_shape=shapes[source, batch_size])
                (batch,) = labelled_batches(1, batch_size, shape)
                workload = (model.train(), batch, loss_for(source))
                with importable(source):  # The processes inherit the import path.
                    for setting in group:
                        if time.monotonic() > end_s:
                            left[setting] = f"not begun: the {options.seconds:g} s were over"
                            continue
                        part = share_of(progress, missing.index(setting) / len(missing), 1 / len(missing))
                        part(str(setting), 0.0)
                        folder.add(measured_rows(setting, workload, options, part))
                        del left[setting]
        finally:
            folder.write_summary((str(setting), reason) for setting, reason in left.items())


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
    setting: Setting, workload: Workload, options: TrainingOptions, progress: Progress = silent
) -> list[Row]:
    """Measure the variants of one setting, interleaved, and return a row for each variant.

    The model is left unchanged.
    """
    threads, clock = torch.get_num_threads(), options.clock or wall_clock(setting.device)
    asked = (*VARIANTS[setting.device],) if options.variants is None else (Variant.TORCH, *options.variants)
    variants = [variant for variant in VARIANTS[setting.device] if variant in asked]
    entrants: dict[Variant, Entrant[int]] = {}
    parts: dict[Variant, list[_Parts]] = {variant: [] for variant in variants}
    with pickled(workload) as handed, ExitStack() as stack:
        for index, variant in enumerate(variants):
            work = "starts" + ", is tuned" * variant.is_ours + ", is compiled" * variant.is_compiled
            progress(f"{setting}: {variant} {work}", 0.5 * index / len(variants))
            job = partial(prepare_step, handed, setting, variant, options.config, threads, clock)
            entrants[variant] = Entrant(stack.enter_context(contestant(job)))
        samples = [partial(_sample, entrant, parts[variant], setting) for variant, entrant in entrants.items()]
        for done in sampled(samples, options.rounds):
            progress(
                f"{setting}: {done} of {options.rounds} samples of each variant", 0.5 + 0.5 * done / options.rounds
            )
        rows = []
        for variant, entrant in entrants.items():
            more = {} if entrant.failure else {"peak_bytes": entrant.result, **_median_parts(parts[variant])}
            rows.append(Row(setting.subject(), variant, entrant.samples_s, failure=entrant.failure, more=more))
        return rows


def _sample(entrant: Entrant[int], parts: list[_Parts], setting: Setting) -> None:
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
    timed = [part for part in parts if not isinstance(part, str)]
    if failure or not timed:
        return {"not_split": failure}
    splits, kinds = zip(*timed, strict=True)
    return {**medians(splits), "kinds_s": median_by_kind(kinds)}


Cell = dict[str, Any]  # a row of the folder, with what ``_cells_of`` adds

_LEFT: Columns[Cell] = {
    "precision": lambda cell: cell["precision"],
    "memory format": lambda cell: cell["memory_format"],
    "convolutions": lambda cell: cell["name"],
}
_STEP: Columns[Cell] = {
    "step ms": lambda cell: milliseconds(cell["time_s"]),
    "images/s": lambda cell: images_per_s(cell["batch_size"], cell["time_s"]),
    "IQR / median": lambda cell: f"{cell['noise']:.1%}",
    "speedup": lambda cell: cell["speedup"],
    "peak memory": lambda cell: format_bytes(cell["peak_bytes"]),
    "ratio": lambda cell: cell["memory"],
}
_SPLIT: Columns[Cell] = {
    "forward ms": lambda cell: milliseconds(cell[FORWARD_S]),
    "backward ms": lambda cell: milliseconds(cell[BACKWARD_S]),
    "speedup": lambda cell: cell["convolutions_speedup"],
    "rest ms": lambda cell: milliseconds(cell[REST_S]),
    "rest ratio": lambda cell: cell["rest_ratio"],
}
# Of all networks: mucudnn's step against torch's.
_NETWORK: Columns[Cell] = {
    "network": lambda cell: cell["network"],
    "batch": lambda cell: str(cell["batch_size"]),
    "precision": lambda cell: cell["precision"],
    "memory format": lambda cell: cell["memory_format"],
}
_AGAINST_TORCH: Columns[Cell] = {
    "PyTorch ms": lambda cell: milliseconds(cell["torch"]["time_s"]),
    "mucudnn ms": lambda cell: milliseconds(cell["time_s"]),
    "speedup": lambda cell: cell["speedup"],
    "in convolutions": lambda cell: cell["convolutions_speedup"],
    "their share": lambda cell: cell["convolutions_share"],
    "rest ratio": lambda cell: cell["rest_ratio"],
}


def training_tables(folder: ResultFolder) -> Iterator[Table | str]:
    """Yield up to three tables for each network, a summary if there are several networks, and the settings left out."""
    cells, bound = _cells_of(folder), bound_in_words(folder.header.settings)
    networks = [[*group] for _, group in groupby(cells, key=itemgetter("network", "batch_size"))]
    for group in networks:
        title = f"{group[0]['network']}, batch {group[0]['batch_size']}"
        yield table_of(
            group,
            f"{title}: training steps, {bound}",
            _LEFT,
            _STEP,
            caption="speedup and memory relative to PyTorch in the same precision and memory format",
            failure=itemgetter("failure"),
        )
        if split := [cell for cell in group if cell["convolutions_s"]]:
            yield table_of(
                split,
                f"{title}: where the time of a step goes",
                _LEFT,
                _SPLIT,
                caption="forward, backward: convolutions, timed in place in rounds of their own; rest: all that is "
                "not a convolution",
            )
        if timed := [cell for cell in group if cell.get("kinds_s")]:
            yield kinds_table(
                timed,
                title,
                _LEFT,
                caption="timed in place in separate steps; in compiled steps, all but convolutions is the rest",
            )
    if len(networks) > 1:
        yield table_of(
            (cell for cell in cells if cell["contestant"] == Variant.MUCUDNN),
            f"training steps, {bound}",
            _NETWORK,
            _AGAINST_TORCH,
            caption="speedups of the step and of its convolutions in place; their share of PyTorch's step; rest: all "
            "other layers",
            failure=lambda cell: cell["failure"] or ("PyTorch's own failed" if cell["torch"] is None else None),
        )
    for cell in cells:
        if reason := cell.get("not_split"):
            yield f"{cell['network']}, {cell['contestant']}: {reason}"
    for reason, settings in folder.left_out.items():
        yield from (f"{setting}: {reason}" for setting in settings)


def _cells_of(folder: ResultFolder) -> list[Cell]:
    """Return the rows with the keys of ``with_time`` and others.

    torch: torch's row in the same setting, None if it failed.
    name: of the contestant; mucudnn is marked if it was enabled (tuned during a warm-up step) rather than optimized
    (tuned beforehand).
    convolutions_s: None if the step is not split.
    speedup, memory, convolutions_speedup, rest_ratio: relative to torch, empty texts if either is unknown.
    convolutions_share: their share of torch's step.
    """
    cells: list[Cell] = [with_time(line) for line in folder.lines]
    setting_of = itemgetter(*COLUMNS)
    torchs = {setting_of(cell): cell for cell in cells if cell["contestant"] == Variant.TORCH and cell["samples_s"]}
    for cell in cells:
        is_enabled = cell["contestant"] == Variant.MUCUDNN and cell["how"] == How.ENABLE
        cell["name"] = f"{cell['contestant']}, enabled" if is_enabled else cell["contestant"]
        cell["convolutions_s"] = cell[FORWARD_S] + cell[BACKWARD_S] if cell.get(REST_S) is not None else None
    for cell in cells:
        baseline = cell["torch"] = torchs.get(setting_of(cell))
        cell |= dict.fromkeys(("speedup", "memory", "convolutions_speedup", "convolutions_share", "rest_ratio"), "")
        if baseline is not None and not cell["failure"]:
            cell["speedup"] = ratio(baseline["time_s"] / cell["time_s"])
            cell["memory"] = f"{cell['peak_bytes'] / baseline['peak_bytes']:.3f}"
            if cell["convolutions_s"] and baseline["convolutions_s"]:
                cell["convolutions_speedup"] = ratio(baseline["convolutions_s"] / cell["convolutions_s"])
                share = baseline["convolutions_s"] / (baseline["convolutions_s"] + baseline[REST_S])
                cell["convolutions_share"] = f"{share:.0%}"
                cell["rest_ratio"] = f"{cell[REST_S] / baseline[REST_S]:.3f}"
    return cells
