"""The timing of one convolution problem: torch, the best undivided algorithm and mucudnn, all interleaved.

Configurations that divide a budget over the whole table are timed together with those chosen for each problem.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

from mucudnn.bench.results.reading import Subject, problem_columns
from mucudnn.bench.results.variants import TORCH
from mucudnn.bench.results.writing import Row
from mucudnn.bench.sources.layers import Layer
from mucudnn.bench.suites.shared.timing import Contestant, Samples, try_in_turns
from mucudnn.core.config import BatchSizePolicy, Config
from mucudnn.core.errors import CANDIDATE_ERRORS, InfeasibleError, UnsoundError, first_line
from mucudnn.core.problem import ConvProblem, MemoryFormat
from mucudnn.core.records import Configuration, MicroConfig, Task
from mucudnn.core.terminal import Progress, share_of
from mucudnn.core.torch_settings import TORCHS_OWN
from mucudnn.measuring.turns import Rounds, Runner
from mucudnn.measuring.whole_runs import Machine, training_operands
from mucudnn.store.database import Database
from mucudnn.tuning.result import TunedProblem, Tuning
from mucudnn.tuning.tuner import Priors, tune_tasks

UNDIVIDED, OURS, DIVIDED = "undivided", "mucudnn", "mucudnn-wd"  # contestants; the last one has a budget

_Choice = tuple[str, BatchSizePolicy, int | None]  # contestant, policy, limit or budget in bytes
_Chosen = Mapping[_Choice, tuple[TunedProblem | str, float | None]]  # the choice, or why there is none; tuning seconds
_Call = str | tuple[MicroConfig, ...]  # a variant of torch, or the micro-batches of a configuration
_Time = Samples | Exception
_Times = Mapping[_Call, _Time]

ROUNDS = 15
# Short calls are sampled for SHORT_S seconds, which reduces the noise between two runs to a few percent.
MOST_ROUNDS, SHORT_S = 81, 0.5


@dataclass(frozen=True, slots=True)
class Choices:
    """Settings of a run: what is compared.

    policies, limits: mucudnn chooses under each policy and workspace limit (bytes, None for no limit). budgets: bytes,
    each also divided over the whole table. dtypes, memory_formats: timed interleaved for each problem; if empty, the
    table's own. rounds: time samples of each contestant; short calls get more, up to ``MOST_ROUNDS``. time_limit_s: a
    problem is started only if it is expected to finish by then; None for no time limit. A resumed run may have another.
    """

    policies: tuple[BatchSizePolicy, ...] = (BatchSizePolicy.POWER_OF_TWO,)
    limits: tuple[int | None, ...] = (None,)
    budgets: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    memory_formats: tuple[MemoryFormat, ...] = ()
    rounds: int = ROUNDS
    time_limit_s: float | None = None

    def of(self, problem: ConvProblem) -> list[ConvProblem]:
        """Return a problem in each dtype and memory format."""
        kinds = product(self.dtypes or (problem.dtype,), self.memory_formats or (problem.memory_format,))
        return [replace(problem, dtype=dtype, memory_format=memory_format) for dtype, memory_format in kinds]


# The choice, or why there is none, by the layer's name, batch size and problem.
Divided = Mapping[tuple[str, int, ConvProblem], TunedProblem | str]


@dataclass(frozen=True, slots=True)
class Contests:
    """The settings and resources shared by all contests; a contest times one problem's contestants, interleaved.

    variants: torch's variants, by name. divided: the choices for the whole table, by policy and budget.
    """

    config: Config
    machine: Machine
    database: Database
    variants: Mapping[str, Runner]
    choices: Choices
    priors: Priors = field(default_factory=dict)
    divided: Mapping[tuple[BatchSizePolicy, int], Divided] = field(default_factory=dict)

    def rows(
        self, layer: Layer, problem: ConvProblem, progress: Progress
    ) -> tuple[list[Row], list[tuple[Subject, list[TunedProblem]]]]:
        """Time all contestants on an operation of a layer in each dtype and memory format; return rows and choices.

        A contestant that cannot run gets a row with the reason. Raises ``KeyboardInterrupt``.
        """
        problems = self.choices.of(problem)
        chosen = [
            self._chosen(layer, one, share_of(progress, 0.9 * index / len(problems), 0.9 / len(problems)))
            for index, one in enumerate(problems)
        ]
        progress(f"{layer.name}, {problem}: in turns", 0.9)
        calls = [self._calls(layer, one, _tuned(each)) for one, each in zip(problems, chosen, strict=True)]
        rows, tunings = list[Row](), []
        for one, each, times in zip(problems, chosen, self._timed(calls), strict=True):
            subject = subject_of(layer, one)
            tunings.append((subject, _tuned(each)))
            rows += [*self._torchs(subject, times, _tuned(each)), *_ours(subject, times, each)]
        return [replace(row, more={**row.more, "count": layer.count}) for row in rows], tunings

    def _chosen(self, layer: Layer, problem: ConvProblem, progress: Progress) -> _Chosen:
        """Return mucudnn's choices for a problem; the best undivided algorithm is chosen under each limit, too."""
        policies = dict.fromkeys((BatchSizePolicy.UNDIVIDED, *self.choices.policies))
        wanted = [*product(policies, self.choices.limits)]
        chosen: dict[_Choice, tuple[TunedProblem | str, float | None]] = {}
        for index, (policy, limit) in enumerate(wanted):
            contestant = UNDIVIDED if policy is BatchSizePolicy.UNDIVIDED else OURS
            start_s, part = self.machine.clock.now(), share_of(progress, index / len(wanted), 1 / len(wanted))
            tuned = self._choose(layer, problem, policy, limit, part)
            chosen[contestant, policy, limit] = tuned, self.machine.clock.now() - start_s
        for (policy, budget), divided in self.divided.items():
            chosen[DIVIDED, policy, budget] = divided[layer.name, layer.batch_size, problem], None
        return chosen

    def _choose(
        self, layer: Layer, problem: ConvProblem, policy: BatchSizePolicy, limit: int | None, progress: Progress
    ) -> TunedProblem | str:
        config = replace(self.config, policy=policy, workspace_limit=limit)
        name = f"{layer.name}, {problem}"
        task = Task(problem, layer.batch_size, limit, layer.count, name, baseline_exempt=config.baseline_exempt)
        try:
            return self.tune([task], config, progress).problems[0]
        except InfeasibleError as error:
            return " ".join(str(error).split())
        except CANDIDATE_ERRORS as error:
            return first_line(error)

    def tune(self, tasks: Sequence[Task], config: Config, progress: Progress) -> Tuning:
        """Tune tasks on this machine with this database. Raises the errors of ``tune``."""
        return tune_tasks(
            tasks, config, progress=progress, machine=self.machine, database=self.database, priors=self.priors
        )

    def _calls(
        self, layer: Layer, problem: ConvProblem, tunings: Sequence[TunedProblem]
    ) -> dict[_Call, Contestant | Exception]:
        """Return the calls of torch's variants and of the configurations, each once, or why they cannot run."""
        configurations = {_call_of(one.configuration): one.configuration for one in tunings}
        try:
            operands = training_operands(problem, layer.batch_size, self.machine.device)
            ours: dict[_Call, Contestant | Exception] = {
                call: Contestant(self.machine.whole_run(problem, one, operands, keeps_workspace=True))
                for call, one in configurations.items()
                if not one.is_baseline
            }
        except CANDIDATE_ERRORS as error:  # There is not enough memory for the mini-batch.
            return dict.fromkeys((*self.variants, *configurations), error)
        barred = next((one.barred.reason for one in tunings if one.barred is not None), "")
        run_torch = partial(self.machine.run_torch, problem, operands)
        return {
            name: UnsoundError(barred) if barred else Contestant(run_torch, run) for name, run in self.variants.items()
        } | ours

    def _timed(self, calls: Sequence[Mapping[_Call, Contestant | Exception]]) -> list[_Times]:
        """Time the calls of one problem in all its dtypes and memory formats, interleaved."""
        contestants = [call for each in calls for call in each.values() if isinstance(call, Contestant)]
        rounds = Rounds(self.choices.rounds, max(self.choices.rounds, MOST_ROUNDS), SHORT_S)
        times = iter(try_in_turns(contestants, rounds, self.machine.clock) if contestants else ())
        return [
            {name: next(times) if isinstance(call, Contestant) else call for name, call in each.items()}
            for each in calls
        ]

    def _torchs(self, subject: Subject, times: _Times, tunings: Sequence[TunedProblem]) -> Iterator[Row]:
        measured = {m.micro_config: m for tuned in tunings for m in tuned.measurements}
        baseline = measured.get(MicroConfig(TORCHS_OWN, subject["batch_size"]))
        error = None if baseline is None else baseline.relative_error
        least_s = next((one.least_baseline_s for one in tunings if one.barred is not None), None)
        for name in self.variants:
            yield _row(Row(subject, name, relative_error=error, more={"least_s": least_s}), times[name])


def _tuned(chosen: _Chosen) -> list[TunedProblem]:
    return [tuned for tuned, _ in chosen.values() if isinstance(tuned, TunedProblem)]


def _call_of(configuration: Configuration) -> _Call:
    return TORCH if configuration.is_baseline else configuration.micro_configs


def subject_of(layer: Layer, problem: ConvProblem) -> Subject:
    """Return the columns that identify the result row of a layer's problem."""
    return {"layer": layer.name, **problem_columns(problem, layer.batch_size)}


def _ours(subject: Subject, times: _Times, chosen: _Chosen) -> Iterator[Row]:
    for (contestant, policy, limit), (tuned, tuning_s) in chosen.items():
        row = Row(subject, contestant, policy=str(policy), limit_bytes=limit, more={"tuning_s": tuning_s})
        if isinstance(tuned, str):
            yield replace(row, failure=tuned)
            continue
        row = replace(
            row,
            configuration=str(tuned.configuration),
            workspace_bytes=tuned.configuration.workspace_bytes,
            relative_error=tuned.relative_error,
            more={
                **row.more,
                "predicted_s": tuned.configuration.time_s,
                "tuned_s": tuned.time_s,
                "reason": tuned.reason,
                "solve_s": tuned.account and tuned.account.solve_time_s,
            },
        )
        yield _row(row, times[_call_of(tuned.configuration)])


def _row(row: Row, time: _Time) -> Row:
    """Add the time samples, or the reason why there are none, to a row."""
    if isinstance(time, tuple):
        return replace(row, samples_s=time)
    return replace(row, failure=first_line(time))
