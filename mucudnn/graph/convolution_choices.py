"""The algorithms of a graph's convolutions, of all rows and of bands, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, prod
from statistics import mean, median
from typing import Any, TypeAlias

from mucudnn.core.answers import TunedProblem
from mucudnn.core.config import Config
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Measurement, MicroConfig, Task
from mucudnn.core.terminal import Progress
from mucudnn.core.torch_settings import TORCHS_OWN
from mucudnn.graph.costs import (
    CALL_S,
    Seconds,
    Timings,
    convolution_costs,
    digest,
    graph_key,
    named,
    operator_costs,
    schedule_key,
)
from mucudnn.graph.operators import Captured
from mucudnn.graph.schedule import Schedule, solver_graph
from mucudnn.graph.windows import AlgorithmPair, Convolution, convolutions_of
from mucudnn.kernels.algorithm import Algorithm, why_unsupported
from mucudnn.kernels.memory import aligned_buffer
from mucudnn.kernels.registry import algorithm as algorithm_named
from mucudnn.kernels.registry import algorithms
from mucudnn.measuring.turns import Rounds
from mucudnn.measuring.whole_runs import Machine
from mucudnn.solver.bands import Costs, Cut, Graph, Segment
from mucudnn.solver.plans import Plan
from mucudnn.store.database import Database
from mucudnn.tuning.tuner import tune_tasks

_BAND_ROWS = 24  # of the bands on which convolutions are measured: whole tiles of every Winograd algorithm
_BAND_FRAMES = 4  # of volumes
_SHARES = 1.0, 0.35, 0.0  # of the fastest algorithm's prepared filter, which the algorithms of each variant may have
_CANDIDATES = 4  # of each convolution, beside the one with the smallest buffers
_LONGEST_IN_PLACE_S = 0.3  # of a call: in longer ones, overheads do not matter
_IN_PLACE, _IN_BANDS = Rounds(2, 9, 3.0), Rounds(1, 3, 4.0)
_Costs: TypeAlias = dict[int, tuple[Costs, ...]]  # of operators by index, of each variant
_Variant: TypeAlias = tuple[Measurement | None, Measurement | None]  # of all rows, of bands; None for torch's own


@dataclass(frozen=True, slots=True)
class TunedConvolution:
    """What was measured of a convolution of a graph: what may compute it, beside torch's own.

    tuned: the choice for its problem, or for a band of it, with everything that was measured. ours: the measurements of
    our algorithms that run bands. in_place: seconds of all rows in calls of the whole graph, by algorithm, None for
    torch's own; ``ours`` has them as well. Empty if these were not timed.
    """

    tuned: TunedProblem
    ours: tuple[Measurement, ...]
    in_place: Mapping[str | None, float] = field(default_factory=dict)


def tuned_convolutions(
    captured: Captured, config: Config, machine: Machine, database: Database, progress: Progress, timings: Timings
) -> dict[str, TunedConvolution]:
    """Tune the convolutions of a graph, and return what may compute each, by name; nothing if no algorithm runs bands.

    Only algorithms that run bands are measured, and torch's own; bands, of convolutions whose tensors alone exceed the
    budget. Then filters are kept where that saves the most.
    """
    convolutions, n, budget = convolutions_of(captured.operators), captured.samples, config.memory_budget_bytes
    problems = {one.problem: one for one in convolutions.values()}
    names = [one.name for one in algorithms()] if config.algorithms is None else config.algorithms
    names = [name for name in names if any(runs_bands(name, problem) for problem in problems)]
    if not names:
        return {}
    tuning = replace(
        config,
        algorithms=tuple(names),
        operations=tuple(Operation),
        memory_budget=None,
        workspace_limit=None if config.has_headroom_limit else config.workspace_limit,
        workspace_budget=None,
    )
    task_of: dict[ConvProblem, Task] = {}
    for problem, one in problems.items():
        measured, samples = problem, n
        of_tensors = sum(map(prod, (problem.x_shape(n), problem.y_shape(n)))) * problem.item_bytes
        if budget is not None and of_tensors > budget:
            of_band = band_problem(problem, band_rows(one))
            measured, samples = (problem, n) if of_band is None else (of_band, 1)
        limit, exempt = tuning.workspace_limit_bytes, config.baseline_exempt
        task_of[problem] = Task(measured, samples, limit, name=str(measured), baseline_exempt=exempt)
    tasks = list(dict.fromkeys(task_of.values()))
    found = tune_tasks(tasks, tuning, progress=progress, machine=machine, database=database)
    tuned = dict(zip(tasks, found.problems, strict=True))
    for index, one in convolutions.items():
        task = task_of[one.problem]
        more = _leanest(captured, index, tuned[task], names, timings)
        tuned[task] = replace(tuned[task], measurements=(*tuned[task].measurements, *more))
    candidates: dict[str, TunedConvolution] = {}
    for one in convolutions.values():
        of_task = tuned[task_of[one.problem]]
        whole = [of for of in of_task.allowed_measurements if of.micro_config.micro_batch_size == of_task.batch_size]
        ours = [of for of in whole if runs_bands(of.micro_config.algorithm, one.problem)]
        if of_task.problem == one.problem and one.rows < _rows(
            one.problem
        ):  # fewer are padded below than were measured
            ours = [replace(of, step_s=of.step_s * one.rows / _rows(one.problem)) for of in ours]
        candidates[one.name] = TunedConvolution(of_task, tuple(ours))
    return with_kept_filters(convolutions.values(), candidates, config.cache_budget_bytes)


def _leanest(
    captured: Captured, index: int, tuned: TunedProblem, names: Iterable[str], timings: Timings
) -> list[Measurement]:
    """Measure the algorithms with the smallest prepared filters too, which tuning drops where others are faster.

    Their times are extrapolated from bands. They add up the same products as torch's own convolution, and count as
    precise as that. names: of algorithms.
    """
    weight, problem, clock = convolutions_of(captured.operators)[index].weight, tuned.problem, timings.machine.clock
    errors = {of.micro_config.algorithm: of.relative_error for of in tuned.measurements}
    failed = {of.micro_config.algorithm for of in tuned.failures if not of.is_passed_over}
    every = [algorithm_named(name) for name in sorted(names)]
    offered = [of for of in every if not of.is_last_resort and runs_bands(of.name, problem)]
    least = min((of.workspace(problem, 1).prepared_bytes for of in offered), default=0)
    found = []

    def timed_twice(call: Callable[[], object]) -> Seconds:
        return [[clock.time(call, 1) for _ in range(2)]]

    for algorithm in offered:
        is_known = algorithm.name in errors or algorithm.name in failed
        if is_known or algorithm.workspace(problem, 1).prepared_bytes > least:
            continue
        needed = algorithm.workspace(problem, tuned.batch_size)
        opened = partial(algorithm.open, problem, weight, aligned_buffer(needed.prepared_bytes))
        setup = timings.of(f"filter prepared by {named(algorithm)}: {problem!r}", partial(timed_twice, opened))
        costs = convolution_costs(captured, index, algorithm, timings)
        if setup is None or costs is None:  # there is no time for it
            continue
        found.append(
            Measurement(
                MicroConfig(algorithm.name, tuned.batch_size),
                setup_s=min(setup[0]),
                step_s=costs.seconds(_rows(problem) * tuned.batch_size),
                prepared_bytes=needed.prepared_bytes,
                scratch_bytes=needed.scratch_bytes,
                relative_error=errors.get(TORCHS_OWN, 0.0),
            )
        )
    return found


def with_kept_filters(
    convolutions: Iterable[Convolution], candidates: Mapping[str, TunedConvolution], budget: int | None
) -> dict[str, TunedConvolution]:
    """Keep prepared filters between calls where they save the most time for each byte of the cache budget.

    Returns the candidates without those whose filters have no room: convolutions that are computed again may have other
    algorithms than the first time, and all of their filters are kept.
    """
    left, found = inf if budget is None else budget, []
    for number, one in enumerate(convolutions):
        one.keeps = False
        if ours := candidates[one.name].ours:
            kept = min(ours, key=lambda of: of.step_s)
            saved_s = min(of.setup_s + of.step_s for of in ours) - kept.step_s
            found.append((-saved_s / (kept.prepared_bytes or 1), number, kept.prepared_bytes, one))
    for _, _, size, one in sorted(found, key=lambda each: each[:2]):
        one.keeps = size <= left
        left -= size if one.keeps else 0
    within = dict(candidates)
    for one in (one for *_, one in found if one.keeps):
        fastest, *others = sorted(candidates[one.name].ours, key=lambda of: of.step_s)
        offered = [fastest]
        for of in others:
            if of.prepared_bytes <= left:
                left -= of.prepared_bytes
                offered.append(of)
        within[one.name] = replace(candidates[one.name], ours=tuple(offered))
    return within


def timed_in_place(
    captured: Captured, candidates: dict[str, TunedConvolution], arguments: tuple[Any, ...], timings: Timings
) -> dict[str, TunedConvolution]:
    """Time the fastest algorithms, and torch's own, in calls of the graph, and return the candidates with these times.

    Returns what is given where calls are long, and where some were measured on bands, since their tensors are larger
    than the budget.
    """
    convolutions = convolutions_of(captured.operators)
    if any(candidates[one.name].tuned.problem != one.problem for one in convolutions.values()):
        return candidates
    fastest = {index: fastest_of(one, candidates[one.name]) for index, one in convolutions.items()}
    if sum(_seconds(convolutions[index], of[0]) for index, of in fastest.items() if of) > _LONGEST_IN_PLACE_S:
        return candidates
    offered = {index: (*map(_algorithm_of, of), None) for index, of in fastest.items()}
    timed = [(index, variant) for index, of in offered.items() for variant in range(len(of))]

    def schedules() -> list[Schedule]:
        for index, of in offered.items():
            convolutions[index].pairs = tuple(AlgorithmPair(one, one) for one in of)
        graph = solver_graph(captured, dict.fromkeys(range(len(captured.operators)), (Costs(),)), {})
        variants = range(max(map(len, offered.values())))
        return [Schedule(captured, graph, each_by_itself(graph, variant)) for variant in variants]

    names = [(convolutions[index].keeps, [named(one) for one in of]) for index, of in offered.items()]
    what = f"convolutions in place: {digest(f'{graph_key(captured)} {names}')}"
    samples = timings.in_calls(what, schedules, arguments, timed, _IN_PLACE)
    for one in convolutions.values():
        one.forget()
    if samples is None:
        return candidates
    seconds: dict[ConvProblem, dict[str | None, list[float]]] = {}
    for (index, variant), of_one in zip(timed, samples, strict=True):
        one, measured = convolutions[index], [*fastest[index], None][variant]
        setup_s = 0.0 if measured is None or one.keeps else measured.setup_s
        name = None if measured is None else measured.micro_config.algorithm
        of_problem = seconds.setdefault(one.problem, {})
        of_problem.setdefault(name, []).extend(max(time_s - setup_s, 0.0) for time_s in of_one)
    found = {}
    for one in convolutions.values():
        in_place = {name: median(of_one) for name, of_one in seconds[one.problem].items()}
        known = candidates[one.name]
        ours = (replace(of, step_s=in_place.get(of.micro_config.algorithm, of.step_s)) for of in known.ours)
        found[one.name] = TunedConvolution(known.tuned, tuple(ours), in_place)
    return found


def chosen_costs(
    captured: Captured, candidates: Mapping[str, TunedConvolution], timings: Timings
) -> tuple[_Costs, _Costs]:
    """Choose each convolution's algorithms, and return the costs of the convolutions: in bands, and of all rows.

    candidates: by name; torch's own run where there are none.
    """
    in_bands: _Costs = {}
    whole: _Costs = {}
    of_kind: dict[str, Costs] = {}
    for index, one in convolutions_of(captured.operators).items():
        of_torch = operator_costs(captured, index, timings, of_kind)
        one.pairs, in_bands[index], whole[index] = (AlgorithmPair(),), (of_torch,), (of_torch,)
        if one.name not in candidates:
            continue
        known = candidates[one.name]
        band_costs = partial(_band_costs, captured, index, known.tuned.problem, timings)
        variants = _variants(one, known, of_torch, captured.samples, band_costs)
        one.pairs = tuple(AlgorithmPair(*map(_algorithm_of, variant)) for variant in variants)
        in_bands[index] = tuple(
            of_torch if of is None else _with_buffers(one, of, band_rows(one), band_costs(of)) for _, of in variants
        )
        of_variants = []
        for of, _ in variants:
            costs = of_torch
            if of is not None:
                row_s = of.step_s / of.micro_config.micro_batch_size / one.rows
                if len(one.sources) > 1 and of.micro_config.algorithm not in known.in_place:
                    row_s = max(row_s, band_costs(of).row_s)  # it was tuned without the addition
                costs = _with_buffers(one, of, one.rows, Costs(row_s=row_s))
            of_variants.append(costs)
        whole[index] = tuple(of_variants)
    return in_bands, whole


def _variants(
    one: Convolution, known: TunedConvolution, of_torch: Costs, samples: int, band_costs: Callable[[Measurement], Costs]
) -> tuple[_Variant, ...]:
    """Return what computes all rows, and bands: the fastest, and ever smaller prepared filters."""
    ours = in_bands = fastest_of(one, known)
    if one.rows > 1:
        in_bands = [replace(of, step_s=band_costs(of).seconds(band_rows(one))) for of in ours]
    torchs_s = known.in_place.get(None, of_torch.seconds(samples * one.rows))
    found: list[_Variant] = []
    for share in _SHARES:
        whole = _best(one, ours, torchs_s, share) if known.tuned.problem == one.problem else None
        found.append((whole, _best(one, in_bands, of_torch.seconds(band_rows(one)), share)))
    if one.rows == one.problem.extent[0] == 1 and not one.keeps:
        found.append((None, None))  # the filters of a linear layer are as large as prepared ones
    return tuple(dict.fromkeys(found))


def fastest_of(one: Convolution, candidates: TunedConvolution) -> list[Measurement]:
    """Return the fastest algorithms of a convolution, and the one with the smallest buffers."""
    ours = sorted(candidates.ours, key=lambda of: (_seconds(one, of), of.micro_config))
    smallest = min(ours, key=_size, default=None)
    return [of for number, of in enumerate(ours) if number < _CANDIDATES - 1 or of is smallest]


def _band_costs(captured: Captured, index: int, problem: ConvProblem, timings: Timings, of: Measurement) -> Costs:
    """Return the costs of bands by a measured algorithm; those of all rows, if there is no time to measure.

    problem: that was measured.
    """
    costs = convolution_costs(captured, index, algorithm_named(of.micro_config.algorithm), timings)
    return costs or Costs(call_s=CALL_S, row_s=of.step_s / of.micro_config.micro_batch_size / _rows(problem))


def _with_buffers(one: Convolution, of: Measurement, rows: int, costs: Costs) -> Costs:
    scratch = scratch_bytes(one, algorithm_named(of.micro_config.algorithm), rows)
    if one.keeps:
        return replace(costs, scratch_bytes=scratch)
    return replace(costs, setup_s=of.setup_s, scratch_bytes=scratch, prepared_bytes=of.prepared_bytes)


def band_rows(one: Convolution) -> int:
    """Return the rows, or frames, of the bands on which a convolution is measured."""
    return min(_BAND_FRAMES if one.problem.is_volume else _BAND_ROWS, one.rows)


def scratch_bytes(one: Convolution, algorithm: Algorithm, rows: int) -> int:
    """Return the scratch bytes of a call for so many rows."""
    stride = one.problem.stride[0]
    of_x = max((rows - one.extent) // stride + 1, 1) if one.is_transposed else (rows - 1) * stride + one.extent
    made = algorithm.band(one.problem, 1, (rows, of_x) if one.is_transposed else (of_x, rows), 0)
    assert made is not None
    return made[1].scratch_bytes


def _rows(problem: ConvProblem) -> int:
    """Return the rows, or frames, of the result."""
    return (problem.extent if problem.operation is Operation.BACKWARD_DATA else problem.positions)[0]


def _seconds(one: Convolution, of: Measurement) -> float:
    return of.step_s if one.keeps else of.setup_s + of.step_s


def _size(of: Measurement) -> tuple[float, float]:
    return of.prepared_bytes + of.scratch_bytes, of.step_s


def each_by_itself(graph: Graph, variant: int = 0) -> Plan:
    """Return the plan that computes each operator as a whole, one after another, whose costs are not known."""
    segments = (Segment(index, index + 1, Cut(graph.samples, 1, variant=variant)) for index in range(len(graph)))
    return Plan(0, 0.0, tuple(segments))


def _best(one: Convolution, ours: Sequence[Measurement], torchs_s: float, share: float) -> Measurement | None:
    """Return the fastest of our algorithms; None if torch's own is faster, or there is none of ours.

    torchs_s: seconds that torch's own takes for the same rows. share: the largest prepared filter, as a share of the
    fastest algorithm's; below 1 torch's own is not considered. If all are larger, the smallest.
    """
    seconds = partial(_seconds, one)
    best = min(ours, key=seconds, default=None)
    if best is None:
        return None
    if share == 1:
        return None if torchs_s < 0.9 * seconds(best) else best
    smaller = [of for of in ours if of.prepared_bytes <= share * best.prepared_bytes]
    smallest = min(ours, key=_size)
    return min(smaller, key=seconds, default=smallest)


def _algorithm_of(measured: Measurement | None) -> Algorithm | None:
    return None if measured is None else algorithm_named(measured.micro_config.algorithm)


def runs_bands(name: str, problem: ConvProblem) -> bool:
    """Return whether an algorithm computes bands of a problem on the CPU."""
    algorithm = algorithm_named(name)
    if algorithm.device_type != "cpu" or why_unsupported(algorithm, problem) is not None:
        return False
    return algorithm.band(problem, 1, (problem.extent[0], problem.positions[0]), problem.padding[0]) is not None


def band_problem(problem: ConvProblem, rows: int) -> ConvProblem | None:
    """Return the problem of a band of ``rows`` rows of the result, from the middle of the image; None for all rows."""
    is_transposed = problem.operation is Operation.BACKWARD_DATA
    if rows >= _rows(problem):
        return None
    extent, padding = problem.dilation[0] * (problem.window[0] - 1) + 1, (0, *problem.padding[1:])
    height = max(rows, extent) if is_transposed else (rows - 1) * problem.stride[0] + extent
    d, h = (height, problem.h) if problem.is_volume else (0, height)
    return replace(problem, d=d, h=h, padding=padding)


# Again, in the bands of a schedule


def refined(
    schedule: Schedule,
    candidates: Mapping[int, Sequence[Algorithm]],
    arguments: tuple[Any, ...],
    limit_bytes: float,
    timings: Timings,
) -> Schedule:
    """Return the schedule with the fastest of the candidates for each convolution, which are timed in whole calls.

    candidates: of each convolution, by its index in ``schedule.operators``. Convolutions of the same problem with the
    same candidates that run in as many bands have the same algorithm. The schedule itself is returned where the other
    would need more than ``limit_bytes``, and where there is no time to measure.
    """
    own, convolutions = schedule.algorithms, convolutions_of(schedule.operators)
    cuts = {index: one.cut for one in schedule.plan.segments for index in range(one.start, one.stop)}
    kinds = {
        index: (one.problem, len(one.sources), cuts[index], one.keeps, *candidates[index])
        for index, one in convolutions.items()
    }
    offered = {index: [own[index], *(one for one in candidates[index] if one is not own[index])] for index in kinds}
    timed = [(index, number) for index, of in offered.items() for number in range(len(of))]

    def trials() -> list[Schedule]:
        variants = range(max(map(len, offered.values()), default=0))
        of_each = [{index: of[min(number, len(of) - 1)] for index, of in offered.items()} for number in variants]
        return [_schedule_with(schedule, algorithms) for algorithms in of_each]

    names = [[named(one) for one in of] for of in offered.values()]
    what = f"convolutions in bands: {digest(f'{schedule_key(schedule)} {names}')}"
    samples = timings.in_calls(what, trials, arguments, timed, _IN_BANDS)
    if samples is None:
        return schedule
    seconds: dict[object, dict[Algorithm | None, list[float]]] = {kind: {} for kind in kinds.values()}
    for (index, number), of_one in zip(timed, samples, strict=True):
        seconds[kinds[index]].setdefault(offered[index][number], []).extend(of_one)
    fastest = {kind: min(of, key=lambda one: mean(of[one])) for kind, of in seconds.items()}
    found = _schedule_with(schedule, {index: fastest[kind] for index, kind in kinds.items()}, limit_bytes)
    return found if found.needed_bytes <= limit_bytes else schedule


def _schedule_with(
    schedule: Schedule, algorithms: Mapping[int, Algorithm | None], limit_bytes: float = inf
) -> Schedule:
    """Return the schedule with other algorithms of its convolutions, which become another variant of the cuts."""
    convolutions = convolutions_of(schedule.operators)
    known = max(len(one.pairs) for one in convolutions.values())
    for index, one in convolutions.items():
        padding = (one.pairs[-1],) * (known - len(one.pairs))
        one.pairs = (*one.pairs, *padding, AlgorithmPair(algorithms[index], algorithms[index]))
    segments = (replace(one, cut=replace(one.cut, variant=known)) for one in schedule.plan.segments)
    return Schedule(schedule.captured, schedule.graph, replace(schedule.plan, segments=tuple(segments)), limit_bytes)
