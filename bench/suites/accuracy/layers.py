"""Measures the operations of a layer, each by torch, by every algorithm and by configurations, into a result folder.

Metrics are errors and their map, gradients, repeatability, time, and the overhead of the framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from mucudnn.bench.contests.bounds import MachineLimits
from mucudnn.bench.contests.timing import Contestant, Samples, TurnRounds, try_in_turns
from mucudnn.bench.contests.variants import TORCH
from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.reading import LeftOut
from mucudnn.bench.folders.rows import PROBLEM_COLUMNS, Row, Subject, problem_columns
from mucudnn.bench.folders.writing import write_missing
from mucudnn.bench.sources.layers import Layer
from mucudnn.bench.suites.accuracy.calls import alone, configuration_of, of_few, through_module
from mucudnn.bench.suites.accuracy.errors import with_errors
from mucudnn.bench.suites.accuracy.gradients import SAMPLES, Compute, cut_down, directional_error, exact, gradcheck
from mucudnn.measuring.candidates import Candidate, find_candidates
from mucudnn.measuring.operands import Operands, random_operands
from mucudnn.measuring.timing.timer import EVERY_ROUND
from mucudnn.measuring.whole_runs import Machine, run_whole
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


@dataclass(frozen=True, slots=True)
class Untimed:
    """A row before it is timed, and the calls: what its samples are of, and the algorithm alone if that is known."""

    row: Row
    calls: tuple[Callable[[], object], ...] = ()


def timed(every: Sequence[Untimed], choices: Choices, machine: Machine) -> list[Row]:
    """Return the rows with the samples of their calls, all of which are timed in turns; a failure is in its row."""
    rounds = TurnRounds(choices.rounds, max(choices.rounds, MOST_ROUNDS), SHORT_S)
    contestants = [Contestant(call) for one in every for call in one.calls]
    times = iter(try_in_turns(contestants, rounds, machine.clock, RULE))
    return [_with_times(one.row, [next(times) for _ in one.calls]) for one in every]


def _with_times(row: Row, times: Sequence[Samples | Exception]) -> Row:
    failed = [time for time in times if isinstance(time, Exception)]
    if failed or not times:
        return replace(row, failure=row.failure or first_line(failed[0]))
    call_s, *alone_s = (time for time in times if isinstance(time, tuple))
    return replace(row, samples_s=call_s, more={**row.more, "alone_samples_s": alone_s[0] if alone_s else []})


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
    every = [_OfProblem(layer, problem, choices, machine) for problem in problems]
    left_out = [one for of_problem in every for one in of_problem.left_out]
    wanted = {one.key: one.rows for one in every}
    write_missing(out, _header(source, layer, choices, machine), wanted, progress, machine.watch, left_out)


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


@dataclass(frozen=True, slots=True)
class _Variant:
    """An algorithm or a configuration, by its name in tables, with the candidates that it is made of."""

    name: str
    configuration: Configuration
    candidates: Sequence[Candidate]

    @property
    def workspace_bytes(self) -> int:
        prepared = {one.algorithm.name: one.workspace.prepared_bytes for one in self.candidates}
        return sum(prepared.values()) + max(one.scratch_bytes for one in self.candidates)


class _OfProblem:
    """One operation of a layer, and the algorithms and configurations that compute it."""

    def __init__(self, layer: Layer, problem: ConvProblem, choices: Choices, machine: Machine) -> None:
        self.problem, self._n, self._choices, self._machine = problem, layer.batch_size, choices, machine
        self._label = f"{layer.name}, {problem}"
        self.key = (layer.name, *problem_columns(problem, self._n).values())
        self._reasons: dict[str, str] = {}
        self._variants = [*self._undivided(), *self._divided()]
        self.left_out = [LeftOut(f"{self._label}: {name}", reason) for name, reason in self._reasons.items()]

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

    def _undivided(self) -> Iterator[_Variant]:
        candidates, failures = self._candidates(self._choices.permitted, [self._n])
        self._reasons |= {failure.micro_config.algorithm: failure.reason for failure in failures}
        for one in candidates:
            name = TORCH if one.algorithm.name == TORCHS_OWN else one.algorithm.name
            yield _Variant(name, configuration_of(one.micro_config), [one])

    def _divided(self) -> Iterator[_Variant]:
        """Yield the configurations that can be computed. Raises ``InvalidInputError`` for those of other batches."""
        for configuration in self._choices.configurations:
            if configuration.batch_size != self._n:
                raise InvalidInputError(
                    f"configuration '{configuration}' has {configuration.batch_size} samples, and the layer "
                    f"{self._n}: give one of {self._n} samples, or another batch size"
                )
            parts = dict.fromkeys(configuration.micro_configs)
            sizes = sorted({one.micro_batch_size for one in parts})
            candidates, failures = self._candidates(Config(algorithms=configuration.algorithms), sizes)
            found = {candidate.micro_config: candidate for candidate in candidates}
            if missing := next((one for one in parts if one not in found), None):
                reasons = {failure.micro_config: failure.reason for failure in failures}
                not_offered = f"{missing.algorithm} is not offered for {missing.micro_batch_size} samples"
                self._reasons[str(configuration)] = reasons.get(missing, not_offered)
            else:
                yield _Variant(str(configuration), configuration, [found[one] for one in parts])

    def rows(self, subject: Subject, progress: Progress) -> list[Row]:
        """Measure all of them; one that fails has a row with the reason."""
        progress(self._label, 0.0)
        operands = random_operands(self.problem, self._n, self._machine.device)
        expected, writable = exact(self.problem, operands), operands.with_own_result(self.problem.operation)
        every = [self._untimed(subject, one, operands, writable, expected) for one in self._variants]
        del expected
        return timed(every, self._choices, self._machine)

    def _untimed(
        self, subject: Subject, one: _Variant, operands: Operands, writable: Operands, expected: Tensor
    ) -> Untimed:
        row = Row(subject, one.name, configuration=str(one.configuration))
        try:
            through = through_module(one.configuration, self.problem, operands)
            by_itself = alone(one.configuration, self.problem, writable)
            by_itself()
            measured = replace(row, workspace_bytes=one.workspace_bytes, more=self._gradients(one))
            return Untimed(with_errors(measured, through, expected, self._choices.runs), (through, by_itself))
        except tuple(error for candidate in one.candidates for error in candidate.errors) as error:
            return Untimed(replace(row, failure=first_line(error)))

    def _gradients(self, one: _Variant) -> dict[str, Any]:
        few = of_few(one.configuration, SAMPLES)

        def compute(problem: ConvProblem, operands: Operands) -> Tensor:
            return run_whole(problem, few, operands)

        return {
            "gradient_error": directional_error(self.problem, compute, self._machine.device, few.batch_size),
            "gradcheck": self._gradcheck(one, compute, few.batch_size),
        }

    def _gradcheck(self, one: _Variant, compute: Compute, samples: int) -> str:
        if self._machine.device != "cpu":
            return "not done: it runs on the CPU"
        reasons = []
        for small in cut_down(self.problem):
            reason = next(filter(None, (candidate.algorithm.supports(small) for candidate in one.candidates)), None)
            if reason is None:
                return gradcheck(small, compute, samples)
            reasons.append(reason)
        return f"not done: {reasons[0]}"
