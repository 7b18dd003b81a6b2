"""The algorithms of a graph's convolutions, of all rows and of bands, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf, prod
from statistics import mean, median
from typing import Any, TypeAlias

from mucudnn.core.config import Config
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Measurement, MicroConfig, Task
from mucudnn.core.terminal import Progress
from mucudnn.core.torch_settings import TORCHS_OWN
from mucudnn.graph.costs import (
    CALL_S,
    Timings,
    convolution_costs,
    described,
    digest,
    every_cost,
    graph_of,
    named,
    operator_costs,
)
from mucudnn.graph.operators import Captured
from mucudnn.graph.schedule import Schedule, solver_graph
from mucudnn.graph.windows import Choice, Convolution
from mucudnn.kernels.algorithm import Algorithm
from mucudnn.kernels.memory import aligned_buffer
from mucudnn.kernels.registry import algorithm as algorithm_named
from mucudnn.kernels.registry import algorithms
from mucudnn.measuring.clocks import Clock
from mucudnn.measuring.turns import Rounds
from mucudnn.measuring.whole_runs import Machine
from mucudnn.solver.bands import Costs, Cut, Graph, Segment
from mucudnn.solver.plans import Plan
from mucudnn.store.database import Database
from mucudnn.tuning.result import TunedProblem
from mucudnn.tuning.tuner import tune_tasks

BAND_ROWS = 24  # of the bands on which convolutions are measured: whole tiles of every Winograd algorithm
_SHARES = 1.0, 0.35, 0.0  # of the fastest algorithm's prepared filter, which the algorithms of each variant may have
_CANDIDATES = 4  # of each convolution, beside the one with the smallest buffers
_LONGEST_IN_PLACE_S = 0.3  # of a call: in longer ones, overheads do not matter
_IN_PLACE, _IN_BANDS = Rounds(2, 9, 3.0), Rounds(1, 3, 4.0)
_Costs: TypeAlias = dict[int, tuple[Costs, ...]]  # of operators by index, of each variant
_Variant: TypeAlias = tuple[Measurement | None, Measurement | None]  # of all rows, of bands; None for torch's own
_Seconds: TypeAlias = dict[str | None, float]  # by algorithm; None for torch's own


class ConvolutionChoices:
    """The algorithms of each convolution of a graph.

    tuned: the measurements of problems. in_place: seconds of all rows of a problem, in calls of the whole graph, if it
    is short. band_costs: of problems by algorithms, and by the number of their operands. kept_bytes: what the cache
    budget has for a prepared filter of a problem, where it is kept.
    """

    def __init__(
        self,
        captured: Captured,
        config: Config,
        machine: Machine,
        database: Database,
        progress: Progress,
        timings: Timings,
    ) -> None:
        self.captured, self.config, self.progress, self.timings = captured, config, progress, timings
        self.machine, self.database, self.budget = machine, database, config.memory_budget_bytes
        self.convolutions: Mapping[int, Convolution] = {
            index: one for index, one in enumerate(captured.operators) if isinstance(one, Convolution)
        }
        self.tasks: dict[ConvProblem, Task] = {}  # of convolutions that are tuned
        self.tuned: dict[Task, TunedProblem] = {}
        self.in_place: dict[ConvProblem, _Seconds] = {}
        self.band_costs: dict[tuple[ConvProblem, str, int], Costs | None] = {}
        self.kept_bytes: dict[ConvProblem, int] = {}

    def tune(self) -> None:
        """Tune the convolutions, unless all are torch's own, since no algorithm runs bands.

        Only algorithms that run bands are measured, and torch's own; bands, of convolutions whose tensors alone exceed
        the budget. Then filters are kept where that saves the most.
        """
        config, n = self.config, self.captured.samples
        problems = {one.problem: one for one in self.convolutions.values()}
        names = [one.name for one in algorithms()] if config.algorithms is None else config.algorithms
        names = [name for name in names if any(runs_bands(name, problem) for problem in problems)]
        if not names:
            return
        tuning = replace(
            config,
            algorithms=tuple(names),
            operations=tuple(Operation),
            memory_budget=None,
            workspace_limit=None if config.has_headroom_limit else config.workspace_limit,
            workspace_budget=None,
        )
        for problem, one in problems.items():
            tuned, samples = problem, n
            of_tensors = sum(map(prod, (problem.x_shape(n), problem.y_shape(n)))) * problem.item_bytes
            if self.budget is not None and of_tensors > self.budget:
                of_band = band_problem(problem, min(BAND_ROWS, one.rows))
                tuned, samples = (problem, n) if of_band is None else (of_band, 1)
            limit, exempt = tuning.workspace_limit_bytes, config.baseline_exempt
            self.tasks[problem] = Task(tuned, samples, limit, name=str(tuned), baseline_exempt=exempt)
        tasks = list(dict.fromkeys(self.tasks.values()))
        found = tune_tasks(tasks, tuning, progress=self.progress, machine=self.machine, database=self.database)
        self.tuned = dict(zip(tasks, found.problems, strict=True))
        for index, one in self.convolutions.items():
            self._time_leanest(index, self.tasks[one.problem], names)
        self._keep_filters()

    def _time_leanest(self, index: int, task: Task, names: Sequence[str]) -> None:
        """Time the algorithms with the smallest prepared filters too, which tuning drops where others are faster.

        Their times are extrapolated from bands. They add up the same products as torch's own convolution, and count as
        precise as that. names: of algorithms.
        """
        one, problem, known = self.convolutions[index], task.problem, self.tuned[task]
        errors = {of.micro_config.algorithm: of.relative_error for of in known.measurements}
        failed = {of.micro_config.algorithm for of in known.failures if not of.is_passed_over}
        every = [algorithm_named(name) for name in sorted(names)]
        offered = [of for of in every if not of.is_last_resort and runs_bands(of.name, problem)]
        least = min((of.workspace(problem, 1).prepared_bytes for of in offered), default=0)
        for algorithm in offered:
            needed = algorithm.workspace(problem, task.batch_size)
            is_known = algorithm.name in errors or algorithm.name in failed
            if is_known or algorithm.workspace(problem, 1).prepared_bytes > least:
                continue
            buffer = aligned_buffer(needed.prepared_bytes)
            opened = partial(algorithm.open, problem, one.weight, buffer)
            what = f"filter prepared by {named(algorithm)}: {problem!r}"
            setup = self.timings.of(what, partial(_timed_twice, self.machine.clock, opened))
            costs = self._measured_in_bands(index, algorithm.name)
            if setup is None or costs is None:  # there is no time for it
                continue
            timed = Measurement(
                MicroConfig(algorithm.name, task.batch_size),
                setup_s=min(setup[0]),
                step_s=costs.seconds(_rows(problem) * task.batch_size),
                prepared_bytes=needed.prepared_bytes,
                scratch_bytes=needed.scratch_bytes,
                relative_error=errors.get(TORCHS_OWN, 0.0),
            )
            self.tuned[task] = replace(self.tuned[task], measurements=(*self.tuned[task].measurements, timed))

    def measure_in_place(self, arguments: tuple[Any, ...]) -> None:
        """Time the fastest algorithms, and torch's own, in calls of the whole graph, unless these are long."""
        if not self.tasks:
            return
        fastest = {index: self._fastest(one) for index, one in self.convolutions.items()}
        if any(task.problem != problem for problem, task in self.tasks.items()):
            return  # some were measured on bands, since their tensors are larger than the budget
        if sum(_seconds(self.convolutions[index], of[0]) for index, of in fastest.items() if of) > _LONGEST_IN_PLACE_S:
            return
        offered = {index: (*map(_algorithm_of, of), None) for index, of in fastest.items()}
        timed = [(index, variant) for index, of in offered.items() for variant in range(len(of))]

        def schedules() -> list[Schedule]:
            for index, of in offered.items():
                self.convolutions[index].choices = tuple(Choice(one, one) for one in of)
            graph = solver_graph(self.captured, dict.fromkeys(range(len(self.captured.operators)), (Costs(),)), {})
            variants = range(max(map(len, offered.values())))
            return [Schedule(self.captured, graph, each_by_itself(graph, variant)) for variant in variants]

        names = [(self.convolutions[index].keeps, [named(one) for one in of]) for index, of in offered.items()]
        what = f"convolutions in place: {digest(f'{graph_of(self.captured)} {names}')}"
        samples = self.timings.in_calls(what, schedules, arguments, timed, _IN_PLACE)
        for one in self.convolutions.values():
            one.forget()
        seconds: dict[tuple[ConvProblem, str | None], list[float]] = {}
        for (index, variant), of_one in zip(timed, samples or (), strict=bool(samples)):
            one, measured = self.convolutions[index], [*fastest[index], None][variant]
            setup_s = 0.0 if measured is None or one.keeps else measured.setup_s
            name = None if measured is None else measured.micro_config.algorithm
            seconds.setdefault((one.problem, name), []).extend(max(time_s - setup_s, 0.0) for time_s in of_one)
        for (problem, name), of_one in seconds.items():
            self.in_place.setdefault(problem, {})[name] = median(of_one)

    def costs(self) -> tuple[_Costs, _Costs]:
        """Choose each convolution's algorithms, and return the costs of all operators: in bands, and of all rows."""
        known: _Costs = {}
        whole: _Costs = {}
        measured: dict[str, Costs] = {}
        for index, one in self.convolutions.items():
            of_torch = operator_costs(self.captured, index, self.timings, measured)
            variants = self._variants(index, of_torch)
            one.choices = tuple(Choice(*map(_algorithm_of, variant)) for variant in variants)
            known[index] = tuple(of_torch if of is None else self._costs_in_bands(index, of) for _, of in variants)
            whole[index] = tuple(of_torch if of is None else self._costs_of_whole(index, of) for of, _ in variants)
        self.progress("measuring the other operators", 1.0)
        return every_cost(self.captured, self.timings, known), whole

    def _keep_filters(self) -> None:
        """Keep prepared filters between calls where they save the most time for each byte of the cache budget."""
        left = inf if self.config.cache_budget_bytes is None else self.config.cache_budget_bytes
        found = []
        for number, one in self.convolutions.items():
            if ours := self._ours(one):
                kept = min(ours, key=lambda one: one.step_s)
                saved_s = min(one.setup_s + one.step_s for one in ours) - kept.step_s
                found.append((-saved_s / (kept.prepared_bytes or 1), number, kept.prepared_bytes, one))
        for _, _, size, one in sorted(found, key=lambda each: each[:2]):
            one.keeps = size <= left
            left -= size if one.keeps else 0
            self.kept_bytes[one.problem] = size

    def _variants(self, index: int, of_torch: Costs) -> tuple[_Variant, ...]:
        """Return what computes all rows, and bands: the fastest, and ever smaller prepared filters."""
        if not self.tasks:
            return ((None, None),)
        one = self.convolutions[index]
        ours = self._fastest(one)
        if one.rows == 1:
            in_bands = ours
        else:
            costs = ((of, self._band_costs(index, of)) for of in ours)
            in_bands = [replace(of, step_s=each.seconds(BAND_ROWS)) for of, each in costs]
        is_whole = self.tasks[one.problem].problem == one.problem
        torchs_s = self.in_place.get(one.problem, {}).get(None, of_torch.seconds(self.captured.samples * one.rows))
        found: list[_Variant] = []
        for share in _SHARES:
            whole = _best(one, ours, torchs_s, share) if is_whole else None
            found.append((whole, _best(one, in_bands, of_torch.seconds(BAND_ROWS), share)))
        if one.rows == one.problem.h == 1 and not one.keeps:
            found.append((None, None))  # the filters of a linear layer are as large as prepared ones
        return tuple(dict.fromkeys(found))

    def _fastest(self, one: Convolution) -> list[Measurement]:
        """Return the fastest algorithms, and the one with the smallest buffers."""
        ours = sorted(self._ours(one), key=lambda of: (_seconds(one, of), of.micro_config))
        smallest = min(ours, key=_size, default=None)
        return [of for number, of in enumerate(ours) if number < _CANDIDATES - 1 or of is smallest]

    def candidates(self, one: Convolution) -> list[Algorithm]:
        """Return the fastest algorithms of a convolution, and the one with the smallest buffers."""
        return [algorithm_named(of.micro_config.algorithm) for of in self._fastest(one)]

    def _band_costs(self, index: int, of: Measurement) -> Costs:
        """Return the costs of bands by a measured algorithm; those of all rows, if there is no time to measure."""
        costs = self._measured_in_bands(index, of.micro_config.algorithm)
        rows = _rows(self.tasks[self.convolutions[index].problem].problem)
        return costs or Costs(call_s=CALL_S, row_s=of.step_s / of.micro_config.micro_batch_size / rows)

    def _measured_in_bands(self, index: int, name: str) -> Costs | None:
        one = self.convolutions[index]
        key = one.problem, name, len(one.sources)
        if key not in self.band_costs:
            self.band_costs[key] = convolution_costs(self.captured, index, algorithm_named(name), self.timings)
        return self.band_costs[key]

    def tuned_problems(self) -> Iterator[tuple[str, TunedProblem]]:
        """Yield the name of each convolution with what was measured of it."""
        for one in self.convolutions.values() if self.tasks else ():
            yield one.name, self.tuned[self.tasks[one.problem]]

    def _costs_in_bands(self, index: int, of: Measurement) -> Costs:
        one, costs = self.convolutions[index], self._band_costs(index, of)
        return self._with_buffers(one, of, min(BAND_ROWS, one.rows), costs)

    def _costs_of_whole(self, index: int, of: Measurement) -> Costs:
        one, name = self.convolutions[index], of.micro_config.algorithm
        row_s = of.step_s / of.micro_config.micro_batch_size / one.rows
        if len(one.sources) > 1 and name not in self.in_place.get(one.problem, {}):  # tuned without the addition
            row_s = max(row_s, self._band_costs(index, of).row_s)
        costs = Costs(row_s=row_s)
        return self._with_buffers(one, of, one.rows, costs)

    def _with_buffers(self, one: Convolution, of: Measurement, rows: int, costs: Costs) -> Costs:
        scratch = scratch_bytes(one, algorithm_named(of.micro_config.algorithm), rows)
        if one.keeps:
            return replace(costs, scratch_bytes=scratch)
        return replace(costs, setup_s=of.setup_s, scratch_bytes=scratch, prepared_bytes=of.prepared_bytes)

    def _ours(self, one: Convolution) -> list[Measurement]:
        """Return the measurements of our algorithms that run bands, in place where that was measured."""
        task = self.tasks[one.problem]
        known = self.in_place.get(one.problem, {})
        most = inf
        if one.keeps and self.config.cache_budget_bytes is not None:
            most = self.kept_bytes[one.problem]
        found = []
        for of in self.tuned[task].allowed_measurements:
            name = of.micro_config.algorithm
            if of.prepared_bytes > most:
                continue
            if of.micro_config.micro_batch_size == task.batch_size and runs_bands(name, one.problem):
                found.append(replace(of, step_s=known[name]) if name in known else of)
        return found


def scratch_bytes(one: Convolution, algorithm: Algorithm, rows: int) -> int:
    """Return the scratch bytes of a call for so many rows."""
    stride = one.problem.stride[0]
    of_x = max((rows - one.extent) // stride + 1, 1) if one.is_transposed else (rows - 1) * stride + one.extent
    made = algorithm.band(one.problem, 1, (rows, of_x) if one.is_transposed else (of_x, rows), 0)
    assert made is not None
    return made[1].scratch_bytes


def _timed_twice(clock: Clock, call: Callable[[], object]) -> list[list[float]]:
    return [[clock.time(call, 1) for _ in range(2)]]


def _rows(problem: ConvProblem) -> int:
    return problem.h if problem.operation is Operation.BACKWARD_DATA else problem.y_shape(1)[2]


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
    if algorithm.device_type != "cpu" or algorithm.supports(problem) is not None:
        return False
    return algorithm.band(problem, 1, (problem.h, problem.y_shape(1)[2]), problem.padding[0]) is not None


def band_problem(problem: ConvProblem, rows: int) -> ConvProblem | None:
    """Return the problem of a band of ``rows`` rows of the result, from the middle of the image; None for all rows."""
    is_transposed = problem.operation is Operation.BACKWARD_DATA
    if rows >= (problem.h if is_transposed else problem.y_shape(1)[2]):
        return None
    extent, padding = problem.dilation[0] * (problem.r - 1) + 1, (0, problem.padding[1])
    height = max(rows, extent) if is_transposed else (rows - 1) * problem.stride[0] + extent
    return replace(problem, h=height, padding=padding)


# Again, in the bands of a schedule


def refined(
    schedule: Schedule,
    candidates: Mapping[int, Sequence[Algorithm]],
    arguments: tuple[Any, ...],
    limit_bytes: float,
    timings: Timings,
) -> Schedule:
    """Return the schedule with the fastest of the candidates for each convolution, which are timed in whole calls.

    candidates: of each convolution, by its index in ``schedule.operators``. Convolutions of the same problem that run
    in as many bands have the same algorithm. The schedule itself is returned where the other would need more than
    ``limit_bytes``, and where there is no time to measure.
    """
    kinds = {
        index: (one.problem, len(one.sources), segment.cut)
        for segment in schedule.plan.segments
        for index, one in enumerate(schedule.operators[segment.start : segment.stop], segment.start)
        if isinstance(one, Convolution)
    }
    own = {index: _convolution(schedule, index).algorithm(cut) for index, (_, _, cut) in kinds.items()}
    offered = {index: [own[index], *(one for one in candidates[index] if one is not own[index])] for index in kinds}
    timed = [(index, number) for index, of in offered.items() for number in range(len(of))]

    def trials() -> list[Schedule]:
        variants = range(max(map(len, offered.values()), default=0))
        of_each = [{index: of[min(number, len(of) - 1)] for index, of in offered.items()} for number in variants]
        return [_schedule_with(schedule, algorithms) for algorithms in of_each]

    names = [[named(one) for one in of] for of in offered.values()]
    what = f"convolutions in bands: {digest(f'{described(schedule)} {names}')}"
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
    """Return the schedule with other algorithms of its convolutions, which become another variant of their choices."""
    known = max(len(_convolution(schedule, index).choices) for index in algorithms)
    for index, algorithm in algorithms.items():
        one = _convolution(schedule, index)
        padding = (one.choices[-1],) * (known - len(one.choices))
        one.choices = (*one.choices, *padding, Choice(algorithm, algorithm))
    segments = (replace(one, cut=replace(one.cut, variant=known)) for one in schedule.plan.segments)
    return Schedule(schedule.captured, schedule.graph, replace(schedule.plan, segments=tuple(segments)), limit_bytes)


def _convolution(schedule: Schedule, index: int) -> Convolution:
    one = schedule.operators[index]
    assert isinstance(one, Convolution)
    return one
