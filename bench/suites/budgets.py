"""Training steps within memory budgets: mucudnn's, and PyTorch's ways to save memory, beside PyTorch's own steps.

A step consists of forward pass, loss, backward pass and stochastic gradient descent with momentum. The ways of one
network and budget (``Saving``) take turns, each in its own process (see ``apart``). Their peaks are counted as
``optimize`` counts them: beside parameters, gradients, the optimizer's state and the batch.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, product
from math import inf
from operator import itemgetter
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import mucudnn
from mucudnn.bench.results.columns import Columns, table_of
from mucudnn.bench.results.reading import Header, ResultFolder, with_time
from mucudnn.bench.results.variants import SAVINGS, Saving, budget_bytes
from mucudnn.bench.results.writing import Row, config_record, open_folder
from mucudnn.bench.sources.models import importable, in_format, load_model
from mucudnn.bench.sources.trainee import Loss, Trainee, labelled_batches, loss_for, placed
from mucudnn.bench.suites.shared.apart import Entrant, Ready, contestant, pickled, sampled
from mucudnn.core.config import Config
from mucudnn.core.errors import InfeasibleError, InvalidInputError, UnavailableError
from mucudnn.core.problem import MemoryFormat
from mucudnn.core.records import Comparison
from mucudnn.core.tables import Table, images_per_s, milliseconds
from mucudnn.core.team import ALONE
from mucudnn.core.terminal import Progress, share_of, silent
from mucudnn.core.torch_settings import TORCHS_OWN
from mucudnn.core.values import format_bytes
from mucudnn.measuring.clocks import wall_clock
from mucudnn.measuring.operands import input_shape
from mucudnn.optimizing.curve import largest_within
from mucudnn.optimizing.keeping import Keeping, keep_within
from mucudnn.optimizing.trace import MeasuredStep
from mucudnn.running.devices import current_environment
from mucudnn.solver.keeping import Choice
from mucudnn.tuning.choose import with_noise

ROUNDS = 9
COLUMNS = ("network", "batch_size", "budget", "memory_format")
READY_S, SAMPLE_S = 1800.0, 300.0  # timeouts of a way's preparation, with its tuning, and of one sample
_MOST_SEGMENTS = 8  # of checkpoints
_TRACING = "tracing what a step keeps"  # what ``optimize`` tells when all is tuned

_Network = tuple[nn.Module, tuple[int, ...], Loss]  # a model, the shape (C, H, W) of an image, and its loss
_Step = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting in which the ways to save memory are compared.

    batch_size: None for the largest that fits, of each way its own.
    budget: as for ``budget_bytes``.
    device: ``cpu`` or ``cuda``.
    """

    network: str
    batch_size: int | None
    budget: str
    memory_format: MemoryFormat
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.network}, batch {self.batch_size or 'that fits'}, within {self.budget}"

    def subject(self) -> dict[str, Any]:
        """Return the columns that identify the result rows of this setting."""
        return {name: getattr(self, name) for name in COLUMNS}


@dataclass(frozen=True, slots=True)
class Steps:
    """Training steps of a network that save memory in one way.

    limit_bytes: the budget; infinite for none.
    share: of the peak of PyTorch's step, for its compiler.
    """

    network: _Network
    saving: Saving
    setting: Setting
    config: Config
    limit_bytes: float
    share: float

    def of(self, batch_size: int) -> tuple[_Step, dict[str, Any]]:
        """Return the step on this many images, and columns with its peak and what was chosen.

        If none is within the budget, it is the step that needs the least memory. Raises any error of a step, and
        ``UnavailableError`` if the model or the batch cannot be divided.
        """
        trainee, images, labels = self._trainee(batch_size)
        if self.saving is Saving.MUCUDNN:
            return self._optimized(trainee, images, labels)
        counted: list[tuple[int, str, _Step]] = []
        for name, step in self._candidates(trainee, images, labels):
            if not counted:
                step()  # Libraries allocate what they keep.
            counted.append((self._peak_bytes(trainee, step), name, step))
        within = [candidate for candidate in counted if candidate[0] <= self.limit_bytes]
        by_peak = itemgetter(0)
        peak_bytes, name, step = max(within, key=by_peak) if within else min(counted, key=by_peak)
        return step, {"peak_bytes": peak_bytes, "choice": name}

    def largest_batch(self) -> int:
        """Return the largest batch within the budget, by the least memory of steps with PyTorch's own convolutions.

        Raises ``InfeasibleError`` if not even one image fits.
        """
        quick = replace(self.config, memory_budget=1, algorithms=(TORCHS_OWN,), confirm=False)
        least = replace(self, limit_bytes=1, config=quick)

        def needed_bytes(batch_size: int) -> int:
            if self.saving is not Saving.MUCUDNN:
                return int(least.of(batch_size)[1]["peak_bytes"])
            try:
                _optimize(*self._trainee(batch_size), quick, silent)
            except InfeasibleError as error:
                if error.smallest_feasible_bytes is not None:
                    return error.smallest_feasible_bytes
                raise
            return 0

        return largest_within(needed_bytes, int(self.limit_bytes))

    def _trainee(self, batch_size: int) -> tuple[Trainee, Tensor, Tensor]:
        model, shape, loss = self.network
        device, memory_format = self.setting.device, self.setting.memory_format
        (batch,) = labelled_batches(1, batch_size, shape)
        model = in_format(copy.deepcopy(model).to(device).train(), memory_format)
        return Trainee(model, loss=loss), *placed(batch, device, memory_format)

    def _peak_bytes(self, trainee: Trainee, step: _Step) -> int:
        return max(MeasuredStep(trainee.model, lambda _: step(), self.setting.device).peaks())

    def _candidates(self, trainee: Trainee, images: Tensor, labels: Tensor) -> Iterator[tuple[str, _Step]]:
        """Yield what may be chosen, each with its name."""
        step = partial(trainee.step, images, labels)
        if self.saving is Saving.TORCH_CHECKPOINT:
            yield from _checkpointed(trainee.model, step)
        elif self.saving is Saving.TORCH_ACCUMULATE:
            yield from _accumulating(trainee, images, labels)
        elif self.saving is Saving.TORCH_COMPILE:
            import torch._functorch.config as functorch

            functorch.activation_memory_budget = min(self.share, 1.0)  # This affects only the current process.
            trainee.model = torch.compile(trainee.model)  # type: ignore[assignment]
            yield f"{self.share:.2f} of activations", step
        else:
            yield "", step

    def _optimized(self, trainee: Trainee, images: Tensor, labels: Tensor) -> tuple[_Step, dict[str, Any]]:
        told_s: dict[str, float] = {}

        def note(text: str, _: float) -> None:
            told_s[text] = perf_counter()

        config = replace(self.config, memory_budget=int(self.limit_bytes))
        try:
            _optimize(trainee, images, labels, config, note)
        except InfeasibleError as error:
            if error.smallest_feasible_bytes is None:
                raise
            # All is tuned.
            config = replace(config, memory_budget=error.smallest_feasible_bytes)
            keep_within(trainee.model, images, config, _step_on(trainee, images, labels), ALONE, note)
        planning_s = perf_counter() - told_s[_TRACING]
        keeping: Keeping = trainee.model.keeping  # type: ignore[assignment]
        kept = sum(choice is Choice.KEPT for _, choice in keeping.choices)
        parts = f", {len(keeping.segments)} segments" if keeping.segments else ""
        step = partial(trainee.step, images, labels)
        step()
        return step, {
            "peak_bytes": self._peak_bytes(trainee, step),
            "choice": f"{kept} of {len(keeping.choices)} kept{parts}" if keeping.choices or parts else "all kept",
            "least_bytes": None if config.memory_budget == self.limit_bytes else config.memory_budget,
            "predicted_bytes": keeping.predicted_bytes,
            "predicted_s": keeping.predicted_s,
            "planning_s": planning_s,
        }


def _optimize(trainee: Trainee, images: Tensor, labels: Tensor, config: Config, progress: Progress) -> None:
    mucudnn.optimize(trainee.model, images, config, progress=progress, step=_step_on(trainee, images, labels))


def _step_on(trainee: Trainee, images: Tensor, labels: Tensor) -> Callable[[nn.Module], None]:
    """Return a step with the trainee's loss, but without its optimizer."""

    def step(model: nn.Module) -> None:
        model.zero_grad()
        trainee.loss(model(images), labels).backward()  # type: ignore[no-untyped-call]

    return step


def _checkpointed(model: nn.Module, step: _Step) -> Iterator[tuple[str, _Step]]:
    """Yield steps of which each part of the model is computed again in the backward pass.

    The parts are 2 to 8 segments of a model that is a sequence, as ``checkpoint_sequential`` divides it, or else the
    blocks of the model. Both update the statistics of batch norm twice.
    """
    while len(children := [*model.children()]) == 1:
        (model,) = children
    layers = _in_sequence(model)

    def in_segments(segments: int) -> None:
        vars(model)["forward"] = partial(checkpoint_sequential, layers, segments, use_reentrant=False)
        step()

    if len(layers) > 1:
        for segments in range(2, min(_MOST_SEGMENTS, len(layers)) + 1):
            yield f"{segments} segments", partial(in_segments, segments)
        return
    blocks = [*_blocks(model)]
    if not blocks:
        raise UnavailableError("the model has neither a sequence of layers nor blocks of layers for checkpoints")
    for block in blocks:
        vars(block)["forward"] = partial(checkpoint, block.forward, use_reentrant=False)
    yield f"{len(blocks)} blocks", step


def _in_sequence(model: nn.Module) -> list[nn.Module]:
    """Return the layers that a model runs one after the other; the model alone if it is no sequence."""
    if type(model).forward is not nn.Sequential.forward:
        return [model]
    return [layer for child in model.children() for layer in _in_sequence(child)]


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the largest modules below lists of modules, and below sequences of more than layers."""
    for child in model.children():
        is_block = any(True for _ in child.children())
        has_blocks = any(True for part in child.children() for _ in part.children())
        if isinstance(child, nn.ModuleList) or (isinstance(child, nn.Sequential) and has_blocks):
            yield from _blocks(child)
        elif is_block:
            yield child


def _accumulating(trainee: Trainee, images: Tensor, labels: Tensor) -> Iterator[tuple[str, _Step]]:
    """Yield steps that add the gradients of parts of the batch, from the largest to the smallest parts.

    Batch norm has the statistics of each part.
    """
    counts = {-(-len(images) // count): count for count in range(len(images), 1, -1)}
    if not counts:
        raise UnavailableError("a batch of one image cannot be divided")

    def step(count: int) -> None:
        trainee.optimizer.zero_grad()
        for part, of_part in zip(images.tensor_split(count), labels.tensor_split(count), strict=True):
            loss = trainee.loss(trainee.model(part), of_part) * (len(part) / len(images))
            loss.backward()  # type: ignore[no-untyped-call]
        trainee.optimizer.step()
        trainee.optimizer.zero_grad()

    for count in reversed(counts.values()):
        yield f"{count} parts", partial(step, count)


def prepare_step(
    load: Callable[[], _Network],
    saving: Saving,
    setting: Setting,
    config: Config,
    threads: int,
    limit_bytes: float,
    share: float = 1.0,
) -> Ready[dict[str, Any]]:
    """Build a model in a process of its own, and choose how its steps save memory.

    load: returns the network.
    threads: number of torch's threads.
    limit_bytes, share: as for ``Steps``.

    Return the step to time and columns: those of ``Steps.of``, the number of images, and the seconds until ready.
    Raises any error of building, tuning, compiling and of a step.
    """
    torch.set_num_threads(threads)
    steps, begun_s = Steps(load(), saving, setting, config, limit_bytes, share), perf_counter()
    images = setting.batch_size or steps.largest_batch()
    step, columns = steps.of(images)
    while setting.batch_size is None and columns["peak_bytes"] > limit_bytes and images > 1:
        # Tuned convolutions may need more.
        images = max(1, min(images - 1, int(images * limit_bytes / columns["peak_bytes"])))
        step, columns = steps.of(images)
    more = {"images": images, "ready_after_s": perf_counter() - begun_s}
    return Ready(step, {**more, **columns}, clock=wall_clock(setting.device))


@dataclass(frozen=True, slots=True)
class BudgetOptions:
    """Options of the benchmark of memory budgets.

    savings: torch's own step is always added.
    memory_format: of images; volumes are contiguous.
    rounds: time samples of each way, each of one or more steps.
    seconds: the time limit, after which no further way is prepared, or None.
    """

    config: Config = field(default_factory=Config)
    savings: Sequence[Saving] = SAVINGS
    memory_format: MemoryFormat = MemoryFormat.CHANNELS_LAST
    rounds: int = ROUNDS
    seconds: float | None = None


def benchmark_budgets(
    sources: Sequence[str],
    batch_sizes: Sequence[int | None],
    budgets: Sequence[str],
    options: BudgetOptions,
    out: Path,
    *,
    input_size: tuple[int, ...] | None = None,
    device: str = "cpu",
    progress: Progress = silent,
) -> None:
    """Measure training steps of each source's model within each budget, and write rows into ``out``.

    Settings that the folder already has are skipped.

    sources: as for ``load_model``; a user's own models are trained to give small outputs.
    batch_sizes: one for each source; None for the largest that fits, of each way its own.
    budgets: as for ``budget_bytes``.
    input_size: (C, H, W) of an image; None for each network's own.

    A way that fails gets a row with the reason. Raises ``InvalidInputError`` before anything is measured if a source
    has no model, if a batch is too large, or if there is no largest batch; ``UnavailableError`` if the package of a
    network is missing; and the errors of ``open_folder``.
    """
    if None in batch_sizes and (shares := [budget for budget in budgets if "/" in budget]):
        raise InvalidInputError(
            f"{shares[0]} is a share of the memory of a step, which grows with the batch; for the largest batch give a "
            "size, such as 2GiB"
        )
    settings = []
    for (source, batch_size), budget in product(zip(sources, batch_sizes, strict=True), budgets):
        _, shape = load_model(source, input_shape=input_size, initialised=False)
        input_shape(batch_size or 1, shape)
        memory_format = options.memory_format if len(shape) == 3 else MemoryFormat.CONTIGUOUS
        settings.append(Setting(source, batch_size, budget, memory_format, device))
    described = {
        "batch_sizes": list(batch_sizes),
        "budgets": list(budgets),
        "savings": list(options.savings),
        "memory_format": options.memory_format,
        "rounds": options.rounds,
        **config_record(options.config),
    }
    header = Header(
        "budgets", ", ".join(sources), described, current_environment(device), COLUMNS, wanted=len(settings)
    )
    end_s = inf if options.seconds is None else time.monotonic() + options.seconds
    with open_folder(out, header) as folder:
        missing = [setting for setting in settings if not folder.known(setting.subject())]
        left = dict.fromkeys(missing, "the run was stopped before")
        try:
            for index, setting in enumerate(missing):
                part = share_of(progress, index / len(missing), 1 / len(missing))
                try:
                    rows = measured_rows(setting, options, end_s, part, input_size=input_size)
                except UnavailableError as error:  # The others go on.
                    left[setting] = str(error)
                    continue
                if rows:
                    folder.add(rows)
                    del left[setting]
                else:
                    left[setting] = f"the {options.seconds:g} s were over before all was ready"
        finally:
            folder.write_summary((str(setting), reason) for setting, reason in left.items())


def measured_rows(
    setting: Setting,
    options: BudgetOptions,
    end_s: float = inf,
    progress: Progress = silent,
    *,
    input_size: tuple[int, ...] | None = None,
) -> list[Row]:
    """Measure the ways to save memory in a setting, interleaved, and return a row for each.

    end_s: on the monotonic clock: after it no way is prepared, and no round begun.

    Return no rows if that is before all are ready. If torch's own step fails, of which a budget may be a share, there
    is nothing else. Raises ``UnavailableError`` if the model cannot be pickled.
    """
    savings = [saving for saving in Saving if saving in (Saving.TORCH, *options.savings)]
    if setting.batch_size is None:
        savings = [saving for saving in savings if saving is not Saving.TORCH_ACCUMULATE]
    torch.manual_seed(0)  # Parameters do not depend on earlier models.
    model, shape = load_model(setting.network, input_shape=input_size)
    network = (model, shape, loss_for(setting.network))
    common = setting, options.config, torch.get_num_threads()
    entrants: dict[Saving, Entrant[dict[str, Any]]] = {}
    limit_bytes = budget_bytes(setting.budget, 0) if setting.batch_size is None else inf
    limits, share = {}, 1.0
    with importable(setting.network), pickled(network) as handed, ExitStack() as stack:
        for index, saving in enumerate(savings):
            if time.monotonic() > end_s:
                return []
            progress(f"{setting}: {saving} gets ready", 0.7 * index / len(savings))
            job = partial(prepare_step, handed, saving, *common, limit_bytes, share)
            worker, limits[saving] = stack.enter_context(contestant(job)), limit_bytes
            entrant = entrants[saving] = Entrant(worker, ready_s=READY_S, sample_s=SAMPLE_S)
            if saving is Saving.TORCH and setting.batch_size is not None:
                if entrant.result is None:
                    break
                step_bytes = entrant.result["peak_bytes"]
                limit_bytes = budget_bytes(setting.budget, step_bytes)
                share = limit_bytes / step_bytes
        for done in sampled([entrant.timer.sample for entrant in entrants.values()], options.rounds):
            progress(f"{setting}: {done} of {options.rounds} samples of each way", 0.7 + 0.3 * done / options.rounds)
            if time.monotonic() > end_s:
                break
        return [
            Row(
                setting.subject(),
                saving,
                entrant.samples_s,
                failure=entrant.failure,
                more={"budget_bytes": None if limits[saving] == inf else limits[saving], **(entrant.result or {})},
            )
            for saving, entrant in entrants.items()
        ]


Cell = dict[str, Any]  # a row of the folder, with ``time_s`` and torch's row of the same turns, or None


def _bytes_in(name: str) -> Callable[[Cell], str]:
    return lambda cell: "" if cell.get(name) is None else format_bytes(cell[name])


def _of_torchs(cell: Cell, format_ratio: Callable[[Cell, Cell], str]) -> str:
    """Return a ratio to torch's row, empty if torch failed or ran another batch size."""
    torchs = cell["torch"]
    return format_ratio(cell, torchs) if torchs and torchs["images"] == cell["images"] else ""


def _choice(cell: Cell) -> str:
    is_beyond = cell.get("budget_bytes") is not None and cell.get("peak_bytes", 0) > cell["budget_bytes"]
    return f"{'at the least: ' * is_beyond}{cell.get('choice', '')}"


_LEFT: Columns[Cell] = {"budget": itemgetter("budget"), "variant": itemgetter("contestant"), "chosen": _choice}
_RIGHT: Columns[Cell] = {
    "batch": lambda cell: str(cell["images"]),
    "step ms": lambda cell: milliseconds(cell["time_s"]),
    "of PyTorch's": lambda cell: _of_torchs(
        cell, lambda ours, torchs: with_noise(Comparison.of(ours["samples_s"], torchs["samples_s"]))
    ),
    "predicted ms": lambda cell: milliseconds(cell["predicted_s"]) if cell.get("predicted_s") else "",
    "images/s": lambda cell: images_per_s(cell["images"], cell["time_s"]),
    "peak": _bytes_in("peak_bytes"),
    "its share": lambda cell: _of_torchs(cell, lambda ours, torchs: f"{ours['peak_bytes'] / torchs['peak_bytes']:.3f}"),
    "predicted": _bytes_in("predicted_bytes"),
    "ready s": lambda cell: f"{cell['ready_after_s']:.1f}",
    "planning s": lambda cell: f"{cell['planning_s']:.1f}" if cell.get("planning_s") else "",
}


def budget_tables(folder: ResultFolder) -> Iterator[Table | str]:
    """Yield a table for each network and batch size, and the settings left out."""
    cells: list[Cell] = [with_time(line) for line in folder.lines]
    for cell in cells:
        of_turns = (other for other in cells if other["turns"] == cell["turns"] and not other["failure"])
        cell["torch"] = next((other for other in of_turns if other["contestant"] == Saving.TORCH), None)
    for (network, batch_size), group in groupby(cells, key=itemgetter("network", "batch_size")):
        yield table_of(
            group,
            f"{network}, {'the largest batch' if batch_size is None else f'batch {batch_size}'}: training steps within "
            "memory budgets",
            _LEFT,
            _RIGHT,
            caption="of PyTorch's: time over that of PyTorch's step without a budget, in the same rounds; peak: "
            "counted, beside parameters, gradients and the batch; its share: of PyTorch's; planning: after tuning, in "
            "ready; checkpoints update statistics of batch norm twice, and each accumulated part has its own",
            failure=itemgetter("failure"),
        )
    for reason, settings in folder.left_out.items():
        yield from (f"{setting}: {reason}" for setting in settings)
