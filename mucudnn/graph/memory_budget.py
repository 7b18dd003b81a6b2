"""Inference within a memory budget: a model's graph is cut into segments and bands, tuned, and timed as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf, prod
from operator import ne
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mucudnn.core.answers import TunedProblem
from mucudnn.core.config import Config
from mucudnn.core.errors import (
    InfeasibleError,
    InvalidInputError,
    MucudnnError,
    first_line,
    raise_interruption,
    warn,
)
from mucudnn.core.records import Comparison
from mucudnn.core.terminal import Progress
from mucudnn.core.values import exact_bytes, format_bytes, format_seconds, grouped
from mucudnn.graph.capture import NotCapturedError, capture
from mucudnn.graph.convolution_choices import (
    TunedConvolution,
    band_rows,
    chosen_costs,
    each_by_itself,
    fastest_of,
    refined,
    runs_bands,
    scratch_bytes,
    timed_in_place,
    tuned_convolutions,
)
from mucudnn.graph.costs import Timings, digest, estimated_costs, every_cost, operator_costs, schedule_key
from mucudnn.graph.guards import correct_strides
from mucudnn.graph.model import BandedModel, Graphs, banded, signature_of
from mucudnn.graph.operators import Barrier, Captured, Input
from mucudnn.graph.schedule import Schedule, solver_graph
from mucudnn.graph.windows import AlgorithmPair, Convolution, convolutions_of
from mucudnn.kernels.memory import is_free, peak_allocated_bytes
from mucudnn.kernels.registry import algorithm as algorithm_named
from mucudnn.kernels.registry import algorithms
from mucudnn.measuring.turns import Rounds
from mucudnn.running.devices import device_of_convolutions
from mucudnn.running.dispatcher import untouched
from mucudnn.solver.bands import Costs, Graph
from mucudnn.solver.plans import Plan, closer, plans, undominated
from mucudnn.solver.recompute import in_order, orders_within
from mucudnn.tuning.model_state import is_training, undisturbed
from mucudnn.tuning.tuner import machine_and_database

_CONTENDERS = 4  # plans that are run whole
_FEW_OPERATORS = 0.2  # of a graph: plans that differ in fewer are as fast as each other
_ARENA_SHARE = (
    0.85  # of a budget or goal that plans which recompute may need: overlaps make arenas larger than predicted
)
_LEAST_PLANS = 3  # with the least predicted memory, of which the buffers are placed
_NEXT = 0.9  # of the bytes of a schedule: the goal of the next one, which recomputes more results
_MARGIN = 1.25  # predicted bytes that are further below the budget need not be counted
_FAST_ENOUGH = 1.05  # of the fastest time without a budget: slower plans are compared with recomputation
_MOST_SEGMENTS = 8192  # of a graph of which results are recomputed to gain time: with more, trying takes minutes
_NEAR = 1.15  # predicted times within this factor of the best may win
_LARGEST_ERROR = {torch.float32: 1e-3, torch.float64: 1e-6}  # of a whole model, relative; otherwise
_LARGEST_ERROR_OF_HALVES = 5e-2
_ROUNDS = Rounds(2, 7, 4.0, warm_up_s=0.2, race=True)


@dataclass(frozen=True, slots=True)
class Fitted:
    """The schedule of a model for one input, with its measurements. Bytes are beside parameters, arguments and results.

    front: every plan worth having, from the least memory to the least time. whole_run: beside torch's own; None if it
    was not run. torch_bytes: the peak of the model's own call; None if it was not run. tuned: the choices for each
    convolution, by its name in the graph, as ``TunedModule.tuned``.
    """

    schedule: Schedule
    front: tuple[Plan, ...]
    budget_bytes: int | None
    time_s: float
    whole_run: Comparison | None
    torch_bytes: int | None
    tuned: Mapping[str, tuple[TunedProblem, ...]]

    @property
    def needed_bytes(self) -> int:
        return self.schedule.needed_bytes

    @property
    def runs_torchs(self) -> bool:
        """Whether the model runs as it is, since that is faster and within the budget."""
        if self.whole_run is None or self.torch_bytes is None or self.whole_run.speedup >= 1:
            return False
        return self.budget_bytes is None or self.torch_bytes <= self.budget_bytes

    @property
    def choices(self) -> dict[str, tuple[TunedProblem, ...]]:
        """``tuned``, with what runs in place, which may be another algorithm: its time in the graph decides."""
        as_it_is = "the model runs as it is, which is faster" if self.runs_torchs else None
        runs = grouped(  # of what is recomputed, several have one name
            (self.schedule.operators[index].name, "PyTorch" if algorithm is None else algorithm.name)
            for index, algorithm in self.schedule.algorithms.items()
        )
        return {
            name: tuple(
                replace(one, in_place=as_it_is or f"the graph runs {' and '.join(dict.fromkeys(runs[name]))}")
                for one in every
            )
            for name, every in self.tuned.items()
        }

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
        if self.runs_torchs:
            yield "the model runs as it is, which is faster"
            return
        operators, seen = self.schedule.operators, set[str]()
        for segment, of_segment in zip(self.schedule.plan.segments, self.schedule.segment_bytes(), strict=True):
            if isinstance(operators[segment.start], Input):
                continue
            first, last = operators[segment.start].name, operators[segment.stop - 1].name
            names = first if first == last else f"{first} to {last}"
            cut = segment.cut
            bands = f", {cut.bands} bands" + ("" if cut.keeps else ", rows computed again") if cut.bands > 1 else ""
            samples = f", {cut.samples} samples at once" if cut.samples < self.schedule.captured.samples else ""
            again = [one.name for one in operators[segment.start : segment.stop] if one.name in seen]
            seen.update(one.name for one in operators[segment.start : segment.stop])
            recomputed = f"; recomputed: {'; '.join(again)}" if again else ""
            yield f"  {names}: {format_bytes(of_segment)}{bands}{samples}{recomputed}"


@dataclass(frozen=True, slots=True)
class _Option:
    """A plan, with the graph for which it was made: the model's own, or one that recomputes some results."""

    captured: Captured
    graph: Graph
    plan: Plan


def fit_in_memory(model: nn.Module, sample_inputs: Sequence[Any], config: Config, progress: Progress) -> nn.Module:
    """Return a module that computes what the model computes within ``config.memory_budget``, for these inputs.

    Returns the model itself, with a warning, if its graph cannot be captured or computes something else.

    Raises ``InfeasibleError`` with the smallest budget that would do, ``InvalidInputError`` for a model in training
    mode, and the errors of ``tune``.
    """
    require_inference(model, "memory_budget")
    try:
        return _banded(model, sample_inputs, config, progress)
    except NotCapturedError as error:
        warn(f"the model runs as it is, without a memory budget: {error}")
        return model


def run_as_graph(
    model: nn.Module, sample_input: Any, config: Config, progress: Progress, why_not: str | None = None
) -> BandedModel | None:
    """Return a module that computes what the model computes, faster, for inputs of this shape on the CPU.

    Returns None if that is not faster; also, with a warning, if the model's graph cannot be captured or computes
    something else, for a model on another device, and if ``why_not`` says why it may not run as a graph.

    Raises ``InvalidInputError`` for a model in training mode, and the errors of ``tune``.
    """
    require_inference(model, "fuse")
    if (device := device_of_convolutions(model)).type != "cpu":
        why_not = f"it is on {device}"
    try:
        if why_not is not None:
            raise NotCapturedError(why_not)
        made = _banded(model, [sample_input], config, progress)
    except NotCapturedError as error:
        warn(f"the model is tuned, but does not run as a graph: {error}")
        return None
    return None if made.tuned_graphs.findings[0].runs_torchs else made


def require_inference(model: nn.Module, setting: str) -> None:
    """Raise ``InvalidInputError`` if a part of the model is in training mode. setting: the name of what needs it."""
    for name, module in model.named_modules():
        if is_training(module):
            raise InvalidInputError(
                f"{setting} is for inference, and {name or 'the model'} is in training mode: call model.eval() before, "
                f"or leave {setting} out"
            )


def _banded(model: nn.Module, sample_inputs: Sequence[Any], config: Config, progress: Progress) -> BandedModel:
    try:
        banded(Graphs(model, {}, are_valid=False))
    except (TypeError, ValueError) as error:
        raise NotCapturedError(str(error)) from error
    inputs = [sample if isinstance(sample, tuple) else (sample,) for sample in sample_inputs]
    with undisturbed(model), untouched:
        findings = [_fitted(model, arguments, config, progress) for arguments in inputs]
    schedules = (None if one.runs_torchs else one.schedule for one in findings)
    return banded(Graphs(model, dict(zip(map(signature_of, inputs), schedules, strict=True)), findings))


def _fitted(model: nn.Module, arguments: tuple[Any, ...], config: Config, progress: Progress) -> Fitted:
    """Return the fastest way to run a model within the budget, for arguments of one shape.

    After the time limit, what is not known is estimated, and the first plan that fits is compared with the model alone.
    """
    progress("capturing the graph", 0.0)
    captured, budget = capture(model, arguments), config.memory_budget_bytes
    limit_bytes = inf if budget is None else budget
    if not convolutions_of(captured.operators):
        raise NotCapturedError("it has no convolution of images")
    lean: list[Schedule] = []
    if budget is not None:
        progress("finding the smallest budget", 0.0)
        captured, least = _arranged(captured, model, config, budget, arguments)
        lean.append(least)
        if least.needed_bytes > budget:
            raise InfeasibleError(
                f"the memory budget is {exact_bytes(budget)}; with this input the model needs at least "
                f"{exact_bytes(least.needed_bytes)} for activations and workspace, beside parameters, the input and "
                f"the result",
                least.needed_bytes,
            )
    with machine_and_database(config, captured.device.type) as (machine, database):
        # Costs: of the convolutions' algorithms, by themselves and in place, and of the other operators
        timings = Timings(machine, database, config, progress)
        candidates: dict[str, TunedConvolution] = {}
        if captured.device.type == "cpu":  # elsewhere torch's own run
            candidates = tuned_convolutions(captured, config, machine, database, progress, timings)
            if candidates and _may_run_whole(captured):
                candidates = timed_in_place(captured, candidates, arguments, timings)
        of_bands, of_whole = chosen_costs(captured, candidates, timings)
        progress("measuring the other operators", 1.0)
        graph = solver_graph(captured, every_cost(captured, timings, of_bands), of_whole)

        # Plans: the fastest predicted within the budget, one of them with the algorithms that are fastest in its bands
        options = [_Option(captured, graph, plan) for plan in plans(graph)]
        fastest = options[-1]
        each = replace(fastest, plan=replace(fastest.plan, segments=each_by_itself(graph).segments))
        if budget is not None:  # results may be recomputed for its sake
            slowest_s, again = fastest.plan.time_s * _FAST_ENOUGH, list[_Option]()
            if sum(len(graph.starts(stop)) for stop in range(1, len(graph) + 1)) > _MOST_SEGMENTS:
                slowest_s = inf  # any plan within the budget will do
            for order in orders_within(graph, int(budget * _ARENA_SHARE), slowest_s):
                other, of_other = captured.in_order(order), in_order(graph, order)
                again += (_Option(other, of_other, plan) for plan in plans(of_other))
            options += [
                one for _, _, one in undominated((one.plan.memory_bytes, one.plan.time_s, one) for one in again)
            ]
        options.sort(key=lambda one: one.plan.time_s)

        # The model itself, if there is memory for it, and the contenders that compute what it computes
        expected: list[Any] = []  # its output
        torch_bytes, baseline_is, baseline = None, "the first", partial(model, *arguments)
        if config.confirm is not False and _may_run_whole(captured):
            baseline_is = type(model).__qualname__
            torch_bytes = _peak_bytes(baseline, expected, captured.device.type)
            correct_strides(captured.memories, expected[0])
        contenders = _contenders([each, *options], budget, arguments, expected)
        in_bands = (one for one in contenders if any(segment.cut.bands > 1 for segment in one.plan.segments))
        schedule = next(in_bands, None)
        if schedule is not None and candidates:
            progress("timing convolutions in bands", 1.0)
            offered = {
                index: [algorithm_named(of.micro_config.algorithm) for of in fastest_of(one, candidates[one.name])]
                for index, one in convolutions_of(schedule.operators).items()
            }
            found = refined(schedule, offered, arguments, limit_bytes, timings)
            if found is not schedule:
                with suppress(NotCapturedError):  # it gives other values
                    _count(arguments, found, expected)
                    if found.needed_bytes <= limit_bytes:
                        contenders.append(found)
        contenders = contenders[: 1 if timings.left_s <= 0 else None]
        for schedule in lean if not contenders else ():
            _count(arguments, schedule, expected)
            contenders.append(schedule)

        # The choice: calls in turns, beside the model itself if it was run
        runs = [partial(one.run, arguments) for one in contenders]
        progress("running the model", 1.0)
        what = f"calls in turns: {digest(f'{baseline_is} {[schedule_key(one) for one in contenders]}')}"
        with torch.no_grad():
            results = timings.compared(what, baseline if expected else runs[0], runs, _ROUNDS)
    index, run = min(results.items(), key=lambda item: item[1].time_s)
    contenders[index].forget_other_filters()
    contenders[index].budget_bytes = limit_bytes
    front = undominated((one.plan.memory_bytes, one.plan.time_s, one.plan) for one in options)
    return Fitted(
        contenders[index],
        tuple(plan for _, _, plan in front),
        budget,
        run.time_s,
        None if torch_bytes is None else run,
        torch_bytes,
        {name: (of.tuned,) for name, of in candidates.items()},
    )


def _contenders(
    options: Sequence[_Option], budget: int | None, arguments: tuple[Any, ...], expected: Sequence[Any]
) -> list[Schedule]:
    """Return the schedules to run whole: the fastest predicted within the budget, and others that may be faster.

    Those that do not give what is ``expected`` are left out. Raises ``NotCapturedError`` if none is left then.
    """
    most = inf if budget is None else 2 * budget  # predictions are not exact
    ready: list[Schedule] = []
    failure: NotCapturedError | None = None
    for option in options:
        predicted = option.plan.memory_bytes
        if predicted > most:
            continue
        limit_bytes = inf if budget is None or predicted > budget else budget
        schedule = Schedule(option.captured, option.graph, option.plan, limit_bytes)
        if budget is not None and schedule.needed_bytes > budget:
            if limit_bytes == budget:  # the integer program failed, and would for a plan that needs as much
                most = predicted * 0.98
            continue
        if ready and (schedule.plan.time_s > ready[0].plan.time_s * _NEAR or len(ready) == _CONTENDERS):
            break
        if any(_are_alike(schedule, other) for other in ready):
            continue
        try:
            _count(arguments, schedule, expected)
        except NotCapturedError as error:
            failure = error
            continue
        if budget is None or schedule.needed_bytes <= budget:
            ready.append(schedule)
    if failure is not None and not ready:
        raise failure
    return ready


def _count(arguments: tuple[Any, ...], schedule: Schedule, expected: Sequence[Any] = ()) -> None:
    """Run a schedule, and count what it needs. expected: the model's output, if it is known.

    Raises ``NotCapturedError`` if the schedule fails, or gives another output.
    """
    try:
        result = schedule.count(arguments)
    except MucudnnError:
        raise
    except Exception as error:  # torch's operators may raise anything
        raise_interruption(error)
        raise NotCapturedError(f"its graph raises {type(error).__name__}: {first_line(error)}") from error
    for output in expected:
        _require_right(result, output)


@torch.no_grad()
def _peak_bytes(call: Callable[[], Any], output: list[Any], device_type: str) -> int:
    """Return the bytes that a call allocates at its peak, beside its output, which is appended to ``output``."""
    peak = peak_allocated_bytes(lambda: output.append(call()), device_type)
    return peak - sum(leaf.nbytes for leaf in tree_leaves(output) if isinstance(leaf, Tensor))


def _may_run_whole(captured: Captured) -> bool:
    """Return whether half of the free memory is enough for all activations at once."""
    every = sum(
        one.nbytes if isinstance(one, Barrier) else prod(one.shape) * one.dtype.itemsize for one in captured.operators
    )
    return is_free(every, captured.device)


def _require_right(found: Any, expected: Any) -> None:
    """Raise ``NotCapturedError`` if a schedule's results are not those of the model.

    The relative L2 error of tensors is bounded; numbers that are not finite must be in the same places.
    """
    for ours, theirs in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        if isinstance(theirs, Tensor) and theirs.is_floating_point():
            error = inf
            if torch.equal(ours.isfinite(), theirs.isfinite()):
                own, exact = (torch.nan_to_num(one.double(), 0, 0, 0) for one in (ours, theirs))
                norm = float(torch.linalg.vector_norm(exact))
                error = float(torch.linalg.vector_norm(own - exact)) / (norm or 1.0)
            bound = _LARGEST_ERROR.get(theirs.dtype, _LARGEST_ERROR_OF_HALVES)
            if not error <= bound:
                raise NotCapturedError(f"its graph gives other values, with a relative error of {error:.1e}")
        elif not (torch.equal(ours, theirs) if isinstance(theirs, Tensor) else ours == theirs):
            raise NotCapturedError("its graph gives other values")


def _are_alike(first: Schedule, second: Schedule) -> bool:
    """Return whether two schedules run nearly all operators in the same number of bands, by the same algorithms."""
    if len(first.operators) != len(second.operators):
        return False
    cuts = (
        [(one.cut.bands, one.cut.variant) for one in schedule.plan.segments for _ in range(one.start, one.stop)]
        for schedule in (first, second)
    )
    differ: int = sum(map(ne, *cuts))
    return differ <= _FEW_OPERATORS * len(first.operators)


# The schedule of a graph that needs the fewest bytes, found without a timing: the same in every process


@dataclass(frozen=True, slots=True)
class _Estimated:
    """A copy of a graph, whose convolutions have the algorithms of ``_least_costs``, and its plans with these costs."""

    captured: Captured
    graph: Graph
    front: tuple[Plan, ...]

    def seconds(self, budget_bytes: int) -> float:
        """Return the seconds of the fastest plan within the budget that recomputes nothing, or infinity."""
        within = (one.time_s for one in self.front if one.memory_bytes <= budget_bytes * _ARENA_SHARE)
        return min(within, default=inf)


def _estimated(captured: Captured, config: Config) -> _Estimated:
    captured = captured.in_order(range(len(captured.operators)))
    graph = solver_graph(captured, _least_costs(captured, config), {})
    return _Estimated(captured, graph, plans(graph))


def _arranged(
    frames_first: Captured, model: nn.Module, config: Config, budget_bytes: int, arguments: tuple[Any, ...]
) -> tuple[Captured, Schedule]:
    """Return the graph whose bands of volumes have some frames, or some rows of all frames, with its leanest schedule.

    Rows if they are estimated to be faster within the budget, or if frames do not fit into it.
    """
    of_frames = _estimated(frames_first, config)
    have_frames = any(len(one.shape) == 5 and one.rows > 1 for one in frames_first.operators)
    if not have_frames or of_frames.seconds(budget_bytes) <= of_frames.front[-1].time_s * _FAST_ENOUGH:
        return frames_first, _leanest(of_frames, budget_bytes, arguments)
    rows_first = capture(model, arguments, puts_rows_first=True)
    of_rows = _estimated(rows_first, config)
    found: list[tuple[int, int, Captured, Schedule]] = []
    every = enumerate(((frames_first, of_frames), (rows_first, of_rows)))
    for index, (captured, estimated) in sorted(every, key=lambda one: one[1][1].seconds(budget_bytes)):
        schedule = _leanest(estimated, budget_bytes, arguments)
        found.append((schedule.needed_bytes, index, captured, schedule))
        if schedule.needed_bytes <= budget_bytes:
            break
    *_, captured, schedule = min(found, key=lambda one: one[:2])
    return captured, schedule


def _leanest(estimated: _Estimated, budget_bytes: int, arguments: tuple[Any, ...]) -> Schedule:
    """Return a schedule within the budget; if there is none, the one that needs the fewest bytes.

    It depends on the graph, on the bytes that algorithms and torch's operators need on this kind of machine, and on the
    algorithms and the cache budget of the config. What it needs is counted by running it, if it is near the budget.
    """
    captured, graph = estimated.captured, estimated.graph
    best = Schedule(captured, graph, estimated.front[0])
    if best.needed_bytes * _MARGIN <= budget_bytes:
        return best
    best = _least(captured, graph, estimated.front)
    if best.needed_bytes * _MARGIN > budget_bytes:
        _count(arguments, best)
    while best.needed_bytes > budget_bytes:
        goal = int(best.needed_bytes * _NEXT)
        orders = list(orders_within(graph, int(goal * _ARENA_SHARE), inf))
        found = best
        if orders:
            of_order = in_order(graph, orders[-1])
            found = _least(captured.in_order(orders[-1]), of_order, plans(of_order))
        if found.needed_bytes < best.needed_bytes:
            _count(arguments, found)
        if found.needed_bytes >= best.needed_bytes:
            break
        best = found
    return best


def _least(captured: Captured, graph: Graph, front: tuple[Plan, ...]) -> Schedule:
    least = front[:_LEAST_PLANS]
    tried = dict.fromkeys([*least, *(closer(graph, plan) for plan in least)])
    schedules = (Schedule(captured, graph, plan, 0) for plan in tried)
    return min(schedules, key=lambda one: one.needed_bytes)


def _least_costs(captured: Captured, config: Config) -> dict[int, tuple[Costs, ...]]:
    """Return the bytes of all operators, after each convolution has two algorithms: the leanest of ours, and torch's.

    Ours are the algorithms that run bands, and add up the same products as torch's own: no errors are measured here.
    Seconds are those of a made-up processor.
    """
    known: dict[str, Costs] = {}
    costs: dict[int, tuple[Costs, ...]] = {}
    named = [one for one in algorithms() if config.algorithms is None or one.name in config.algorithms]
    for index, one in enumerate(captured.operators):
        made_up = estimated_costs(one)
        bytes_of_torch = operator_costs(captured, index, None, known)
        of_torch = replace(bytes_of_torch, call_s=made_up.call_s, row_s=made_up.row_s)
        costs[index] = (of_torch,)
        if not isinstance(one, Convolution):
            continue
        one.keeps = config.cache_budget_bytes is None
        offered = []
        for algorithm in named:
            runs = not algorithm.is_last_resort and runs_bands(algorithm.name, one.problem)
            if runs and algorithm.is_local(one.problem):
                prepared = one.prepared_bytes(algorithm)
                scratch = scratch_bytes(one, algorithm, band_rows(one))
                own = replace(made_up, scratch_bytes=scratch, prepared_bytes=prepared)
                offered.append((own, algorithm))
        ours = min(offered, key=lambda of: of[0].prepared_bytes + of[0].scratch_bytes, default=(of_torch, None))
        one.pairs = AlgorithmPair(ours[1], ours[1]), AlgorithmPair()
        costs[index] = ours[0], of_torch
    return costs
