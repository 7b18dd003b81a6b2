"""Measures the operations of a layer, each by torch and by every algorithm, into a result folder.

Metrics are those of level 0 of Deep500 (Ben-Nun et al., 2019, "A modular benchmarking infrastructure for
high-performance and reproducible deep learning"): errors and their map, gradients, repeatability, time, and the
overhead of the framework.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from mucudnn.bench.contests.bounds import MachineLimits
from mucudnn.bench.contests.names import TORCH
from mucudnn.bench.contests.timing import Contestant, MedianTime, TurnRounds, try_in_turns
from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.rows import PROBLEM_COLUMNS, Row, Subject, problem_columns
from mucudnn.bench.folders.writing import LeftOut, open_folder
from mucudnn.bench.measure.candidates import Candidate, find_candidates
from mucudnn.bench.measure.operands import Operands, random_operands
from mucudnn.bench.measure.whole_runs import Machine
from mucudnn.bench.sources.layers import Layer
from mucudnn.bench.suites.metrics.calls import alone, compute, through_module, undivided
from mucudnn.bench.suites.metrics.errors import ErrorNorms, distinct_results, error_map
from mucudnn.bench.suites.metrics.gradients import Compute, cut_down, directional_error, exact, gradcheck
from mucudnn.bench.timing.timer import EVERY_ROUND
from mucudnn.kernels.contract.algorithm import Algorithm
from mucudnn.tuning.permitted import permitted_algorithms
from mucudnn.words.config import Config
from mucudnn.words.errors import first_line
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.progress import Progress, silent
from mucudnn.words.torch_settings import TORCHS_OWN

ROUNDS, RUNS = 15, 5
# Calls of milliseconds are sampled for so long: what two of them differ by chance is then some percent.
MOST_ROUNDS, SHORT_S = 41, 0.2

_RULE = replace(EVERY_ROUND, time_limit_s=3.0)  # of a call: some algorithms take a hundred times as long as others

_Call = Callable[[], object]
_Time = MedianTime | Exception


@dataclass(frozen=True, slots=True)
class Choices:
    """Choices of a run.

    algorithms: names, or those of sources; None: all. Torch's own always is measured. rounds: samples of each call;
    short ones get more, up to ``MOST_ROUNDS``. runs: results that are compared bit by bit.
    """

    operations: Sequence[Operation] = tuple(Operation)
    algorithms: tuple[str, ...] | None = None
    rounds: int = ROUNDS
    runs: int = RUNS


def benchmark_metrics(
    source: str,
    layer: Layer,
    choices: Choices,
    out: Path,
    *,
    device: str = "cpu",
    progress: Progress = silent,
    machine: Machine | None = None,
) -> None:
    """Measure the operations of a layer into the folder ``out``; what it has already is not measured again.

    machine: used in place of this one.

    Raises what ``open_folder`` raises, ``InvalidInputError`` for unknown algorithms, and ``KeyboardInterrupt``, by then
    with all that was measured in the folder.
    """
    machine = machine or Machine.current(device)
    problems = (layer.problem.with_operation(operation) for operation in choices.operations)
    wanted = [_OfProblem(layer, problem, choices, machine) for problem in problems]
    with open_folder(out, _header(source, layer, choices, machine)) as folder:
        for index, of_problem in enumerate(wanted):
            if not folder.known(of_problem.subject):
                progress(f"{layer.name}, {of_problem.problem}", index / len(wanted))
                mark = machine.watch.mark()
                rows = of_problem.rows()
                folder.add(rows, machine.watch.since(mark))
        folder.write_summary([one for of_problem in wanted for one in of_problem.left_out])


@dataclass(frozen=True, slots=True)
class _Measured:
    """A contestant with all that is known of it before it is timed. failure: why there is nothing."""

    algorithm: Algorithm
    calls: tuple[_Call, ...] = ()
    workspace_bytes: int | None = None
    relative_error: float | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    failure: str | None = None


class _OfProblem:
    """One operation of a layer, and the algorithms that compute it."""

    def __init__(self, layer: Layer, problem: ConvProblem, choices: Choices, machine: Machine) -> None:
        self.problem, self._n, self._choices, self._machine = problem, layer.batch_size, choices, machine
        self.subject: Subject = {"layer": layer.name, **problem_columns(problem, self._n)}
        algorithms = permitted_algorithms(machine, Config(algorithms=choices.algorithms), problem, [self._n])
        self._candidates, failures = find_candidates(problem, algorithms, [self._n])
        self.left_out = [
            LeftOut(f"{layer.name}, {problem}: {failure.micro_config.algorithm}", failure.reason)
            for failure in failures
        ]

    def rows(self) -> list[Row]:
        """Measure all of them; one that fails has a row with the reason.

        The calls through modules and those of the algorithms alone are timed in turns: what the machine does hits all.
        """
        operands = random_operands(self.problem, self._n, self._machine.device)
        expected, writable = exact(self.problem, operands), operands.with_own_result(self.problem.operation)
        every = [self._measured(candidate, operands, writable, expected) for candidate in self._candidates]
        del expected
        rounds = TurnRounds(self._choices.rounds, max(self._choices.rounds, MOST_ROUNDS), SHORT_S)
        contestants = [Contestant(call) for one in every for call in one.calls]
        times = iter(try_in_turns(contestants, rounds, self._machine.clock, _RULE))
        return [self._row(one, [next(times) for _ in one.calls]) for one in every]

    def _measured(self, candidate: Candidate, operands: Operands, writable: Operands, expected: Tensor) -> _Measured:
        algorithm = candidate.algorithm
        try:
            through = through_module(algorithm, self.problem, operands)
            by_itself = alone(algorithm, self.problem, writable)
            by_itself()
            first = through().detach()
            norms = ErrorNorms.of(first, expected)
            return _Measured(
                algorithm,
                (through, by_itself),
                candidate.workspace_bytes,
                norms.relative,
                {
                    **{"error_l1": norms.l1, "error_l2": norms.l2, "error_max": norms.largest},
                    "error_map": error_map(first, expected),
                    **self._gradients(algorithm),
                    **self._repeatability(first, through),
                },
            )
        except candidate.errors as error:
            return _Measured(algorithm, failure=first_line(error))

    def _gradients(self, algorithm: Algorithm) -> dict[str, Any]:
        computed = partial(compute, algorithm)
        return {
            "gradient_error": directional_error(self.problem, computed, self._machine.device),
            "gradcheck": self._gradcheck(algorithm, computed),
        }

    def _gradcheck(self, algorithm: Algorithm, computed: Compute) -> str:
        if self._machine.device != "cpu":
            return "not done: it runs on the CPU"
        reasons = {small: algorithm.supports(small) for small in cut_down(self.problem)}
        small = next((small for small, reason in reasons.items() if reason is None), None)
        return f"not done: {next(iter(reasons.values()))}" if small is None else gradcheck(small, computed)

    def _repeatability(self, first: Tensor, call: Callable[[], Tensor]) -> dict[str, Any]:
        again = (call().detach() for _ in range(self._choices.runs - 1))
        return {"runs": self._choices.runs, "distinct_results": distinct_results(chain([first], again))}

    def _row(self, one: _Measured, times: Sequence[_Time]) -> Row:
        name = TORCH if one.algorithm.name == TORCHS_OWN else one.algorithm.name
        row = Row(
            *(self.subject, name),
            configuration=str(undivided(one.algorithm, self._n)),
            workspace_bytes=one.workspace_bytes,
            relative_error=one.relative_error,
            failure=one.failure,
            more=one.more,
        )
        failed = [time for time in times if isinstance(time, Exception)]
        if failed or not times:
            return replace(row, failure=row.failure or first_line(failed[0]))
        through, by_itself = (time.samples_s for time in times if isinstance(time, MedianTime))
        return replace(row, samples_s=through, more={**row.more, "alone_samples_s": by_itself})


def _header(source: str, layer: Layer, choices: Choices, machine: Machine) -> Header:
    problem = layer.problem
    settings = {
        "layer": layer.name,
        "batch_size": layer.batch_size,
        "dtype": problem.dtype,
        "memory_format": str(problem.memory_format),
        "operations": [str(operation) for operation in choices.operations],
        "algorithms": None if choices.algorithms is None else list(choices.algorithms),
        "rounds": choices.rounds,
        "runs": choices.runs,
    }
    return Header(
        *("metrics", source, settings, machine.environment),
        subject_columns=("layer", *PROBLEM_COLUMNS),
        wanted=len(choices.operations),
        limits={problem.dtype: MachineLimits.measured(machine.device, problem.dtype)},
    )
