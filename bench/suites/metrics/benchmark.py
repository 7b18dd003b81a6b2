"""Measures the operations of a layer, each by torch, by every algorithm and by configurations, into a result folder.

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
from mucudnn.bench.folders.reading import LeftOut
from mucudnn.bench.folders.rows import PROBLEM_COLUMNS, Row, Subject, problem_columns
from mucudnn.bench.folders.writing import open_folder
from mucudnn.bench.sources.layers import Layer
from mucudnn.bench.suites.metrics.calls import Computation, alone, compute, through_module
from mucudnn.bench.suites.metrics.errors import ErrorNorms, distinct_results, error_map
from mucudnn.bench.suites.metrics.gradients import SAMPLES, Compute, cut_down, directional_error, exact, gradcheck
from mucudnn.measuring.candidates import Candidate, find_candidates
from mucudnn.measuring.operands import Operands, random_operands
from mucudnn.measuring.timing.timer import EVERY_ROUND
from mucudnn.measuring.whole_runs import Machine
from mucudnn.tuning.permitted import permitted_algorithms
from mucudnn.words.config import Config
from mucudnn.words.errors import InvalidInputError, first_line
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.progress import Progress, silent
from mucudnn.words.results import Configuration, Failure
from mucudnn.words.torch_settings import TORCHS_OWN

ROUNDS, RUNS = 15, 5
# Calls of milliseconds are sampled for so long: what two of them differ by chance is then some percent.
MOST_ROUNDS, SHORT_S = 41, 0.2

RULE = replace(EVERY_ROUND, time_limit_s=3.0)  # of a call: some algorithms take a hundred times as long as others

_Call = Callable[[], object]
_Time = MedianTime | Exception


@dataclass(frozen=True, slots=True)
class Choices:
    """Choices of a run.

    algorithms: names, or those of sources; None: all, or none beside configurations. Torch's own always is measured.
    configurations: of the whole mini-batch, each measured as an algorithm is. rounds: samples of each call;
    short ones get more, up to ``MOST_ROUNDS``. runs: results that are compared bit by bit.
    """

    operations: Sequence[Operation] = tuple(Operation)
    algorithms: tuple[str, ...] | None = None
    rounds: int = ROUNDS
    runs: int = RUNS
    configurations: Sequence[Configuration] = ()

    @property
    def permitted(self) -> Config:
        """Config of the algorithms that are measured undivided."""
        return Config(algorithms=(TORCHS_OWN,) if self.algorithms is None and self.configurations else self.algorithms)


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

    Raises what ``open_folder`` raises, ``InvalidInputError`` for unknown algorithms and configurations of other batch
    sizes, and ``KeyboardInterrupt``, by then with all that was measured in the folder.
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
class _Contestant:
    """An algorithm or a configuration, by its name in tables, with the candidates that it is made of."""

    name: str
    computation: Computation
    candidates: Sequence[Candidate]

    @property
    def workspace_bytes(self) -> int:
        prepared = {one.algorithm.name: one.workspace.prepared_bytes for one in self.candidates}
        return sum(prepared.values()) + max(one.scratch_bytes for one in self.candidates)

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """Errors that a run may raise."""
        return tuple(error for one in self.candidates for error in one.errors)


@dataclass(frozen=True, slots=True)
class _Measured:
    """A contestant with all that is known of it before it is timed. failure: why there is nothing."""

    contestant: _Contestant
    calls: tuple[_Call, ...] = ()
    workspace_bytes: int | None = None
    relative_error: float | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    failure: str | None = None


class _OfProblem:
    """One operation of a layer, and the algorithms and configurations that compute it."""

    def __init__(self, layer: Layer, problem: ConvProblem, choices: Choices, machine: Machine) -> None:
        self.problem, self._n, self._choices, self._machine = problem, layer.batch_size, choices, machine
        self.subject: Subject = {"layer": layer.name, **problem_columns(problem, self._n)}
        candidates, failures = self._candidates(choices.permitted, [self._n])
        self._contestants = [self._undivided(candidate) for candidate in candidates]
        reasons = {failure.micro_config.algorithm: failure.reason for failure in failures}
        for configuration in choices.configurations:
            contestant = self._divided(configuration)
            if isinstance(contestant, str):
                reasons[str(configuration)] = contestant
            else:
                self._contestants.append(contestant)
        self.left_out = [LeftOut(f"{layer.name}, {problem}: {name}", reason) for name, reason in reasons.items()]

    def _candidates(self, config: Config, sizes: Sequence[int]) -> tuple[Sequence[Candidate], Sequence[Failure]]:
        """Return those that can be computed and were not barred when they were proven, and why others are left out."""
        algorithms = permitted_algorithms(self._machine, config, self.problem, sizes)
        proofs = self._machine.proofs(self._n, checks_samples=True)
        candidates, failures = find_candidates(self.problem, algorithms, sizes, proofs=proofs)
        if proofs is None:
            return candidates, failures
        foreign = [candidate for candidate in candidates if candidate.is_foreign]
        proofs.ask(foreign)
        errors = {c.micro_config: error for c in foreign if (error := proofs.error_of(c)) is not None}
        failures += [Failure(micro_config, str(error)) for micro_config, error in errors.items()]
        return [candidate for candidate in candidates if candidate.micro_config not in errors], failures

    def _undivided(self, candidate: Candidate) -> _Contestant:
        algorithm = candidate.algorithm
        name = TORCH if algorithm.name == TORCHS_OWN else algorithm.name
        return _Contestant(name, Computation.undivided(algorithm, self._n), [candidate])

    def _divided(self, configuration: Configuration) -> _Contestant | str:
        """Return the contestant, or why it cannot compute the problem."""
        if configuration.batch_size != self._n:
            raise InvalidInputError(
                f"configuration '{configuration}' has {configuration.batch_size} samples, and the layer {self._n}: "
                f"give one of {self._n} samples, or another batch size"
            )
        parts = dict.fromkeys(configuration.micro_configs)
        config = Config(algorithms=configuration.algorithms)
        candidates, failures = self._candidates(config, sorted({one.micro_batch_size for one in parts}))
        found = {candidate.micro_config: candidate for candidate in candidates}
        reasons = {failure.micro_config: failure.reason for failure in failures}
        if missing := next((one for one in parts if one not in found), None):
            return reasons.get(missing, f"{missing.algorithm} is not offered for {missing.micro_batch_size} samples")
        algorithms = [found[one].algorithm for one in parts]
        computation = Computation.of(algorithms, configuration.micro_configs)
        return _Contestant(str(configuration), computation, [found[one] for one in parts])

    def rows(self) -> list[Row]:
        """Measure all of them; one that fails has a row with the reason.

        The calls through modules and those of the algorithms alone are timed in turns: what the machine does hits all.
        """
        operands = random_operands(self.problem, self._n, self._machine.device)
        expected, writable = exact(self.problem, operands), operands.with_own_result(self.problem.operation)
        every = [self._measured(one, operands, writable, expected) for one in self._contestants]
        del expected
        rounds = TurnRounds(self._choices.rounds, max(self._choices.rounds, MOST_ROUNDS), SHORT_S)
        contestants = [Contestant(call) for one in every for call in one.calls]
        times = iter(try_in_turns(contestants, rounds, self._machine.clock, RULE))
        return [self._row(one, [next(times) for _ in one.calls]) for one in every]

    def _measured(self, one: _Contestant, operands: Operands, writable: Operands, expected: Tensor) -> _Measured:
        try:
            through = through_module(one.computation, self.problem, operands)
            by_itself = alone(one.computation, self.problem, writable)
            by_itself()
            first = through().detach()
            norms = ErrorNorms.of(first, expected)
            return _Measured(
                one,
                (through, by_itself),
                one.workspace_bytes,
                norms.relative,
                {
                    **{"error_l1": norms.l1, "error_l2": norms.l2, "error_max": norms.largest},
                    "error_map": error_map(first, expected),
                    **self._gradients(one.computation),
                    **self._repeatability(first, through),
                },
            )
        except one.errors as error:
            return _Measured(one, failure=first_line(error))

    def _gradients(self, computation: Computation) -> dict[str, Any]:
        few = computation.of_few(SAMPLES)
        computed, samples = partial(compute, few), few.configuration.batch_size
        return {
            "gradient_error": directional_error(self.problem, computed, self._machine.device, samples),
            "gradcheck": self._gradcheck(few, computed),
        }

    def _gradcheck(self, few: Computation, computed: Compute) -> str:
        if self._machine.device != "cpu":
            return "not done: it runs on the CPU"
        algorithms = few.algorithms.values()
        reasons = {
            small: next((reason for one in algorithms if (reason := one.supports(small)) is not None), None)
            for small in cut_down(self.problem)
        }
        small = next((small for small, reason in reasons.items() if reason is None), None)
        if small is None:
            return f"not done: {next(iter(reasons.values()))}"
        return gradcheck(small, computed, few.configuration.batch_size)

    def _repeatability(self, first: Tensor, call: Callable[[], Tensor]) -> dict[str, Any]:
        again = (call().detach() for _ in range(self._choices.runs - 1))
        return {"runs": self._choices.runs, "distinct_results": distinct_results(chain([first], again))}

    def _row(self, one: _Measured, times: Sequence[_Time]) -> Row:
        row = Row(
            *(self.subject, one.contestant.name),
            configuration=str(one.contestant.computation.configuration),
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
        **({"configurations": list(map(str, choices.configurations))} if choices.configurations else {}),
        "rounds": choices.rounds,
        "runs": choices.runs,
    }
    return Header(
        *("metrics", source, settings, machine.environment),
        subject_columns=("layer", *PROBLEM_COLUMNS),
        wanted=len(choices.operations),
        limits={problem.dtype: MachineLimits.measured(machine.device, problem.dtype)},
    )
