"""Times of networks' training steps with torch, with torch in benchmark mode, with mucudnn, and compiled.

A step consists of forward pass, loss, backward pass and stochastic gradient descent with momentum. The variants of one
network and precision, in all memory formats, are interleaved in one run, each in its own process (see ``apart``).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import groupby, product
from math import inf
from operator import attrgetter, itemgetter
from pathlib import Path
from time import perf_counter
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
    resident_growth,
)
from mucudnn.core.config import Config
from mucudnn.core.errors import MucudnnError, first_line
from mucudnn.core.problem import MemoryFormat
from mucudnn.core.tables import Table, images_per_s, milliseconds, ratio
from mucudnn.core.terminal import Progress, share_of, silent
from mucudnn.core.torch_settings import rounding_to_tf32, searching
from mucudnn.core.values import format_bytes, grouped
from mucudnn.measuring.clocks import Clock, wall_clock
from mucudnn.measuring.operands import input_shape
from mucudnn.measuring.turns import T
from mucudnn.running.devices import current_environment

ROUNDS = 9
SPLIT_ON = ("cpu",)  # Splitting a step on a GPU would need CUDA events, which is untested.
COLUMNS = ("network", "batch_size", "precision", "memory_format", "how")
_COMPARED = ("network", "batch_size", "precision", "how")  # the columns of rows that are compared and timed in turns

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
) -> Ready[dict[str, Any]]:
    """Build, tune or compile a variant's model in a process of its own, and run the first steps.

    workload: returns the model, on the CPU, which is copied, its batch and its loss.
    threads: number of torch's threads.
    clock: times the steps.

    Return the step to time and columns of what it takes, with a function that splits further steps into parts. Raises
    any error of building, tuning, compiling and of a step.

    The columns: ``ready_after_s``, the seconds of tuning and of the first step, in which models are compiled;
    ``peak_bytes``, of torch's allocator; and ``grown_bytes``, by which the process grows in a step, on the CPU.
    """
    torch.set_num_threads(threads)
    original, batch, loss = workload()
    # The model, in its format and with its convolutions.
    is_enabled = variant.is_ours and setting.how is How.ENABLE
    autocast: torch.dtype | None = getattr(torch, setting.precision) if setting.precision.is_half else None
    model = in_format(copy.deepcopy(original).to(setting.device), setting.memory_format)
    images, labels = placed(batch, setting.device, setting.memory_format)
    begun_s = perf_counter()
    if variant.is_ours and not is_enabled:
        if variant is Variant.MUCUDNN_UNGROUPED:
            config = replace(config, fuse=False)
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
        may_have_groups = variant is Variant.MUCUDNN and not is_enabled and config.fuse is not False
        return StepTimes(step, clock, run, sees_operators=not variant.is_compiled and not may_have_groups)

    def parts(steps: int) -> _Parts:
        try:
            return recorder().parts(steps), recorder().kinds()
        except (MucudnnError, RuntimeError, MemoryError) as error:
            return f"not split: {first_line(error)}"

    # The first steps: the first of all compiles, and if mucudnn is enabled tunes all convolutions.
    run(step)
    columns: dict[str, Any] = {"ready_after_s": perf_counter() - begun_s}
    columns["peak_bytes"] = run(lambda: allocator_peak_bytes(step, setting.device))
    if setting.device == "cpu":
        _, columns["grown_bytes"] = resident_growth(lambda: run(step))
    return Ready(step, columns, run, clock, parts if setting.device in SPLIT_ON else None)


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
    variant; ``UnavailableError`` if the package of a network is missing; and the errors of ``open_folder``.
    """
    require_supported("precision", options.precisions or (), PRECISIONS[device], device)
    require_supported("variant", options.variants or (), _variants(device, options.how), device)
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
                    for formats in [[*same] for _, same in groupby(group, key=attrgetter("precision"))]:
                        if time.monotonic() > end_s:
                            left |= dict.fromkeys(formats, f"not begun: the {options.seconds:g} s were over")
                            continue
                        part = share_of(progress, missing.index(formats[0]) / len(missing), len(formats) / len(missing))
                        folder.add(measured_rows(formats, workload, options, part))
                        for setting in formats:
                            del left[setting]
        finally:
            folder.write_summary((str(setting), reason) for setting, reason in left.items())


def _shape_of(source: str, batch_size: int, input_size: _Shape | None) -> _Shape:
    """Return the shape (C, H, W) of an image for a model; check a user's own model by running a training step.

    Raises ``UnavailableError`` if the package of a network is missing.
    """
    if source in NETWORKS:
        shape = input_size or input_shape_of(source)
        if NETWORKS[source].package:
            load_model(source)
        input_shape(batch_size, shape)
        return shape
    model, shape = load_model(source, input_shape=input_size)
    ((images, labels),) = labelled_batches(1, batch_size, shape)
    with blamed_in_training(source, images.shape):
        Trainee(copy.deepcopy(model).train(), loss=loss_for(source)).learn(images, labels)
    return shape


def _variants(device: str, how: How) -> list[Variant]:
    """Return the variants that a device supports. Where mucudnn is enabled there are no groups to leave out."""
    has_groups = how is How.OPTIMIZE
    return [variant for variant in VARIANTS[device] if has_groups or variant is not Variant.MUCUDNN_UNGROUPED]


def measured_rows(
    settings: Sequence[Setting], workload: Workload, options: TrainingOptions, progress: Progress = silent
) -> list[Row]:
    """Measure the variants of settings, all interleaved, and return a row for each setting and variant.

    settings: those of one network in one precision, which differ in the memory format.

    The model is left unchanged.
    """
    device = settings[0].device
    threads, clock = torch.get_num_threads(), options.clock or wall_clock(device)
    variants = _variants(device, options.how)
    if options.variants is not None:
        variants = [variant for variant in variants if variant in (Variant.TORCH, *options.variants)]
    entrants: dict[tuple[Setting, Variant], Entrant[dict[str, Any]]] = {}
    parts: dict[tuple[Setting, Variant], list[_Parts]] = {pair: [] for pair in product(settings, variants)}
    with pickled(workload) as handed, ExitStack() as stack:
        for index, (setting, variant) in enumerate(parts):
            work = "starts" + ", is tuned" * variant.is_ours + ", is compiled" * variant.is_compiled
            progress(f"{setting}: {variant} {work}", 0.5 * index / len(parts))
            job = partial(prepare_step, handed, setting, variant, options.config, threads, clock)
            entrants[setting, variant] = Entrant(stack.enter_context(contestant(job)))
        samples = [partial(_sample, entrant, parts[pair], device) for pair, entrant in entrants.items()]
        for done in sampled(samples, options.rounds):
            progress(
                f"{settings[0].network}, {settings[0].precision}: {done} of {options.rounds} samples of each variant",
                0.5 + 0.5 * done / options.rounds,
            )
        rows = []
        for (setting, variant), entrant in entrants.items():
            more = {} if entrant.result is None else {**entrant.result, **_median_parts(parts[setting, variant])}
            rows.append(Row(setting.subject(), variant, entrant.samples_s, failure=entrant.failure, more=more))
        return rows


def _sample(entrant: Entrant[Any], parts: list[_Parts], device: str) -> None:
    """Time a sample, and add the parts of as many steps, unless a step or this has failed before."""
    entrant.timer.sample()
    if device not in SPLIT_ON or entrant.failure or (parts and isinstance(parts[-1], str)):
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


def _optional(format_value: Callable[[Any], str], name: str) -> Callable[[Cell], str]:
    """Return a column for ``table_of``, empty if the folder is older than the column or the value is unknown."""
    return lambda cell: "" if cell.get(name) is None else format_value(cell[name])


_LEFT: Columns[Cell] = {
    "precision": lambda cell: cell["precision"],
    "memory format": lambda cell: cell["memory_format"],
    "variant": lambda cell: cell["name"],
}
_STEP: Columns[Cell] = {
    "step ms": lambda cell: milliseconds(cell["time_s"]),
    "images/s": lambda cell: images_per_s(cell["batch_size"], cell["time_s"]),
    "IQR / median": lambda cell: f"{cell['noise']:.1%}",
    "speedup": lambda cell: cell["speedup"],
    "ready s": _optional("{:.1f}".format, "ready_after_s"),
    "peak memory": lambda cell: format_bytes(cell["peak_bytes"]),
    "ratio": lambda cell: cell["memory"],
    "grows": _optional(format_bytes, "grown_bytes"),
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
}
_AGAINST_TORCH: Columns[Cell] = {
    "PyTorch ms": lambda cell: milliseconds(cell["torch"]["time_s"]),
    "mucudnn ms": lambda cell: milliseconds(cell["time_s"]),
    "speedup": lambda cell: cell["speedup"],
    "ungrouped": lambda cell: cell["speedups"].get(Variant.MUCUDNN_UNGROUPED, ""),
    "torch.compile": lambda cell: cell["speedups"].get(Variant.TORCH_COMPILE, ""),
    "memory": lambda cell: cell["memory"],
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
            caption="speedup, ratio: over PyTorch in its faster memory format; ready: tuned, compiled, the first step "
            "done; peak memory: most at once of PyTorch's allocator in a step; grows: the process in a step",
            failure=itemgetter("failure"),
        )
        if split := [cell for cell in group if cell["convolutions_s"]]:
            yield table_of(
                split,
                f"{title}: where the time of a step goes",
                _LEFT,
                _SPLIT,
                caption="forward, backward: convolutions, timed in place in rounds of their own; rest: all that is "
                "not a convolution; compared with PyTorch in its faster memory format",
            )
        if timed := [cell for cell in group if cell.get("kinds_s")]:
            yield kinds_table(
                timed,
                title,
                _LEFT,
                caption="timed in place in separate steps; in steps that are compiled or have groups, all but "
                "convolutions is the rest",
            )
    if len(networks) > 1:
        yield table_of(
            (cell for (_, variant), cell in _in_faster_format(cells).items() if variant == Variant.MUCUDNN),
            f"training steps, {bound}",
            _NETWORK,
            _AGAINST_TORCH,
            caption="each in its faster memory format: speedups of the step over PyTorch's, by mucudnn, without groups "
            "and by torch.compile, and of convolutions in place; their share of PyTorch's step; rest: all other layers",
            failure=lambda cell: cell["failure"] or ("PyTorch's own failed" if cell["torch"] is None else None),
        )
    for cell in cells:
        if reason := cell.get("not_split"):
            yield f"{cell['network']}, {cell['contestant']}: {reason}"
    for reason, settings in folder.left_out.items():
        yield from (f"{setting}: {reason}" for setting in settings)


def _cells_of(folder: ResultFolder) -> list[Cell]:
    """Return the rows with the keys of ``with_time`` and others.

    torch: torch's row in its faster memory format, None if it failed.
    name: of the contestant; mucudnn is marked if it was enabled (tuned during a warm-up step) rather than optimized
    (tuned beforehand).
    convolutions_s: None if the step is not split.
    speedup, memory, convolutions_speedup, rest_ratio: relative to torch, empty texts if either is unknown.
    speedups: of each contestant in its faster memory format.
    convolutions_share: their share of torch's step.
    """
    cells: list[Cell] = [with_time(line) for line in folder.lines]
    compared_of, faster = itemgetter(*_COMPARED), _in_faster_format(cells)
    for cell in cells:
        is_enabled = cell["contestant"] == Variant.MUCUDNN and cell["how"] == How.ENABLE
        cell["name"] = f"{cell['contestant']}, enabled" if is_enabled else cell["contestant"]
        cell["convolutions_s"] = cell[FORWARD_S] + cell[BACKWARD_S] if cell.get(REST_S) is not None else None
    for cell in cells:
        torchs = faster.get((compared_of(cell), Variant.TORCH))
        baseline = cell["torch"] = torchs if torchs and torchs["samples_s"] else None
        cell |= dict.fromkeys(("speedup", "memory", "convolutions_speedup", "convolutions_share", "rest_ratio"), "")
        if baseline is not None and not cell["failure"]:
            cell["speedup"] = ratio(baseline["time_s"] / cell["time_s"])
            cell["memory"] = f"{cell['peak_bytes'] / baseline['peak_bytes']:.3f}"
            if cell["convolutions_s"] and baseline["convolutions_s"]:
                cell["convolutions_speedup"] = ratio(baseline["convolutions_s"] / cell["convolutions_s"])
                share = baseline["convolutions_s"] / (baseline["convolutions_s"] + baseline[REST_S])
                cell["convolutions_share"] = f"{share:.0%}"
                cell["rest_ratio"] = f"{cell[REST_S] / baseline[REST_S]:.3f}"
    for cell in cells:
        compared = [(variant, row) for (subject, variant), row in faster.items() if subject == compared_of(cell)]
        cell["speedups"] = {variant: row["speedup"] for variant, row in compared}
    return cells


def _in_faster_format(cells: Sequence[Cell]) -> dict[tuple[tuple[Any, ...], str], Cell]:
    """Return the faster row of each contestant, by the values of ``_COMPARED`` and its name; those that failed last."""
    rows = grouped(((itemgetter(*_COMPARED)(cell), cell["contestant"]), cell) for cell in cells)
    return {key: min(formats, key=lambda cell: cell["time_s"] or inf) for key, formats in rows.items()}
