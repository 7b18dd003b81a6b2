"""Inference within a memory budget: a model's graph is cut into segments and bands, tuned, and timed as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import psutil
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mucudnn.database.database import Database
from mucudnn.graph.capture import NotCapturedError, capture
from mucudnn.graph.convolution import Choice, Convolution
from mucudnn.graph.model import BandedModel, signature_of
from mucudnn.graph.operators import Input
from mucudnn.graph.schedule import Schedule, solver_graph
from mucudnn.kernels.contract.algorithm import Algorithm
from mucudnn.kernels.contract.allocation import peak_allocated_bytes
from mucudnn.kernels.registry import algorithm as algorithm_named
from mucudnn.kernels.registry import algorithms
from mucudnn.measuring.operator_costs import every_cost, operator_costs
from mucudnn.measuring.timing.comparison import Rounds
from mucudnn.measuring.whole_runs import Machine
from mucudnn.optimizing.fuse import require_inference
from mucudnn.running.devices import device_of_convolutions
from mucudnn.running.dispatcher import untouched
from mucudnn.solver.bands import Costs, Graph, Plan, plans
from mucudnn.tracing.own_step import undisturbed
from mucudnn.tuning.result import TunedProblem
from mucudnn.tuning.tuner import machine_and_database, tune_tasks
from mucudnn.words.config import Config
from mucudnn.words.errors import InfeasibleError, MucudnnError, UnavailableError, first_line
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.progress import Progress
from mucudnn.words.results import Measurement, WholeRun
from mucudnn.words.task import Task
from mucudnn.words.torch_settings import TORCHS_OWN
from mucudnn.words.units import exact_bytes, format_bytes, format_seconds
from mucudnn.words.warning import warn

_BAND_ROWS = 24  # of the bands on which convolutions are measured: whole tiles of every Winograd algorithm
_SHARES = 1.0, 0.35, 0.0  # of the fastest algorithm's prepared filter, which the algorithms of each variant may have
_CONTENDERS = 4  # plans that are run whole
_NEAR = 1.15  # predicted times within this factor of the best may win
_LARGEST_ERROR = {torch.float32: 1e-3, torch.float64: 1e-6}  # of a whole model, relative; otherwise
_LARGEST_ERROR_OF_HALVES = 5e-2
_Costs: TypeAlias = dict[int, tuple[Costs, ...]]  # of operators by index, of each variant
_Variant: TypeAlias = tuple[Measurement | None, Measurement | None]  # of all rows, of bands; None for torch's own
_ROUNDS = Rounds(2, 7, 4.0, warm_up_s=0.2, race=True)


@dataclass(frozen=True, slots=True)
class Fitted:
    """The schedule of a model for one input, with its measurements. Bytes are beside parameters, arguments and results.

    front: every plan worth having, from the least memory to the least time. whole_run: beside torch's own; None if it
    was not run. torch_bytes: the peak of the model's own call; None if it was not run. convolutions: what was measured
    of each, of all rows and of bands.
    """

    schedule: Schedule
    front: tuple[Plan, ...]
    budget_bytes: int | None
    time_s: float
    whole_run: WholeRun | None
    torch_bytes: int | None
    convolutions: tuple[tuple[str, TunedProblem], ...]

    @property
    def needed_bytes(self) -> int:
        return self.schedule.needed_bytes

    @property
    def runs_torchs(self) -> bool:
        """Whether the model runs as it is, since that is faster and within the budget."""
        if self.whole_run is None or self.torch_bytes is None or self.whole_run.speedup >= 1:
            return False
        return self.budget_bytes is None or self.torch_bytes <= self.budget_bytes

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """Yield a summary, and a line for each segment."""
        limit = "without a budget"
        if self.budget_bytes is not None:
            limit = f"within a budget of {format_bytes(self.budget_bytes)}"
        yield f"in bands: {format_bytes(self.needed_bytes)} {limit}, {format_seconds(self.time_s)} a call"
        if self.whole_run is not None and self.torch_bytes is not None:
            yield (
                f"PyTorch's own: {format_bytes(self.torch_bytes)}, {format_seconds(self.whole_run.baseline_s)} "
                f"({self.whole_run.speedup:.2f} times as long)"
            )
        if self.runs_torchs:
            yield "the model runs as it is, which is faster"
            return
        operators = self.schedule.operators
        for segment, of_segment in zip(self.schedule.plan.segments, self.schedule.segment_bytes, strict=True):
            if isinstance(operators[segment.start], Input):
                continue
            first, last = operators[segment.start].name, operators[segment.stop - 1].name
            names = first if first == last else f"{first} to {last}"
            cut = segment.cut
            bands = f", {cut.bands} bands" + ("" if cut.keeps else ", rows computed again") if cut.bands > 1 else ""
            samples = f", {cut.samples} samples at once" if cut.samples < self.schedule.captured.samples else ""
            yield f"  {names}: {format_bytes(of_segment)}{bands}{samples}"


def fit_in_memory(model: nn.Module, sample_inputs: Sequence[Any], config: Config, progress: Progress) -> nn.Module:
    """Return a module that computes what the model computes within ``config.memory_budget``, for these inputs.

    Returns the model itself, with a warning, if its graph cannot be captured or computes something else.

    Raises ``InfeasibleError`` with the smallest budget that would do, ``InvalidInputError`` for a model in training
    mode, ``UnavailableError`` for one on another device than the CPU, and the errors of ``tune``.
    """
    require_inference(model, "memory_budget")
    device = device_of_convolutions(model)
    if device.type != "cpu":
        raise UnavailableError(f"a memory budget is for models on the CPU, and this one is on {device}: leave it out")
    inputs = [sample if isinstance(sample, tuple) else (sample,) for sample in sample_inputs]
    try:
        with undisturbed(model), untouched:
            findings = [_Fitting(model, arguments, config, progress).fitted() for arguments in inputs]
    except NotCapturedError as error:
        warn(f"the model runs as it is, without a memory budget: {error}")
        return model
    schedules = (None if one.runs_torchs else one.schedule for one in findings)
    return BandedModel(model, dict(zip(map(signature_of, inputs), schedules, strict=True)), findings)


class _Fitting:
    """The search for the fastest way to run a model within the budget, for arguments of one shape."""

    def __init__(self, model: nn.Module, arguments: tuple[Any, ...], config: Config, progress: Progress) -> None:
        self.model, self.arguments, self.config, self.progress = model, arguments, config, progress
        self.budget = config.memory_budget_bytes

    def fitted(self) -> Fitted:
        self.progress("capturing the graph", 0.0)
        self.captured = capture(self.model, self.arguments)
        with machine_and_database(self.config) as (machine, database):
            self._tune(machine, database)
            graph = solver_graph(self.captured, *self._costs(machine))
            front = plans(graph)
            contenders = self._contenders(graph, front)
            if not contenders:
                raise self._infeasible(graph, front)
            return self._fastest(machine, front, contenders)

    # Costs

    def _tune(self, machine: Machine, database: Database) -> None:
        """Tune the convolutions, as a whole and in bands."""
        convolutions = [one for one in self.captured.operators if isinstance(one, Convolution)]
        tasks = dict.fromkeys(task for one in convolutions for task in self._tasks(one) if task is not None)
        tuning = tune_tasks(
            list(tasks), self._tuning_config(), progress=self.progress, machine=machine, database=database
        )
        self.tuned = dict(zip(tasks, tuning.problems, strict=True))
        self._tune_leanest(machine, database)

    def _tune_leanest(self, machine: Machine, database: Database) -> None:
        """Measure the algorithms with the smallest prepared filters too, which tuning drops where others are faster."""
        wanted: dict[str, list[Task]] = {}
        for task, tuned in self.tuned.items():
            name = _leanest(task.problem)
            if name is not None and all(one.micro_config.algorithm != name for one in tuned.measurements):
                wanted.setdefault(name, []).append(task)
        for name, tasks in wanted.items():
            config = replace(self._tuning_config(), algorithms=(name,))
            tuning = tune_tasks(tasks, config, progress=self.progress, machine=machine, database=database)
            for task, tuned in zip(tasks, tuning.problems, strict=True):
                known = self.tuned[task]
                self.tuned[task] = replace(known, measurements=(*known.measurements, *tuned.measurements))

    def _costs(self, machine: Machine) -> tuple[_Costs, _Costs]:
        """Choose each convolution's algorithms, and return the costs of all operators: in bands, and of all rows."""
        known: _Costs = {}
        whole: _Costs = {}
        chosen = {
            index: self._variants(one)
            for index, one in enumerate(self.captured.operators)
            if isinstance(one, Convolution)
        }
        self._keep_filters(chosen)
        for index, variants in chosen.items():
            one = self.captured.operators[index]
            assert isinstance(one, Convolution)
            one.choices = tuple(Choice(*map(_algorithm_of, variant)) for variant in variants)
            of_torch = operator_costs(self.captured, index, machine.clock) if None in chain(*variants) else Costs()
            costs = [self._costs_of(one, *variant) for variant in variants]
            known[index], whole[index] = (tuple(cost or of_torch for cost in of) for of in zip(*costs, strict=True))
        self.progress("measuring the other operators", 1.0)
        return every_cost(self.captured, machine.clock, known), whole

    def _keep_filters(self, chosen: Mapping[int, Sequence[_Variant]]) -> None:
        """Keep prepared filters between calls where they save the most time for each byte of the cache budget."""
        left = float("inf") if self.config.cache_budget_bytes is None else self.config.cache_budget_bytes
        found = []
        for index, variants in chosen.items():
            fastest = [one for one in variants[0] if one is not None]
            if fastest:
                size = max(one.prepared_bytes for one in fastest)
                found.append((-max(one.setup_s for one in fastest) / (size or 1), index, size))
        for _, index, size in sorted(found):
            one = self.captured.operators[index]
            assert isinstance(one, Convolution)
            one.keeps = size <= left
            left -= size if one.keeps else 0

    def _variants(self, one: Convolution) -> tuple[_Variant, ...]:
        """Return what computes all rows, and bands: the fastest, and ever smaller prepared filters."""
        n = self.captured.samples
        of_whole, of_band = self._tuned(one)
        found = [
            (
                _best(one.problem, of_whole, n, share),
                _best(one.problem, of_band or of_whole, 1 if of_band else n, share),
            )
            for share in _SHARES
        ]
        return tuple(dict.fromkeys(found))

    def _tuned(self, one: Convolution) -> tuple[TunedProblem | None, TunedProblem | None]:
        whole, band = self._tasks(one)
        return (None if whole is None else self.tuned[whole]), (None if band is None else self.tuned[band])

    def _tasks(self, one: Convolution) -> tuple[Task | None, Task | None]:
        return self._whole_task(one), self._band_task(one)

    def _tuning_config(self) -> Config:
        limit = self.config.workspace_limit
        return replace(
            self.config,
            operations=tuple(Operation),
            memory_budget=None,
            workspace_limit=None if limit == "headroom" else limit,
            workspace_budget=None,
        )

    def _whole_task(self, one: Convolution) -> Task | None:
        """Return the task of a whole convolution; None if its tensors alone exceed the budget."""
        problem, n = one.problem, self.captured.samples
        if self.budget is not None and _operand_bytes(problem, n) > self.budget:
            return None
        return self._task(problem, n)

    def _band_task(self, one: Convolution) -> Task | None:
        problem = band_problem(one.problem, min(_BAND_ROWS, one.rows))
        return None if problem is None else self._task(problem, 1)

    def _task(self, problem: ConvProblem, n: int) -> Task:
        limit = self._tuning_config().workspace_limit_bytes
        return Task(problem, n, limit, name=str(problem), baseline_exempt=self.config.baseline_exempt)

    def _costs_of(
        self, one: Convolution, whole: Measurement | None, band: Measurement | None
    ) -> tuple[Costs | None, Costs | None]:
        """Return the costs of a convolution in bands, and of all rows; None where torch runs it."""
        n, of_whole, of_band = self.captured.samples, None, None
        rows = min(_BAND_ROWS, one.rows) if self._tasks(one)[1] else one.rows
        if band is not None:
            band_s = band.step_s / band.micro_config.micro_batch_size
            row_s, call_s = band_s / rows, 0.0
            if whole is not None and one.rows > rows:
                row_s = min(max(whole.step_s / n - band_s, 0.0) / (one.rows - rows), row_s)
                call_s = band_s - row_s * rows
            of_band = self._with_buffers(one, band, rows, call_s, row_s)
        if whole is not None:
            of_whole = self._with_buffers(one, whole, one.rows, 0.0, whole.step_s / n / one.rows)
        return of_band, of_whole

    def _with_buffers(self, one: Convolution, of: Measurement, rows: int, call_s: float, row_s: float) -> Costs:
        scratch_bytes = self._scratch_bytes(one, algorithm_named(of.micro_config.algorithm), rows)
        if one.keeps:
            return Costs(call_s, row_s, scratch_bytes=scratch_bytes)
        return Costs(call_s, row_s, of.setup_s, scratch_bytes, 0, of.prepared_bytes)

    def _scratch_bytes(self, one: Convolution, algorithm: Algorithm, rows: int) -> int:
        """Return the scratch bytes of a call for so many rows."""
        of_x = _rows_read(one.problem, rows)
        made = algorithm.band(one.problem, 1, (rows, of_x) if one.is_transposed else (of_x, rows), 0)
        assert made is not None
        return made[1].scratch_bytes

    # Choice

    def _contenders(self, graph: Graph, front: Sequence[Plan]) -> list[Schedule]:
        """Return the plans to run whole: the fastest predicted within the budget, and others that may be faster."""
        ready: list[Schedule] = []
        fastest = None
        for plan in reversed(front):
            if self.budget is not None and plan.memory_bytes > 2 * self.budget:  # predictions are not exact
                continue
            if fastest is not None and (plan.time_s > fastest * _NEAR or len(ready) == _CONTENDERS):
                break
            if any(_bands(plan) == _bands(other.plan) for other in ready):
                continue
            schedule = Schedule(self.captured, graph, plan)
            if self.budget is None or schedule.needed_bytes <= self.budget:
                self._count(schedule)
            if self.budget is None or schedule.needed_bytes <= self.budget:
                fastest = fastest or plan.time_s
                ready.append(schedule)
        return ready

    def _count(self, schedule: Schedule) -> None:
        """Run a schedule, and count what it needs. Raises ``NotCapturedError`` if it fails."""
        try:
            schedule.count(self.arguments)
        except MucudnnError:
            raise
        except Exception as error:  # torch's operators may raise anything
            raise NotCapturedError(f"its graph raises {type(error).__name__}: {first_line(error)}") from error

    def _infeasible(self, graph: Graph, front: Sequence[Plan]) -> InfeasibleError:
        schedules = [Schedule(self.captured, graph, plan) for plan in front[:_CONTENDERS]]
        for schedule in schedules:
            self._count(schedule)
        least = min(schedule.needed_bytes for schedule in schedules)
        assert self.budget is not None
        return InfeasibleError(
            f"the memory budget is {exact_bytes(self.budget)}; with this input the model needs at least "
            f"{exact_bytes(least)} for activations and workspace, beside parameters, the input and the result",
            least,
        )

    def _fastest(self, machine: Machine, front: tuple[Plan, ...], contenders: Sequence[Schedule]) -> Fitted:
        """Run the contenders in turns, beside the model itself if there is memory for it."""
        torch_bytes, expected = None, None
        runs = [partial(one.run, self.arguments) for one in contenders]
        with torch.no_grad():
            if self._may_run_torchs(contenders):
                baseline = partial(self.model, *self.arguments)
                torch_bytes, expected = _peak_bytes(baseline)
            else:
                baseline = runs[0]
            self._require_right(contenders[0], expected)
            self.progress("running the model", 1.0)
            results = machine.in_turns(baseline, runs, _ROUNDS)
        timed = [(run.time_s, index) for index, run in enumerate(results) if isinstance(run, WholeRun)]
        if not timed:
            raise next(run for run in results if isinstance(run, Exception))
        time_s, index = min(timed)
        run = results[index]
        assert isinstance(run, WholeRun)
        convolutions = (one for one in self.captured.operators if isinstance(one, Convolution))
        tuned = ((one.name, found) for one in convolutions for found in self._tuned(one) if found is not None)
        whole_run = None if torch_bytes is None else run
        return Fitted(contenders[index], front, self.budget, time_s, whole_run, torch_bytes, tuple(tuned))

    def _may_run_torchs(self, contenders: Sequence[Schedule]) -> bool:
        """Return whether half of the free memory is enough for all activations at once."""
        if self.config.confirm is False:
            return False
        graph = contenders[0].graph
        every = sum(one.whole_bytes or one.rows * one.row_bytes * graph.samples for one in graph.operators)
        return bool(every < psutil.virtual_memory().available / 2)

    def _require_right(self, schedule: Schedule, expected: Any) -> None:
        """Raise ``NotCapturedError`` if the schedule's results are not those of the model. None: they are not known."""
        if expected is None:
            return
        found = schedule.run(self.arguments)
        for ours, theirs in zip(tree_leaves(found), tree_leaves(expected), strict=True):
            if isinstance(theirs, Tensor) and theirs.is_floating_point():
                error = _relative_error(ours, theirs)
                bound = _LARGEST_ERROR.get(theirs.dtype, _LARGEST_ERROR_OF_HALVES)
                if not error <= bound:
                    raise NotCapturedError(f"its graph gives other values, with a relative error of {error:.1e}")
            elif not (torch.equal(ours, theirs) if isinstance(theirs, Tensor) else ours == theirs):
                raise NotCapturedError("its graph gives other values")


def _relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the relative L2 error; numbers that are not finite must be in the same places."""
    if not torch.equal(found.isfinite(), expected.isfinite()):
        return float("inf")
    found, expected = (torch.nan_to_num(one.double(), 0, 0, 0) for one in (found, expected))
    norm = float(torch.linalg.vector_norm(expected))
    return float(torch.linalg.vector_norm(found - expected)) / (norm or 1.0)


def _peak_bytes(call: Any) -> tuple[int, Any]:
    """Return the peak of the bytes that a call allocates beside its results, and the results."""
    kept: list[Any] = []
    peak = peak_allocated_bytes(lambda: kept.append(call()))
    return peak - sum(one.nbytes for one in tree_leaves(kept[0]) if isinstance(one, Tensor)), kept[0]


def _best(problem: ConvProblem, tuned: TunedProblem | None, n: int, share: float) -> Measurement | None:
    """Return the fastest of our algorithms that run bands; None if torch's own is faster, or there is none.

    share: the largest prepared filter, as a share of the fastest algorithm's; below 1 torch's own is not considered. If
    all are larger, the smallest.
    """
    if tuned is None:
        return None
    whole = [one for one in tuned.allowed_measurements if one.micro_config.micro_batch_size == n]
    ours = [one for one in whole if _runs_bands(one.micro_config.algorithm, problem)]
    torchs = [one.step_s for one in whole if one.micro_config.algorithm == TORCHS_OWN]
    best = min(ours, key=lambda one: one.setup_s + one.step_s, default=None)
    if best is None:
        return None
    if share == 1:
        return None if torchs and min(torchs) < 0.9 * best.step_s else best
    smaller = [one for one in ours if one.prepared_bytes <= share * best.prepared_bytes]
    smallest = min(ours, key=lambda one: (one.prepared_bytes + one.scratch_bytes, one.step_s))
    return min(smaller, key=lambda one: one.setup_s + one.step_s, default=smallest)


def _leanest(problem: ConvProblem) -> str | None:
    """Return the algorithm that runs bands with the smallest prepared filter; None if there is none."""
    offered = (
        one
        for one in algorithms()
        if not one.is_last_resort and one.supports(problem) is None and _runs_bands(one.name, problem)
    )
    leanest = min(offered, key=lambda one: one.workspace(problem, 1).prepared_bytes, default=None)
    return None if leanest is None else leanest.name


def _algorithm_of(measured: Measurement | None) -> Algorithm | None:
    return None if measured is None else algorithm_named(measured.micro_config.algorithm)


def _runs_bands(name: str, problem: ConvProblem) -> bool:
    algorithm = algorithm_named(name)
    rows = problem.h, problem.y_shape(1)[2]
    return algorithm.device_type == "cpu" and algorithm.band(problem, 1, rows, problem.padding[0]) is not None


def band_problem(problem: ConvProblem, rows: int) -> ConvProblem | None:
    """Return the problem of a band of ``rows`` rows of the result, from the middle of the image; None for all rows."""
    is_transposed = problem.operation is Operation.BACKWARD_DATA
    if rows >= (problem.h if is_transposed else problem.y_shape(1)[2]):
        return None
    extent, padding = problem.dilation[0] * (problem.r - 1) + 1, (0, problem.padding[1])
    height = max(rows, extent) if is_transposed else (rows - 1) * problem.stride[0] + extent
    return replace(problem, h=height, padding=padding)


def _rows_read(problem: ConvProblem, rows: int) -> int:
    extent, stride = problem.dilation[0] * (problem.r - 1) + 1, problem.stride[0]
    if problem.operation is Operation.BACKWARD_DATA:
        return max((rows - extent) // stride + 1, 1)
    return (rows - 1) * stride + extent


def _operand_bytes(problem: ConvProblem, n: int) -> int:
    shapes = problem.x_shape(n), problem.y_shape(n)
    return sum(a * b * c * d for a, b, c, d in shapes) * problem.item_bytes


def _bands(plan: Plan) -> tuple[int, ...]:
    """Return what makes plans different in speed: where they cut, and into how many bands."""
    return tuple(
        number
        for one in plan.segments
        if one.cut.bands > 1
        for number in (one.start, one.stop, one.cut.bands, one.cut.variant)
    )
