"""The algorithms of a graph's convolutions, of all rows and of bands, and what they cost."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, TypeAlias

from mucudnn.database.database import Database
from mucudnn.graph.builder import Captured
from mucudnn.graph.convolution import Choice, Convolution
from mucudnn.graph.schedule import Schedule, solver_graph
from mucudnn.kernels.contract.algorithm import Algorithm
from mucudnn.kernels.registry import algorithm as algorithm_named
from mucudnn.kernels.registry import algorithms
from mucudnn.measuring.operator_costs import every_cost, key_of, operator_costs
from mucudnn.measuring.whole_runs import Machine
from mucudnn.solver.bands import Costs, Cut, Graph, Plan, Segment
from mucudnn.tuning.result import TunedProblem
from mucudnn.tuning.tuner import tune_tasks
from mucudnn.words.config import Config
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.progress import Progress
from mucudnn.words.results import Measurement
from mucudnn.words.task import Task

_BAND_ROWS = 24  # of the bands on which convolutions are measured: whole tiles of every Winograd algorithm
_SHARES = 1.0, 0.35, 0.0  # of the fastest algorithm's prepared filter, which the algorithms of each variant may have
_IN_PLACE = 4  # candidates of each convolution, with torch's own
_LONGEST_IN_PLACE_S = 0.3  # of a call: in longer ones, overheads do not matter
_IN_PLACE_ROUNDS, _IN_PLACE_S = 9, 3.0
_Costs: TypeAlias = dict[int, tuple[Costs, ...]]  # of operators by index, of each variant
_Variant: TypeAlias = tuple[Measurement | None, Measurement | None]  # of all rows, of bands; None for torch's own
_Seconds: TypeAlias = dict[str | None, float]  # by algorithm; None for torch's own


class ConvolutionChoices:
    """What computes each convolution of a graph.

    tuned: the measurements of problems, of all rows and of bands. in_place: seconds of all rows of a problem, in calls
    of the whole graph, if it is short.
    """

    def __init__(
        self, captured: Captured, config: Config, machine: Machine, database: Database, progress: Progress
    ) -> None:
        self.captured, self.config, self.progress = captured, config, progress
        self.machine, self.database, self.budget = machine, database, config.memory_budget_bytes
        self.convolutions: Mapping[int, Convolution] = {
            index: one for index, one in enumerate(captured.operators) if isinstance(one, Convolution)
        }
        self.tuned: dict[Task, TunedProblem] = {}
        self.in_place: dict[ConvProblem, _Seconds] = {}

    def tune(self) -> None:
        """Tune the convolutions, as a whole and in bands."""
        tasks = dict.fromkeys(
            task for one in self.convolutions.values() for task in self._tasks(one) if task is not None
        )
        tuning = tune_tasks(
            list(tasks), self._tuning_config(), progress=self.progress, machine=self.machine, database=self.database
        )
        self.tuned = dict(zip(tasks, tuning.problems, strict=True))
        self._tune_leanest()
        self._keep_filters()

    def _tune_leanest(self) -> None:
        """Measure the algorithms with the smallest prepared filters too, which tuning drops where others are faster."""
        wanted: dict[str, list[Task]] = {}
        for task, tuned in self.tuned.items():
            measured = {one.micro_config.algorithm for one in tuned.measurements}
            for name in _leanest(task.problem) - measured:
                wanted.setdefault(name, []).append(task)
        for name, tasks in wanted.items():
            config = replace(self._tuning_config(), algorithms=(name,), thorough=True)
            tuning = tune_tasks(tasks, config, progress=self.progress, machine=self.machine, database=self.database)
            for task, tuned in zip(tasks, tuning.problems, strict=True):
                known = self.tuned[task]
                self.tuned[task] = replace(known, measurements=(*known.measurements, *tuned.measurements))

    def measure_in_place(self, arguments: tuple[Any, ...]) -> None:
        """Time the fastest algorithms, and torch's own, in calls of the whole graph, unless these are long."""
        fastest = {index: self._fastest(one) for index, one in self.convolutions.items()}
        if sum(_seconds(self.convolutions[index], of[0]) for index, of in fastest.items() if of) > _LONGEST_IN_PLACE_S:
            return
        for index, of in fastest.items():
            candidates = *(algorithm_named(one.micro_config.algorithm) for one in of), None
            self.convolutions[index].choices = tuple(Choice(one, one) for one in candidates)
        graph = solver_graph(self.captured, {index: (Costs(),) for index in range(len(self.captured.operators))}, {})
        schedules = [Schedule(self.captured, graph, _each_by_itself(graph, variant)) for variant in range(_IN_PLACE)]
        samples: dict[tuple[ConvProblem, str | None], list[float]] = {}
        start, rounds = time.perf_counter(), 0
        while rounds < 2 or (rounds < _IN_PLACE_ROUNDS and time.perf_counter() < start + _IN_PLACE_S):
            for variant, schedule in enumerate(schedules):
                times = schedule.operator_times(arguments)
                for index, of in fastest.items():
                    one, measured = self.convolutions[index], of[variant] if variant < len(of) else None
                    setup_s = 0.0 if measured is None or one.keeps else measured.setup_s
                    name = None if measured is None else measured.micro_config.algorithm
                    samples.setdefault((one.problem, name), []).append(max(times[index] - setup_s, 0.0))
            rounds += 1
        for (problem, name), seconds in samples.items():
            self.in_place.setdefault(problem, {})[name] = median(seconds)
        for one in self.convolutions.values():
            one.forget()

    def _fastest(self, one: Convolution) -> list[Measurement]:
        ours = self._ours(one, self._tuned(one)[0], self.captured.samples)
        return sorted(ours, key=partial(_seconds, one))[: _IN_PLACE - 1]

    def costs(self) -> tuple[_Costs, _Costs]:
        """Choose each convolution's algorithms, and return the costs of all operators: in bands, and of all rows."""
        known: _Costs = {}
        whole: _Costs = {}
        measured: dict[object, Costs] = {}
        for index, one in self.convolutions.items():
            key = key_of(self.captured, index)
            if key not in measured:
                measured[key] = operator_costs(self.captured, index, self.machine.clock)
            variants = self._variants(one, measured[key])
            one.choices = tuple(Choice(*map(_algorithm_of, variant)) for variant in variants)
            costs = [self._costs_of(one, *variant) for variant in variants]
            known[index], whole[index] = (
                tuple(cost or measured[key] for cost in of) for of in zip(*costs, strict=True)
            )
        self.progress("measuring the other operators", 1.0)
        return every_cost(self.captured, self.machine.clock, known), whole

    def _keep_filters(self) -> None:
        """Keep prepared filters between calls where they save the most time for each byte of the cache budget."""
        left = float("inf") if self.config.cache_budget_bytes is None else self.config.cache_budget_bytes
        found = []
        for number, one in self.convolutions.items():
            whole, band = self._tuned(one)
            ours = self._ours(one, whole, self.captured.samples) or self._ours(one, band, 1)
            if ours:
                kept = min(ours, key=lambda one: one.step_s)
                saved_s = min(one.setup_s + one.step_s for one in ours) - kept.step_s
                found.append((-saved_s / (kept.prepared_bytes or 1), number, kept.prepared_bytes, one))
        for _, _, size, one in sorted(found, key=lambda each: each[:2]):
            one.keeps = size <= left
            left -= size if one.keeps else 0

    def _variants(self, one: Convolution, of_torch: Costs) -> tuple[_Variant, ...]:
        """Return what computes all rows, and bands: the fastest, and ever smaller prepared filters."""
        n = self.captured.samples
        of_whole, of_band = self._tuned(one)
        rows = min(_BAND_ROWS, one.rows) if of_band else one.rows
        torchs_s = [
            of_torch.call_s + of_torch.row_s * height for height in (n * one.rows, (1 if of_band else n) * rows)
        ]
        torchs_s[0] = self.in_place.get(one.problem, {}).get(None, torchs_s[0])
        given = [
            (self._ours(one, of_whole, n), torchs_s[0]),
            (self._ours(one, of_band or of_whole, 1 if of_band else n), torchs_s[1]),
        ]
        found: list[_Variant] = []
        for share in _SHARES:
            of_all, of_bands = (_best(one, *each, share) for each in given)
            found.append((of_all, of_bands))
        if one.rows == one.problem.h == 1 and not one.keeps:
            found.append((None, None))  # the filters of a linear layer are as large as prepared ones
        return tuple(dict.fromkeys(found))

    def tuned_problems(self) -> Iterator[tuple[str, TunedProblem]]:
        """Yield the name of each convolution with what was measured of it, of all rows and of bands."""
        for one in self.convolutions.values():
            yield from ((one.name, found) for found in self._tuned(one) if found is not None)

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

    def _ours(self, one: Convolution, tuned: TunedProblem | None, n: int) -> list[Measurement]:
        """Return the measurements for ``n`` samples of our algorithms that run bands, as they are in place."""
        measured = () if tuned is None else tuned.allowed_measurements
        found = [
            of
            for of in measured
            if of.micro_config.micro_batch_size == n and _runs_bands(of.micro_config.algorithm, one.problem)
        ]
        known = self.in_place.get(one.problem, {})
        if tuned is None or not known:
            return found
        if tuned.problem == one.problem:
            timed = [of for of in found if of.micro_config.algorithm in known]
            return [replace(of, step_s=known[of.micro_config.algorithm]) for of in timed]
        return [replace(of, step_s=of.step_s * self._share_in_place(one)) for of in found]

    def _share_in_place(self, one: Convolution) -> float:
        """Return the time in place of all rows, of that by themselves: tensors may be in the cache."""
        known, (whole, _) = self.in_place[one.problem], self._tuned(one)
        alone = {of.micro_config.algorithm: of.step_s for of in whole.measurements} if whole is not None else {}
        shares = [known[name] / alone[name] for name in known if name in alone]
        return min(*shares, 1.0) if shares else 1.0


def _seconds(one: Convolution, of: Measurement) -> float:
    return of.step_s if one.keeps else of.setup_s + of.step_s


def _each_by_itself(graph: Graph, variant: int) -> Plan:
    """Return the plan that computes each operator as a whole."""
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
    smallest = min(ours, key=lambda of: (of.prepared_bytes + of.scratch_bytes, of.step_s))
    return min(smaller, key=seconds, default=smallest)


def _leanest(problem: ConvProblem) -> set[str]:
    """Return the algorithms that run bands with the smallest prepared filter."""
    offered = [
        one
        for one in algorithms()
        if not one.is_last_resort and one.supports(problem) is None and _runs_bands(one.name, problem)
    ]
    sizes = [one.workspace(problem, 1).prepared_bytes for one in offered]
    return {one.name for one, size in zip(offered, sizes, strict=True) if size == min(sizes)}


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
