"""Measures one problem: a configuration is chosen for each policy and limit, then all are timed in turns with torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from mucudnn.bench.contests.names import TORCH
from mucudnn.bench.contests.timing import Contestant, MedianTime, TurnRounds, try_in_turns
from mucudnn.bench.folders.rows import Row, Subject, problem_columns
from mucudnn.bench.report.records import configuration_record
from mucudnn.bench.sources.layers import Layer
from mucudnn.bench.suites.deepbench.division import NetworkDivision
from mucudnn.database.database import Database
from mucudnn.measuring.operands import Operands
from mucudnn.measuring.timing.candidate_errors import CANDIDATE_ERRORS
from mucudnn.measuring.timing.timer import Runner
from mucudnn.measuring.whole_runs import Machine, training_operands
from mucudnn.tuning.result import TunedProblem
from mucudnn.tuning.tuner import Priors, tune_tasks
from mucudnn.words.config import BatchSizePolicy, Config
from mucudnn.words.errors import InfeasibleError, first_line
from mucudnn.words.problem import ConvProblem
from mucudnn.words.progress import Progress, share_of, silent
from mucudnn.words.results import Configuration, MicroConfig
from mucudnn.words.task import Task
from mucudnn.words.torch_settings import TORCHS_OWN

UNDIVIDED, OURS, DIVIDED = "undivided", "mucudnn", "mucudnn-wd"

_Choice = tuple[str, BatchSizePolicy, int | None]  # contestant, policy, limit or budget in bytes
_Tuned = tuple[TunedProblem | str, float | None]  # what was chosen, or why nothing was; seconds that it took by itself
_Call = str | tuple[MicroConfig, ...]  # a variant of torch, or a configuration
_Time = MedianTime | Exception


@dataclass(frozen=True, slots=True)
class Contests:
    """Everything that the contests of a run have in common.

    variants: torch's, by name. policies, limits: those under which ours is chosen; the undivided is, under each limit.
    divisions: what else is timed, as it was chosen where one budget was divided over all problems. at_best: whether two
    limits of the problem's own come first: the workspace of the fastest undivided algorithm, and one byte less.
    """

    config: Config
    machine: Machine
    database: Database
    variants: Mapping[str, Runner]
    policies: Sequence[BatchSizePolicy]
    limits: Sequence[int | None]
    rounds: TurnRounds
    priors: Priors = field(default_factory=dict)
    divisions: Sequence[NetworkDivision] = ()
    at_best: bool = False

    def rows(self, layer: Layer, problem: ConvProblem, progress: Progress) -> tuple[list[Row], list[TunedProblem]]:
        """Measure one problem; return its rows, and what was tuned for them.

        What cannot be run has a row with the reason. Raises ``KeyboardInterrupt``.
        """
        policies = dict.fromkeys((BatchSizePolicy.UNDIVIDED, *self.policies))
        limits = dict.fromkeys((*self._limits_at_best(layer, problem), *self.limits))
        wanted = [(policy, limit) for policy in policies for limit in limits]
        chosen: dict[_Choice, _Tuned] = {}
        for index, (policy, limit) in enumerate(wanted):
            part = share_of(progress, index / (len(wanted) + 1), 1 / (len(wanted) + 1))
            contestant = UNDIVIDED if policy is BatchSizePolicy.UNDIVIDED else OURS
            start_s = self.machine.clock.now()
            tuned = self._choose(layer, problem, policy, limit, part)
            chosen[contestant, policy, limit] = tuned, self.machine.clock.now() - start_s
        for one in self.divisions:
            chosen[DIVIDED, one.policy, one.budget_bytes] = one.chosen(layer, problem), None
        progress(f"{layer.name}, {problem}: in turns", len(wanted) / (len(wanted) + 1))
        tunings = [tuned for tuned, _ in chosen.values() if isinstance(tuned, TunedProblem)]
        times = self._time(layer, problem, [tuned.configuration for tuned in tunings])
        subject = subject_of(layer, problem)
        rows = [*self._torchs(subject, times, tunings), *_ours(subject, times, chosen)]
        return [replace(row, more={**row.more, "count": layer.count}) for row in rows], tunings

    def _limits_at_best(self, layer: Layer, problem: ConvProblem) -> Sequence[int]:
        """Return the two limits around the best algorithm; none where it takes no workspace, or there is none."""
        if not self.at_best:
            return ()
        best = self._choose(layer, problem, BatchSizePolicy.UNDIVIDED, None, silent)
        most = 0 if isinstance(best, str) else best.configuration.workspace_bytes
        return (most, most - 1) if most else ()

    def _choose(
        self, layer: Layer, problem: ConvProblem, policy: BatchSizePolicy, limit: int | None, progress: Progress
    ) -> TunedProblem | str:
        """Return our choice under a limit, or the reason why there is none."""
        config = replace(self.config, policy=policy, workspace_limit=limit)
        name = f"{layer.name}, {problem}"
        task = Task(problem, layer.batch_size, limit, layer.count, name, baseline_exempt=config.baseline_exempt)
        try:
            tuning = tune_tasks(
                [task],
                config,
                progress=progress,
                machine=self.machine,
                database=self.database,
                priors=self.priors,
            )
        except InfeasibleError as error:
            return " ".join(str(error).split())
        except CANDIDATE_ERRORS as error:
            return first_line(error)
        return tuning.problems[0]

    def _time(
        self, layer: Layer, problem: ConvProblem, configurations: Sequence[Configuration]
    ) -> Mapping[_Call, _Time]:
        """Time torch's variants and the configurations in turns. What runs in the same way is run once."""
        try:
            operands = training_operands(problem, layer.batch_size, self.machine.device)
            contestants = self._contestants(problem, operands, configurations)
        except CANDIDATE_ERRORS as error:  # no memory for the mini-batch
            return dict.fromkeys((*self.variants, *(c.micro_configs for c in configurations)), error)
        times = try_in_turns([*contestants.values()], self.rounds, self.machine.clock)
        found: dict[_Call, _Time] = dict(zip(contestants, times, strict=True))
        return found | {c.micro_configs: found[TORCH] for c in configurations if c.is_baseline}

    def _contestants(
        self, problem: ConvProblem, operands: Operands, configurations: Sequence[Configuration]
    ) -> dict[_Call, Contestant]:
        torchs = partial(self.machine.run_torch, problem, operands)
        contestants: dict[_Call, Contestant] = {name: Contestant(torchs, run) for name, run in self.variants.items()}
        for one in configurations:
            if not one.is_baseline and one.micro_configs not in contestants:
                call = self.machine.whole_run(problem, one, operands, keeps_workspace=True)
                contestants[one.micro_configs] = Contestant(call)
        return contestants

    def _torchs(self, subject: Subject, times: Mapping[_Call, _Time], tunings: Sequence[TunedProblem]) -> Iterator[Row]:
        measured = {m.micro_config: m for tuned in tunings for m in tuned.measurements}
        baseline = measured.get(MicroConfig(TORCHS_OWN, subject["batch_size"]))
        error = None if baseline is None else baseline.relative_error
        for name in self.variants:
            yield _row(Row(subject, name, relative_error=error), times[name])


def subject_of(layer: Layer, problem: ConvProblem) -> Subject:
    return {"layer": layer.name, **problem_columns(problem, layer.batch_size)}


def _ours(subject: Subject, times: Mapping[_Call, _Time], chosen: Mapping[_Choice, _Tuned]) -> Iterator[Row]:
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
                "reason": tuned.reason,
                "solve_s": tuned.account and tuned.account.solve_time_s,
            },
        )
        yield _row(row, times[tuned.configuration.micro_configs])


def _row(row: Row, time: _Time) -> Row:
    """Complete a row with its samples, or with the reason why there are none."""
    if isinstance(time, MedianTime):
        return replace(row, samples_s=time.samples_s)
    return replace(row, failure=first_line(time))
