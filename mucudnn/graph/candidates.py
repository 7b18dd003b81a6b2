"""The algorithms that may compute a graph's convolutions, of all rows and in bands, and what they take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from math import inf, prod
from statistics import mean, median
from typing import Any

from mucudnn.core.answers import TunedProblem
from mucudnn.core.config import Config
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Measurement, MicroConfig, Task
from mucudnn.core.terminal import Progress
from mucudnn.core.torch_settings import TORCHS_OWN
from mucudnn.graph.costed import CostedGraph, Variants, each_by_itself, solver_graph
from mucudnn.graph.costs import (
    convolution_costs,
    digest,
    graph_key,
    named,
    schedule_key,
)
from mucudnn.graph.operators.convolution import Convolution, convolutions_of
from mucudnn.graph.operators.operator import Captured
from mucudnn.graph.schedule import Schedule
from mucudnn.kernels import registry
from mucudnn.kernels.algorithm import Algorithm, why_unsupported
from mucudnn.kernels.memory import aligned_buffer
from mucudnn.measuring.timings import Seconds, Timings
from mucudnn.measuring.turns import Rounds
from mucudnn.measuring.whole_runs import Machine
from mucudnn.solver.plans import Plan
from mucudnn.store.database import Database
from mucudnn.tuning.tuner import tune_tasks

_BAND_ROWS = 24  # of the bands on which convolutions are measured: whole tiles of every Winograd algorithm
_BAND_FRAMES = 4  # of volumes
_CANDIDATES = 4  # of each convolution, beside the one with the smallest buffers
_LONGEST_IN_PLACE_S = 0.3  # of a call: in longer ones, overheads do not matter
_IN_PLACE, _IN_BANDS = Rounds(2, 9, 3.0), Rounds(1, 3, 4.0)


class Place(Enum):
    """Where an algorithm was measured."""

    TUNING = "the whole convolution by itself"
    BAND = "a band of it by itself"
    GRAPH = "the whole convolution in calls of the graph"


@dataclass(frozen=True, slots=True)
class Choice:
    """An algorithm that may compute a convolution.

    algorithm: None for torch's own.
    seconds: of ``rows`` rows, those of all samples together, with a prepared filter.
    setup_s: seconds that preparing the filter takes.
    prepared_bytes: of the prepared filter.
    scratch_bytes: of a call for all rows.
    place: where it was measured.
    """

    algorithm: Algorithm | None
    seconds: float
    rows: int
    setup_s: float = 0.0
    prepared_bytes: int = 0
    scratch_bytes: int = 0
    place: Place = Place.TUNING

    def call_s(self, *, is_kept: bool) -> float:
        """Return the seconds of a call. is_kept: whether the prepared filter is kept between calls."""
        return self.seconds if is_kept else self.setup_s + self.seconds


Choices = Mapping[int, Sequence[Choice]]  # by index of a convolution


# By themselves: tuning


def tuned_problems(
    captured: Captured,
    config: Config,
    machine: Machine,
    database: Database,
    progress: Progress,
    timings: Timings,
    *,
    in_bands: bool = False,
) -> dict[int, TunedProblem]:
    """Tune the convolutions of a graph, and return what was measured, by index; nothing if no algorithm runs bands.

    Only algorithms that run bands are measured, and torch's own; bands, of convolutions whose tensors alone exceed the
    memory budget.

    in_bands: whether bands of all convolutions are measured, for lack of memory.
    """
    convolutions, n, budget = convolutions_of(captured.operators), captured.samples, config.memory_budget_bytes
    problems = {convolution.problem: convolution for convolution in convolutions.values()}
    names = [algorithm.name for algorithm in registry.algorithms()] if config.algorithms is None else config.algorithms
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

    # What is measured: the whole problem, or a band of it
    task_of: dict[ConvProblem, Task] = {}
    for problem, convolution in problems.items():
        measured, samples = problem, n
        tensor_bytes = sum(map(prod, (problem.x_shape(n), problem.y_shape(n)))) * problem.item_bytes
        band = band_problem(problem, band_rows(convolution))
        if band is not None and (in_bands or (budget is not None and tensor_bytes > budget)):
            measured, samples = band, 1
        limit, exempt = tuning.workspace_limit_bytes, config.baseline_exempt
        task_of[problem] = Task(measured, samples, limit, name=str(measured), baseline_exempt=exempt)
    tasks = list(dict.fromkeys(task_of.values()))
    results = tune_tasks(tasks, tuning, progress=progress, machine=machine, database=database).problems
    tuned = dict(zip(tasks, results, strict=True))

    # The algorithms with the smallest filters, which tuning drops where others are faster
    for index, convolution in convolutions.items():
        task = task_of[convolution.problem]
        smallest = _with_smallest_filters(captured, index, tuned[task], names, timings)
        tuned[task] = replace(tuned[task], measurements=(*tuned[task].measurements, *smallest))
    return {index: tuned[task_of[convolution.problem]] for index, convolution in convolutions.items()}


def _with_smallest_filters(
    captured: Captured, index: int, tuned: TunedProblem, names: Sequence[str], timings: Timings
) -> list[Measurement]:
    """Measure the algorithms with the smallest prepared filters that have no measurements.

    Their times are extrapolated from bands. They add up the same products as torch's own convolution, and count as
    precise as that.

    names: of algorithms.
    """
    weight, problem, clock = convolutions_of(captured.operators)[index].weight, tuned.problem, timings.machine.clock
    errors = {measured.micro_config.algorithm: measured.relative_error for measured in tuned.measurements}
    failed = {failure.micro_config.algorithm for failure in tuned.failures if not failure.is_passed_over}
    precise = [
        registry.algorithm(name)
        for name in sorted(names)
        if runs_bands(name, problem) and not registry.algorithm(name).is_last_resort
    ]
    least = min((algorithm.workspace(problem, 1).prepared_bytes for algorithm in precise), default=0)
    measurements = []

    def timed_twice(call: Callable[[], object]) -> Seconds:
        return [[clock.time(call, 1) for _ in range(2)]]

    for algorithm in precise:
        is_done = algorithm.name in errors or algorithm.name in failed
        if is_done or algorithm.workspace(problem, 1).prepared_bytes > least:
            continue
        needed = algorithm.workspace(problem, tuned.batch_size)
        opened = partial(algorithm.open, problem, weight, aligned_buffer(needed.prepared_bytes))
        setup = timings.of(f"filter prepared by {named(algorithm)}: {problem!r}", partial(timed_twice, opened))
        costs = convolution_costs(captured, index, algorithm, timings)
        if setup is None or costs is None:  # there is no time for it
            continue
        measurements.append(
            Measurement(
                MicroConfig(algorithm.name, tuned.batch_size),
                setup_s=min(setup[0]),
                step_s=costs.seconds(_rows(problem) * tuned.batch_size),
                prepared_bytes=needed.prepared_bytes,
                scratch_bytes=needed.scratch_bytes,
                relative_error=errors.get(TORCHS_OWN, 0.0),
            )
        )
    return measurements


# The candidates of each convolution


def candidates(
    captured: Captured,
    tuned: Mapping[int, TunedProblem],
    arguments: tuple[Any, ...],
    config: Config,
    timings: Timings,
    *,
    runs_whole: bool,
) -> tuple[Choices, frozenset[int]]:
    """Return what may compute each convolution, and the convolutions whose prepared filters are kept between calls.

    tuned: what was measured of each convolution by itself.
    runs_whole: whether there is memory for calls of the graph as a whole, in which the fastest are measured again.
    """
    convolutions = convolutions_of(captured.operators)
    measured = {index: _tuned_choices(convolutions[index], problem) for index, problem in tuned.items()}
    choices, kept = with_kept_filters(measured, config.cache_budget_bytes)
    are_whole = all(convolutions[index].problem == problem.problem for index, problem in tuned.items())
    if choices and runs_whole and are_whole:  # tensors of others are larger than the budget
        choices = _timed_in_place(captured, choices, kept, arguments, timings)
    return choices, kept


def _tuned_choices(convolution: Convolution, tuned: TunedProblem) -> list[Choice]:
    """Return the algorithms that run bands, of those that were measured for the whole batch."""
    is_band = tuned.problem != convolution.problem
    measured_rows = _rows(tuned.problem)
    rows = measured_rows if is_band else convolution.rows  # fewer, if fewer are padded below than were measured
    return [
        Choice(
            registry.algorithm(measured.micro_config.algorithm),
            seconds=measured.step_s if rows == measured_rows else measured.step_s * rows / measured_rows,
            rows=tuned.batch_size * rows,
            setup_s=measured.setup_s,
            prepared_bytes=measured.prepared_bytes,
            scratch_bytes=measured.scratch_bytes,
            place=Place.BAND if is_band else Place.TUNING,
        )
        for measured in tuned.allowed_measurements
        if measured.micro_config.micro_batch_size == tuned.batch_size
        and runs_bands(measured.micro_config.algorithm, convolution.problem)
    ]


def with_kept_filters(choices: Choices, budget: int | None) -> tuple[Choices, frozenset[int]]:
    """Keep prepared filters between calls where they save the most time for each byte of the cache budget.

    Returns the choices without those whose filters have no room, and the convolutions whose filters are kept. Where a
    convolution is computed again, another of its algorithms may run than the first time: there is room for the filters
    of all algorithms that are left.
    """
    left: float = inf if budget is None else budget
    savings = []
    for index, offered in choices.items():
        if offered:
            fastest = min(offered, key=lambda choice: choice.seconds)
            saved_s = min(choice.setup_s + choice.seconds for choice in offered) - fastest.seconds
            savings.append((-saved_s / (fastest.prepared_bytes or 1), index, fastest.prepared_bytes))
    kept = set()
    for _, index, nbytes in sorted(savings):
        if nbytes <= left:
            kept.add(index)
            left -= nbytes

    within = dict(choices)
    for index in sorted(kept):
        fastest, *others = sorted(choices[index], key=lambda choice: choice.seconds)
        offered = [fastest]
        for choice in others:
            if choice.prepared_bytes <= left:
                left -= choice.prepared_bytes
                offered.append(choice)
        within[index] = offered
    return within, frozenset(kept)


def _timed_in_place(
    captured: Captured, choices: Choices, kept: frozenset[int], arguments: tuple[Any, ...], timings: Timings
) -> Choices:
    """Time the fastest algorithms, and torch's own, in calls of the graph, and return the choices with these times.

    Returns what is given where calls are long.
    """
    convolutions = convolutions_of(captured.operators)
    fastest = {index: fastest_and_smallest(offered, is_kept=index in kept) for index, offered in choices.items()}
    call_s = sum(offered[0].call_s(is_kept=index in kept) for index, offered in fastest.items() if offered)
    if call_s > _LONGEST_IN_PLACE_S:
        return choices
    offered = {index: (*(choice.algorithm for choice in ours), None) for index, ours in fastest.items()}
    texts = [(index in kept, [named(algorithm) for algorithm in algorithms]) for index, algorithms in offered.items()]
    costed = CostedGraph(captured, solver_graph(captured), kept=kept)
    samples = _seconds_in_calls(
        costed,
        each_by_itself(costed.graph),
        offered,
        arguments,
        f"convolutions in place: {digest(f'{graph_key(captured)} {texts}')}",
        _IN_PLACE,
        timings,
    )
    if samples is None:
        return choices

    # Convolutions of one problem share their samples
    seconds: dict[tuple[ConvProblem, Algorithm | None], list[float]] = {}
    for (index, algorithm), samples_s in samples.items():
        setups_s = {choice.algorithm: choice.setup_s for choice in fastest[index]}
        setup_s = 0.0 if index in kept else setups_s.get(algorithm, 0.0)
        steps_s = [max(sample_s - setup_s, 0.0) for sample_s in samples_s]
        seconds.setdefault((convolutions[index].problem, algorithm), []).extend(steps_s)
    medians = {key: median(samples_s) for key, samples_s in seconds.items()}
    in_place: dict[int, list[Choice]] = {}
    for index, ours in choices.items():
        problem, rows = convolutions[index].problem, captured.samples * convolutions[index].rows
        in_place[index] = [Choice(None, medians[problem, None], rows, place=Place.GRAPH)]
        for choice in ours:
            if (problem, choice.algorithm) in medians:
                choice = replace(choice, seconds=medians[problem, choice.algorithm], place=Place.GRAPH)
            in_place[index].append(choice)
    return in_place


def _seconds_in_calls(
    costed: CostedGraph,
    plan: Plan,
    offered: Variants,
    arguments: tuple[Any, ...],
    what: str,
    rounds: Rounds,
    timings: Timings,
) -> dict[tuple[int, Algorithm | None], Sequence[float]] | None:
    """Time convolutions by each algorithm that is offered, in calls of the graph; return None if there is no time.

    what: says everything that the times depend on.
    """
    timed = [(index, number) for index, algorithms in offered.items() for number in range(len(algorithms))]

    def schedules() -> list[Schedule]:
        """Return one for each number of an algorithm; where there are fewer, the last one runs again."""
        trials = []
        for number in range(max(map(len, offered.values()), default=0)):
            chosen = {index: algorithms[min(number, len(algorithms) - 1)] for index, algorithms in offered.items()}
            trials.append(Schedule(costed, plan, chosen))
        return trials

    samples = timings.in_calls(what, schedules, arguments, timed, rounds)
    if samples is None:
        return None
    return {
        (index, offered[index][number]): samples_s for (index, number), samples_s in zip(timed, samples, strict=True)
    }


def fastest_and_smallest(offered: Sequence[Choice], *, is_kept: bool) -> list[Choice]:
    """Return the fastest of our algorithms, and the one with the smallest buffers."""
    ours = [choice for choice in offered if choice.algorithm is not None]
    ours.sort(key=lambda choice: (choice.call_s(is_kept=is_kept), named(choice.algorithm)))
    smallest = min(ours, key=_size, default=None)
    return [choice for number, choice in enumerate(ours) if number < _CANDIDATES - 1 or choice is smallest]


def _size(choice: Choice) -> tuple[float, float]:
    return choice.prepared_bytes + choice.scratch_bytes, choice.seconds


def band_rows(convolution: Convolution) -> int:
    """Return the rows, or frames, of the bands on which a convolution is measured."""
    return min(_BAND_FRAMES if convolution.problem.is_volume else _BAND_ROWS, convolution.rows)


def _rows(problem: ConvProblem) -> int:
    """Return the rows, or frames, of the result."""
    return (problem.extent if problem.operation is Operation.BACKWARD_DATA else problem.positions)[0]


def runs_bands(name: str, problem: ConvProblem) -> bool:
    """Return whether an algorithm computes bands of a problem on the CPU."""
    algorithm = registry.algorithm(name)
    if algorithm.device_type != "cpu" or why_unsupported(algorithm, problem) is not None:
        return False
    return algorithm.band(problem, 1, (problem.extent[0], problem.positions[0]), problem.padding[0]) is not None


def band_problem(problem: ConvProblem, rows: int) -> ConvProblem | None:
    """Return the problem of a band of ``rows`` rows of the result, from the middle of the image; None for all rows."""
    if rows >= _rows(problem):
        return None
    extent, padding = problem.dilation[0] * (problem.window[0] - 1) + 1, (0, *problem.padding[1:])
    is_transposed = problem.operation is Operation.BACKWARD_DATA
    height = max(rows, extent) if is_transposed else (rows - 1) * problem.stride[0] + extent
    d, h = (height, problem.h) if problem.is_volume else (0, height)
    return replace(problem, d=d, h=h, padding=padding)


# In the bands of a schedule


def refined(schedule: Schedule, arguments: tuple[Any, ...], limit_bytes: float, timings: Timings) -> Schedule:
    """Return the schedule with the fastest algorithm of each convolution in its bands, timed in whole calls.

    Convolutions of the same problem with the same candidates that run in as many bands have the same algorithm. The
    schedule itself is returned where the other would need more than ``limit_bytes``, and where there is no time to
    measure.
    """
    costed, convolutions = schedule.costed, convolutions_of(schedule.operators)
    cuts = {index: segment.cut for segment in schedule.plan.segments for index in range(segment.start, segment.stop)}
    kinds = {
        index: (convolution.problem, len(convolution.sources), cuts[index], index in costed.kept, costed.offered[index])
        for index, convolution in convolutions.items()
    }
    offered = {index: tuple(dict.fromkeys((schedule.algorithms[index], *costed.offered[index]))) for index in kinds}
    texts = [[named(algorithm) for algorithm in algorithms] for algorithms in offered.values()]
    what = f"convolutions in bands: {digest(f'{schedule_key(schedule)} {texts}')}"
    samples = _seconds_in_calls(costed, schedule.plan, offered, arguments, what, _IN_BANDS, timings)
    if samples is None:
        return schedule
    seconds: dict[object, dict[Algorithm | None, list[float]]] = {}
    for (index, algorithm), samples_s in samples.items():
        seconds.setdefault(kinds[index], {}).setdefault(algorithm, []).extend(samples_s)
    fastest: dict[object, Algorithm | None] = {}
    for kind, algorithms in seconds.items():
        means_s = {algorithm: mean(samples_s) for algorithm, samples_s in algorithms.items()}
        fastest[kind] = min(means_s, key=means_s.__getitem__)
    chosen = {index: fastest[kind] for index, kind in kinds.items()}
    faster = Schedule(costed, schedule.plan, chosen, limit_bytes=limit_bytes)
    return faster if faster.needed_bytes <= limit_bytes else schedule
