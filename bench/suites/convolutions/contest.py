"""The timing of one convolution problem: a configuration for each policy and limit, all interleaved with torch.

Configurations chosen for the whole table are timed together with those chosen for each problem.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from statistics import median

from mucudnn.bench.contests.timing import Contestant, Samples, TurnRounds, try_in_turns
from mucudnn.bench.contests.variants import TORCH
from mucudnn.bench.folders.rows import Row, Subject, problem_columns
from mucudnn.bench.report.records import configuration_record
from mucudnn.bench.sources.layers import Layer
from mucudnn.bench.suites.convolutions.same_time import SameTime
from mucudnn.database.database import Database
from mucudnn.measuring.operands import Operands
from mucudnn.measuring.timing.candidate_errors import CANDIDATE_ERRORS, UnsoundError
from mucudnn.measuring.timing.timer import Runner
from mucudnn.measuring.whole_runs import Machine, training_operands
from mucudnn.tuning.result import TunedProblem, Tuning
from mucudnn.tuning.tuner import Priors, tune_tasks
from mucudnn.words.config import BatchSizePolicy, Config
from mucudnn.words.errors import InfeasibleError, first_line
from mucudnn.words.problem import ConvProblem, MemoryFormat
from mucudnn.words.progress import Progress, share_of, silent
from mucudnn.words.results import MicroConfig
from mucudnn.words.task import Task
from mucudnn.words.torch_settings import TORCHS_OWN

UNDIVIDED, OURS = "undivided", "mucudnn"  # contestants
SLOWER = 0.97  # Rows with a speedup below this are measured once more.
_LEAST_AGAIN = 3  # minimum number of additional rounds; fewer give no confidence interval

_Choice = tuple[str, BatchSizePolicy, int | None]  # contestant, policy, limit or budget in bytes
_Tuned = tuple[TunedProblem | str, float | None]  # the choice, or the reason why there is none; tuning seconds
_Chosen = Mapping[_Choice, _Tuned]
_Call = str | tuple[MicroConfig, ...]  # a variant of torch, or the micro-batches of a configuration
_Time = Samples | Exception
_Times = Mapping[_Call, _Time]


ROUNDS = 15
# Short calls are sampled for SHORT_S seconds, which reduces the noise between two runs to a few percent.
MOST_ROUNDS, SHORT_S = 81, 0.5


@dataclass(frozen=True, slots=True)
class Choices:
    """Settings of a run: the policies and workspace limits (bytes, None for no limit) under which mucudnn chooses.

    Without policies, mucudnn chooses under the config for the whole table at once; if its choice seems slower than
    torch, both are timed once more, with twice the rounds. memory_formats: measured interleaved for each problem; if
    empty, the table's own.

    rounds: time samples of each contestant; under policies, short calls get more, up to ``MOST_ROUNDS``.

    time_limit_s: a problem is started only if it is expected to finish by then; None for no time limit. A resumed run
    may have another time limit.

    budgets: bytes, each divided over the whole table. at_best: whether each problem also gets two limits of its own:
    the workspace of the fastest undivided algorithm, and one byte less. same_time: whether to search for the smallest
    workspace with which mucudnn is as fast as torch.
    """

    policies: tuple[BatchSizePolicy, ...] = ()
    limits: tuple[int | None, ...] = ()
    memory_formats: tuple[MemoryFormat, ...] = ()
    rounds: int = ROUNDS
    time_limit_s: float | None = None
    budgets: tuple[int, ...] = ()
    at_best: bool = False
    same_time: bool = False

    @property
    def turns(self) -> TurnRounds:
        """The rule for the number of rounds in which a problem's contestants are timed."""
        if not self.policies:
            return TurnRounds(self.rounds, self.rounds, 0.0)
        return TurnRounds(self.rounds, max(self.rounds, MOST_ROUNDS), SHORT_S)


@dataclass(frozen=True, slots=True)
class TunedNetwork:
    """The configurations chosen together for all problems of a table. bytes: the limit or budget, None for no limit.

    choices: by layer and problem; empty if tuning failed, with the reason in ``failure``.
    """

    contestant: str
    policy: BatchSizePolicy
    bytes: int | None
    choices: Mapping[tuple[tuple[str, ...], ConvProblem], TunedProblem]
    failure: str = ""

    def chosen(self, layer: Layer, problem: ConvProblem) -> TunedProblem | str:
        """Return the tuned problem with the configuration chosen for it, or the reason why none was chosen."""
        return self.choices.get((layer.names, problem), self.failure)


@dataclass(frozen=True, slots=True)
class Contests:
    """The settings and resources shared by all contests; a contest times one problem's contestants, interleaved.

    variants: torch's variants, by name. tuned: choices made for the whole table, which are timed together with those
    made for each limit. The best undivided algorithm is also chosen under each limit.
    """

    config: Config
    machine: Machine
    database: Database
    variants: Mapping[str, Runner]
    choices: Choices
    priors: Priors = field(default_factory=dict)
    tuned: Sequence[TunedNetwork] = ()

    def rows(
        self, layer: Layer, problems: Sequence[ConvProblem], progress: Progress
    ) -> tuple[list[Row], list[tuple[Subject, list[TunedProblem]]]]:
        """Time all contestants on an operation of a layer in each memory format; return rows and tuned problems.

        A contestant that cannot run gets a row with the reason. Raises ``KeyboardInterrupt``.
        """
        chosen = [
            self._chosen(layer, problem, share_of(progress, 0.9 * index / len(problems), 0.9 / len(problems)))
            for index, problem in enumerate(problems)
        ]
        progress(f"{layer.name}, {problems[0]}: in turns", 0.9)
        both = [*zip(problems, chosen, strict=True)]
        contests = [self._contest(layer, problem, each) for problem, each in both]
        times = self._time(contests, self.choices.turns)
        rows, tunings = list[Row](), []
        for (problem, each), contest, measured in zip(both, contests, times, strict=True):
            subject = subject_of(layer, problem)
            tunings.append((subject, contest.tunings))
            rows += self._torchs(subject, measured, contest)
            rows += self._measured_again(contest, _ours(subject, measured, each), measured)
        return [replace(row, more={**row.more, "count": layer.count}) for row in rows], tunings

    def _chosen(self, layer: Layer, problem: ConvProblem, progress: Progress) -> _Chosen:
        policies = dict.fromkeys((BatchSizePolicy.UNDIVIDED, *self.choices.policies))
        limits = dict.fromkeys((*self._limits_at_best(layer, problem), *self.choices.limits))
        wanted = [(policy, limit) for policy in policies for limit in limits]
        chosen: dict[_Choice, _Tuned] = {}
        for index, (policy, limit) in enumerate(wanted):
            part = share_of(progress, index / len(wanted), 1 / len(wanted))
            contestant = UNDIVIDED if policy is BatchSizePolicy.UNDIVIDED else OURS
            start_s = self.machine.clock.now()
            tuned = self._choose(layer, problem, policy, limit, part)
            chosen[contestant, policy, limit] = tuned, self.machine.clock.now() - start_s
        for one in self.tuned:
            chosen[one.contestant, one.policy, one.bytes] = one.chosen(layer, problem), None
        return chosen

    def _limits_at_best(self, layer: Layer, problem: ConvProblem) -> Sequence[int]:
        """Return two workspace limits: the bytes that the best undivided algorithm needs, and one byte less.

        The result is empty if that algorithm needs no workspace, or if no algorithm was found.
        """
        if not self.choices.at_best:
            return ()
        best = self._choose(layer, problem, BatchSizePolicy.UNDIVIDED, None, silent)
        most = 0 if isinstance(best, str) else best.configuration.workspace_bytes
        return (most, most - 1) if most else ()

    def _choose(
        self, layer: Layer, problem: ConvProblem, policy: BatchSizePolicy, limit: int | None, progress: Progress
    ) -> TunedProblem | str:
        """Return mucudnn's choice for a problem under this policy and limit, or the reason why there is none."""
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

    def _contest(self, layer: Layer, problem: ConvProblem, chosen: _Chosen) -> _Contest:
        tunings = [tuned for tuned, _ in chosen.values() if isinstance(tuned, TunedProblem)]
        contest = _Contest(problem, layer.batch_size, tunings)
        try:
            contest.operands = training_operands(problem, layer.batch_size, self.machine.device)
            contest.calls = self._calls(problem, contest.operands, tunings)
        except CANDIDATE_ERRORS as error:  # There is not enough memory for the mini-batch.
            contest.failure = error
        return contest

    def _calls(
        self, problem: ConvProblem, operands: Operands, tunings: Sequence[TunedProblem]
    ) -> dict[_Call, Contestant]:
        """Return the calls of torch's variants (none if barred) and of the configurations, without duplicates."""
        torchs = partial(self.machine.run_torch, problem, operands)
        calls: dict[_Call, Contestant] = {}
        if not _barred(tunings):
            calls |= {name: Contestant(torchs, run) for name, run in self.variants.items()}
        for one in (tuned.configuration for tuned in tunings):
            if not one.is_baseline and one.micro_configs not in calls:
                call = self.machine.whole_run(problem, one, operands, keeps_workspace=True)
                calls[one.micro_configs] = Contestant(call)
        return calls

    def _time(self, contests: Sequence[_Contest], rounds: TurnRounds) -> list[_Times]:
        """Time all calls of all contests, interleaved; return the times or errors of each contest's calls."""
        every = [call for contest in contests for call in contest.calls.values()]
        times = iter(try_in_turns(every, rounds, self.machine.clock) if every else ())
        found = list[_Times]()
        for contest in contests:
            configurations = [tuned.configuration for tuned in contest.tunings]
            if contest.failure is not None:
                failed: tuple[_Call, ...] = (*self.variants, *(c.micro_configs for c in configurations))
                found.append(dict.fromkeys(failed, contest.failure))
                continue
            measured: dict[_Call, _Time] = {name: next(times) for name in contest.calls}
            if reason := _barred(contest.tunings):
                measured |= dict.fromkeys(self.variants, UnsoundError(reason))
            found.append(measured | {c.micro_configs: measured[TORCH] for c in configurations if c.is_baseline})
        return found

    def _torchs(self, subject: Subject, times: _Times, contest: _Contest) -> Iterator[Row]:
        measured = {m.micro_config: m for tuned in contest.tunings for m in tuned.measurements}
        baseline = measured.get(MicroConfig(TORCHS_OWN, subject["batch_size"]))
        error = None if baseline is None else baseline.relative_error
        reference = [*self.variants][-1]  # the one in benchmark mode if there is one
        for name in self.variants:
            row = _row(Row(subject, name, relative_error=error), times[name])
            if self.choices.same_time and name == reference and row.samples_s:
                seeking = SameTime(
                    self.machine, contest.problem, contest.operands, contest.calls[name], self.choices.turns
                )
                row = seeking.completed(row, contest.tunings, times)
            yield row

    def _measured_again(self, contest: _Contest, rows: Iterator[Row], times: _Times) -> Iterator[Row]:
        """Yield the rows; rows that seem slower than torch get the time samples of a second contest.

        Under policies nothing is timed again.
        """
        torchs = times[TORCH]
        torch_s = median(torchs) if isinstance(torchs, tuple) and not self.choices.policies else inf
        for row in rows:
            if not row.samples_s or torch_s >= SLOWER * median(row.samples_s):
                yield row
                continue
            only = next(t.configuration for t in contest.tunings if str(t.configuration) == row.configuration)
            rounds = max(2 * self.choices.rounds, _LEAST_AGAIN)
            calls = [contest.calls[name] for name in (TORCH, only.micro_configs)]
            again = try_in_turns(calls, TurnRounds(rounds, rounds, 0.0), self.machine.clock)
            named = zip(("torch_again_s", "again_s"), again, strict=True)
            more = {name: time for name, time in named if isinstance(time, tuple)}
            yield replace(row, more={**row.more, **more})


@dataclass(slots=True)
class _Contest:
    """The calls to be timed, interleaved, for one problem. failure: the error because of which there are no calls."""

    problem: ConvProblem
    batch_size: int
    tunings: list[TunedProblem]
    calls: dict[_Call, Contestant] = field(default_factory=dict)
    operands: Operands = field(init=False)
    failure: Exception | None = None


def _barred(tunings: Sequence[TunedProblem]) -> str:
    """Return the reason why torch's own must not run, as where it crashes or is too slow; empty if it may run."""
    return next((tuned.barred.reason for tuned in tunings if tuned.barred is not None), "")


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
            **configuration_record(tuned.configuration),
            relative_error=tuned.relative_error,
            more={
                **row.more,
                "predicted_s": tuned.configuration.time_s,
                "tuned_s": tuned.time_s,
                "reason": tuned.reason,
                "solve_s": tuned.account and tuned.account.solve_time_s,
            },
        )
        yield _row(row, times[tuned.configuration.micro_configs])


def _row(row: Row, time: _Time) -> Row:
    """Add the time samples, or the reason why there are none, to a row."""
    if isinstance(time, tuple):
        return replace(row, samples_s=time)
    return replace(row, failure=first_line(time))
