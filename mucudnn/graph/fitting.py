"""How a model runs as a graph, for arguments of one shape: tuned, planned, and timed as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, prod
from operator import ne
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mucudnn.core.answers import TunedProblem
from mucudnn.core.config import Config
from mucudnn.core.errors import InfeasibleError
from mucudnn.core.records import Comparison
from mucudnn.core.terminal import Progress
from mucudnn.core.values import exact_bytes, format_bytes, format_seconds, grouped
from mucudnn.graph.candidates import candidates, refined, tuned_problems
from mucudnn.graph.capture import NotCapturedError, capture
from mucudnn.graph.costed import CostedGraph, each_by_itself
from mucudnn.graph.costs import digest, schedule_key
from mucudnn.graph.guards import correct_strides
from mucudnn.graph.least import ARENA_SHARE, FAST_ENOUGH, counted, least_schedule
from mucudnn.graph.operators.convolution import convolutions_of
from mucudnn.graph.operators.operator import Barrier, Captured, Input
from mucudnn.graph.schedule import Schedule
from mucudnn.graph.variants import costed_graph
from mucudnn.kernels.memory import is_free, peak_allocated_bytes
from mucudnn.measuring.timings import Timings
from mucudnn.measuring.turns import Rounds
from mucudnn.solver.plans import Plan, plans, undominated
from mucudnn.solver.recompute import orders_within
from mucudnn.tuning.tuner import machine_and_database

_CONTENDERS = 4  # plans that are run whole
_FEW_OPERATORS = 0.2  # of a graph: plans that differ in fewer are as fast as each other
_MOST_SEGMENTS = 8192  # of a graph of which results are recomputed to gain time: with more, trying takes minutes
_NEAR = 1.15  # predicted times within this factor of the best may win
_LARGEST_ERROR = {torch.float32: 1e-3, torch.float64: 1e-6}  # of a whole model, relative; otherwise
_LARGEST_ERROR_OF_HALVES = 5e-2
ROUNDS = Rounds(2, 7, 4.0, warm_up_s=0.2, race=True)


_Planned: TypeAlias = tuple[CostedGraph, Plan]  # the model's graph, or one that recomputes some results


@dataclass(frozen=True, slots=True)
class Fitted:
    """The schedule of a model for one input, with its measurements. Bytes are beside parameters, arguments and results.

    front: every plan worth having, from the least memory to the least time.
    whole_run: beside torch's own; None if it was not run.
    torch_bytes: the peak of the model's own call; None if it was not run.
    tuned: the choices for each convolution, by its name in the graph, as ``TunedModule.tuned``.
    unrestricted_s: seconds of a call of a graph whose bits may depend on the batch; None if this one's may.
    """

    schedule: Schedule
    front: tuple[Plan, ...]
    budget_bytes: int | None
    time_s: float
    whole_run: Comparison | None
    torch_bytes: int | None
    tuned: Mapping[str, tuple[TunedProblem, ...]]
    unrestricted_s: float | None = None

    @property
    def needed_bytes(self) -> int:
        return self.schedule.needed_bytes

    @property
    def runs_torchs(self) -> bool:
        """Whether the model runs as it is, since that is faster and within the budget."""
        if self.whole_run is None or self.torch_bytes is None or self.whole_run.speedup >= 1:
            return False
        if self.unrestricted_s is not None:
            return False
        return self.budget_bytes is None or self.torch_bytes <= self.budget_bytes

    @property
    def choices(self) -> dict[str, tuple[TunedProblem, ...]]:
        """``tuned``, with what runs in place, which may be another algorithm: its time in the graph decides."""
        names = grouped(  # of what is recomputed, several have one name
            (self.schedule.operators[index].name, "PyTorch" if algorithm is None else algorithm.name)
            for index, algorithm in self.schedule.algorithms.items()
        )
        choices = {}
        for name, problems in self.tuned.items():
            in_place = f"the graph runs {' and '.join(dict.fromkeys(names[name]))}"
            if self.runs_torchs:
                in_place = "the model runs as it is, which is faster"
            choices[name] = tuple(replace(problem, in_place=in_place) for problem in problems)
        return choices

    def __str__(self) -> str:
        """Return a summary, and a line for each segment."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        limit = "without a budget"
        if self.budget_bytes is not None:
            limit = f"within a budget of {format_bytes(self.budget_bytes)}"
        yield f"as a graph: {format_bytes(self.needed_bytes)} {limit}, {format_seconds(self.time_s)} a call"
        if self.whole_run is not None and self.torch_bytes is not None:
            yield (
                f"PyTorch's own: {format_bytes(self.torch_bytes)}, {format_seconds(self.whole_run.baseline_s)} "
                f"({self.whole_run.speedup:.2f} times as long)"
            )
        if self.unrestricted_s is not None:
            yield (
                f"with {self.schedule.threads} threads each sample has the same bits in any batch, for "
                f"{self.time_s / self.unrestricted_s:.2f} times the time of a graph without that, of a batch of "
                f"{self.schedule.captured.samples}"
            )
        if self.runs_torchs:
            yield "the model runs as it is, which is faster"
            return
        operators, computed = self.schedule.operators, set[str]()
        for segment, nbytes in zip(self.schedule.plan.segments, self.schedule.segment_bytes(), strict=True):
            if isinstance(operators[segment.start], Input):
                continue
            names, cut = [operator.name for operator in operators[segment.start : segment.stop]], segment.cut
            text = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            bands = f", {cut.bands} bands" + ("" if cut.keeps else ", rows computed again") if cut.bands > 1 else ""
            samples = f", {cut.samples} samples at once" if cut.samples < self.schedule.captured.samples else ""
            repeated = [name for name in names if name in computed]
            computed.update(names)
            recomputed = f"; recomputed: {'; '.join(repeated)}" if repeated else ""
            yield f"  {text}: {format_bytes(nbytes)}{bands}{samples}{recomputed}"


def fit(
    model: nn.Module,
    arguments: tuple[Any, ...],
    config: Config,
    progress: Progress,
    *,
    is_large: bool = False,
) -> Fitted:
    """Return the fastest way to run a model within the budget, for arguments of one shape.

    is_large: whether there is memory for nothing but bands: then neither the model nor a convolution runs as a whole.

    After the time limit, what is not known is estimated, and only the first plan that fits is run, beside the model.

    Raises ``NotCapturedError`` if the model has no graph, and ``InfeasibleError`` with the smallest budget that would
    do.
    """
    # The graph, and the schedule that needs the fewest bytes
    captured, least = _captured(model, arguments, config, progress)
    budget, runs_whole = config.memory_budget_bytes, not is_large and _may_run_whole(captured)
    with machine_and_database(config, captured.device.type) as (machine, database):
        # The candidates of the convolutions, and the costs of all operators
        timings = Timings(machine, database, config, progress)
        tuned: dict[int, TunedProblem] = {}
        if captured.device.type == "cpu":  # elsewhere torch's own run
            tuned = tuned_problems(captured, config, machine, database, progress, timings, in_bands=is_large)
        choices, kept = candidates(captured, tuned, arguments, config, timings, runs_whole=runs_whole)
        costed = costed_graph(captured, choices, kept, timings, batch_invariant=config.batch_invariant)
        progress("measuring the other operators", 1.0)

        # Plans, from the fastest predicted
        planned = _plans(costed, budget)

        # The model itself, and the schedules that compute what it computes
        model_run = None
        if config.confirm is not False and runs_whole:
            model_run = _ModelRun.of(partial(model, *arguments), captured.device.type)
            correct_strides(captured.memories, model_run.output)
        contenders = _contenders(planned, budget, arguments, model_run, most=_CONTENDERS if timings.left_s > 0 else 1)
        contenders += _refined(contenders, budget, arguments, model_run, timings)
        if not contenders and least is not None:
            _compare(least, arguments, model_run)
            contenders = [least]
        if timings.left_s <= 0:
            contenders = contenders[:1]

        # The choice: calls in turns, beside the model itself if it was run
        progress("running the model", 1.0)
        schedule, run = _race(model, contenders, arguments, model_run, timings)
    schedule.settle(inf if budget is None else budget)
    front = undominated((plan.memory_bytes, plan.time_s, plan) for _, plan in planned[1:])
    convolutions = convolutions_of(captured.operators)
    return Fitted(
        schedule=schedule,
        front=tuple(plan for _, _, plan in front),
        budget_bytes=budget,
        time_s=run.time_s,
        whole_run=None if model_run is None else run,
        torch_bytes=None if model_run is None else model_run.peak_bytes,
        tuned={convolutions[index].name: (problem,) for index, problem in tuned.items()},
    )


def _captured(
    model: nn.Module, arguments: tuple[Any, ...], config: Config, progress: Progress
) -> tuple[Captured, Schedule | None]:
    """Return the model's graph, and its schedule with the fewest bytes; None if there is no budget.

    Raises ``NotCapturedError`` for a model without a graph, and ``InfeasibleError`` if the budget is too small.
    """
    progress("capturing the graph", 0.0)
    captured, budget = capture(model, arguments), config.memory_budget_bytes
    if not convolutions_of(captured.operators):
        raise NotCapturedError("it has no convolution of images")
    if budget is None:
        return captured, None
    progress("finding the smallest budget", 0.0)
    captured, least = least_schedule(model, captured, config, budget, arguments)
    if least.needed_bytes > budget:
        raise InfeasibleError(
            f"the memory budget is {exact_bytes(budget)}; with this input the model needs at least "
            f"{exact_bytes(least.needed_bytes)} for activations and workspace, beside parameters, the input and "
            f"the result",
            least.needed_bytes,
        )
    return captured, least


def _plans(costed: CostedGraph, budget: int | None) -> list[_Planned]:
    """Return plans, each with the graph that it runs: first each operator by itself, then from the fastest predicted.

    What the first needs is not predicted: it has the bytes and seconds of the fastest one. With a budget, results may
    be recomputed, for which the graph's operators are in another order.
    """
    planned = [(costed, plan) for plan in plans(costed.graph)]
    fastest = planned[-1][1]
    by_itself = replace(fastest, segments=each_by_itself(costed.graph).segments)
    if budget is not None:
        enough_s = fastest.time_s * FAST_ENOUGH
        if sum(len(costed.graph.starts(stop)) for stop in range(1, len(costed.graph) + 1)) > _MOST_SEGMENTS:
            enough_s = inf  # any plan within the budget will do
        recomputing: list[_Planned] = []
        for order in orders_within(costed.graph, int(budget * ARENA_SHARE), enough_s):
            in_order = costed.in_order(order)
            recomputing += [(in_order, plan) for plan in plans(in_order.graph)]
        front = undominated((plan.memory_bytes, plan.time_s, (graph, plan)) for graph, plan in recomputing)
        planned += [pair for _, _, pair in front]
    return [(costed, by_itself), *sorted(planned, key=lambda pair: pair[1].time_s)]


@dataclass(frozen=True, slots=True)
class _ModelRun:
    """A call of the model as it is. peak_bytes: what it allocates at its peak, beside its output."""

    call: Callable[[], Any]
    output: Any
    peak_bytes: int

    @classmethod
    @torch.no_grad()
    def of(cls, call: Callable[[], Any], device_type: str) -> Self:
        outputs: list[Any] = []
        peak = peak_allocated_bytes(lambda: outputs.append(call()), device_type)
        output_bytes = sum(leaf.nbytes for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))
        return cls(call, outputs[0], peak - output_bytes)


def _contenders(
    planned: Sequence[_Planned],
    budget: int | None,
    arguments: tuple[Any, ...],
    model_run: _ModelRun | None,
    *,
    most: int = _CONTENDERS,
) -> list[Schedule]:
    """Return the schedules to run whole: the fastest predicted within the budget, and others that may be faster.

    Those that do not give the model's output are left out. Raises ``NotCapturedError`` if none is left then, unless
    there is a budget, for which there is the schedule with the fewest bytes.

    planned: as returned by ``_plans``.
    most: how many are wanted.
    """
    most_bytes = inf if budget is None else 2 * budget  # predictions are not exact
    ready: list[Schedule] = []
    failure: NotCapturedError | None = None
    for number, (costed, plan) in enumerate(planned):
        if plan.memory_bytes > most_bytes:
            continue
        if len(ready) == most or (ready and plan.time_s > ready[0].plan.time_s * _NEAR):
            break
        limit_bytes = inf if budget is None or plan.memory_bytes > budget else budget
        schedule = Schedule(costed, plan, limit_bytes=limit_bytes)
        if budget is not None and schedule.needed_bytes > budget:
            if number and limit_bytes == budget:  # the integer program failed, and would for a plan that needs as much
                most_bytes = plan.memory_bytes * 0.98
            continue
        if any(_are_alike(schedule, other) for other in ready):
            continue
        try:
            _compare(schedule, arguments, model_run)
        except NotCapturedError as error:
            failure = error
            continue
        if budget is None or schedule.needed_bytes <= budget:
            ready.append(schedule)
    if failure is not None and not ready and budget is None:
        raise failure
    return ready


def _refined(
    contenders: Sequence[Schedule],
    budget: int | None,
    arguments: tuple[Any, ...],
    model_run: _ModelRun | None,
    timings: Timings,
) -> list[Schedule]:
    """Return the first contender in bands with the algorithms that are fastest in them, if that is another one."""
    in_bands = (schedule for schedule in contenders if any(segment.cut.bands > 1 for segment in schedule.plan.segments))
    schedule, limit_bytes = next(in_bands, None), inf if budget is None else budget
    if schedule is None or not any(schedule.costed.offered.values()):
        return []
    timings.progress("timing convolutions in bands", 1.0)
    faster = refined(schedule, arguments, limit_bytes, timings)
    if faster is schedule:
        return []
    try:
        _compare(faster, arguments, model_run)
    except NotCapturedError:  # it gives other values
        return []
    return [faster] if faster.needed_bytes <= limit_bytes else []


def _race(
    model: nn.Module,
    contenders: Sequence[Schedule],
    arguments: tuple[Any, ...],
    model_run: _ModelRun | None,
    timings: Timings,
) -> tuple[Schedule, Comparison]:
    """Return the contender that is fastest in calls in turns, beside the model, or the first if that was not run."""
    runs = [partial(schedule.run, arguments) for schedule in contenders]
    baseline_is = "the first" if model_run is None else type(model).__qualname__
    keys = [schedule_key(schedule) for schedule in contenders]
    what = f"calls in turns: {digest(f'{baseline_is} {keys}')}"
    with torch.no_grad():
        comparisons = timings.compared(what, runs[0] if model_run is None else model_run.call, runs, ROUNDS)
    number = min(comparisons, key=lambda number: comparisons[number].time_s)
    return contenders[number], comparisons[number]


def _may_run_whole(captured: Captured) -> bool:
    """Return whether half of the free memory is enough for all activations at once."""
    sizes = (
        operator.nbytes if isinstance(operator, Barrier) else prod(operator.shape) * operator.dtype.itemsize
        for operator in captured.operators
    )
    return is_free(sum(sizes), captured.device)


def _compare(schedule: Schedule, arguments: tuple[Any, ...], model_run: _ModelRun | None) -> None:
    """Run a schedule, count what it needs, and raise ``NotCapturedError`` unless its results are the model's.

    The relative L2 error of tensors is bounded; numbers that are not finite must be in the same places.
    """
    output = counted(schedule, arguments)
    if model_run is None:
        return
    for ours, expected in zip(tree_leaves(output), tree_leaves(model_run.output), strict=True):
        if isinstance(expected, Tensor) and expected.is_floating_point():
            error = _relative_error(ours, expected)
            if not error <= _LARGEST_ERROR.get(expected.dtype, _LARGEST_ERROR_OF_HALVES):
                raise NotCapturedError(f"its graph gives other values, with a relative error of {error:.1e}")
        elif not are_equal(ours, expected):
            raise NotCapturedError("its graph gives other values")


def _relative_error(ours: Tensor, expected: Tensor) -> float:
    """Return the relative L2 error; infinity if other numbers are not finite."""
    if not torch.equal(ours.isfinite(), expected.isfinite()):
        return inf
    ours, expected = (torch.nan_to_num(tensor.double(), 0, 0, 0) for tensor in (ours, expected))
    norm = float(torch.linalg.vector_norm(expected))
    return float(torch.linalg.vector_norm(ours - expected)) / (norm or 1.0)


def _are_alike(first: Schedule, second: Schedule) -> bool:
    """Return whether two schedules run nearly all operators in the same number of bands, by the same algorithms."""
    if len(first.operators) != len(second.operators):
        return False
    cuts = (
        [
            (segment.cut.bands, schedule.algorithms.get(index))
            for segment in schedule.plan.segments
            for index in range(segment.start, segment.stop)
        ]
        for schedule in (first, second)
    )
    differences: int = sum(map(ne, *cuts))
    return differences <= _FEW_OPERATORS * len(first.operators)


def are_equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)
