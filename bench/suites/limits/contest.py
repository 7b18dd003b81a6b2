"""Runs one problem whole: who is best under each workspace limit, and how little makes ours as fast as torch.

The best of the likely configurations is found by runs that are not reported. So no winner is reported with the luck
that made it win.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from mucudnn.bench.contests.names import TORCH
from mucudnn.bench.contests.timing import Contestant, MedianTime, time_in_turns
from mucudnn.bench.suites.limits.result import WITHIN, ComparedProblem, LimitsComparison, Run, SameTime, UnderLimit
from mucudnn.bench.suites.limits.undivided import Undivided, run_alone
from mucudnn.kernels.contract.allocation import peak_allocated_bytes
from mucudnn.measuring.operands import Operands, random_operands
from mucudnn.measuring.timing.comparison import Comparison
from mucudnn.measuring.timing.timer import Runner
from mucudnn.measuring.whole_runs import Machine
from mucudnn.solver.front import desirable_sets
from mucudnn.tuning.choose import Outcome, baseline_of, choose
from mucudnn.tuning.contenders import contenders
from mucudnn.words.results import Configuration, Measurement, MicroConfig, WholeRun
from mucudnn.words.task import Task

_RIVALS = 3  # run whole under a limit: a predicted time may be that of a single sample
_LIKELY = 1.1  # a prediction this far above torch's time may be as fast: sums of parts are not exact

Chosen = Mapping[int | None, Configuration | None]  # by limit
MicroConfigs = tuple[MicroConfig, ...]  # the key of a configuration, which may have two workspaces (``Undivided``)


@dataclass(slots=True)
class Contest:
    """Whole runs of one problem. ``variants``: torch's, by name; ``rounds``: samples of each that is reported.

    ``outcomes``: the runs against torch that decide who is the best under a limit.
    """

    task: Task
    machine: Machine
    measurements: Sequence[Measurement]
    variants: Mapping[str, Runner]
    rounds: int
    undivided: Undivided = field(init=False)
    operands: Operands = field(init=False)
    outcomes: dict[MicroConfigs, Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.undivided = Undivided.of(self.task, self.machine, self.measurements)

    def compare(self, known: LimitsComparison) -> ComparedProblem:
        """Compare under every limit, and with the reference. Raises what torch's and the chosen runs raise."""
        rivals, ours = self._choose(known.limits)
        self.operands = random_operands(self.task.problem, self.task.batch_size, self.machine.device)
        times = self._time(rivals, ours)
        under = []
        for limit in known.limits:
            theirs, mine = rivals[limit], ours[limit]
            rival = None if theirs is None else Run(theirs, times[self._rival_key(theirs)])
            under.append(UnderLimit(limit, rival, None if mine is None else Run(mine, times[_key(mine)])))
        torchs = {variant: times[variant] for variant in self.variants}
        same_time = self._same_time(known.reference, torchs, under)
        return ComparedProblem(self.task, torchs, tuple(under), same_time)

    def _choose(self, limits: Sequence[int | None]) -> tuple[Chosen, Chosen]:
        """The rival's and our configuration under each limit, chosen by whole runs in the same turns."""
        n = self.task.batch_size
        rivals = {limit: self.undivided.within(limit, _RIVALS) for limit in limits}
        ours = {limit: contenders(self.measurements, n, limit) for limit in limits}
        self._verify(self.task, [c for likely in (*rivals.values(), *ours.values()) for c in likely])
        return (
            {limit: self._fastest(likely) for limit, likely in rivals.items()},
            {limit: self._ours(limit) if likely else None for limit, likely in ours.items()},
        )

    def _ours(self, limit_bytes: int | None) -> Configuration:
        """The configuration that ``mucudnn tune`` chooses with this limit."""
        return choose(replace(self.task, limit_bytes=limit_bytes), self.measurements, self._verify).configuration

    def _fastest(self, configurations: Sequence[Configuration]) -> Configuration | None:
        times = {c: o.time_s for c in configurations if isinstance(o := self.outcomes[c.micro_configs], WholeRun)}
        return min(times, key=lambda c: times[c], default=None)

    def _verify(self, task: Task, configurations: Sequence[Configuration]) -> Mapping[Configuration, Outcome]:
        """Run configurations whole against torch, each of them once."""
        missing = {c.micro_configs: c for c in configurations if c.micro_configs not in self.outcomes}
        if missing:
            outcomes = self.machine.compare(task.problem, task.batch_size, [*missing.values()], keeps_workspace=True)
            self.outcomes |= {key: _outcome(o) for key, o in zip(missing, outcomes, strict=True)}
        return {c: self.outcomes[c.micro_configs] for c in configurations}

    def _time(self, rivals: Chosen, ours: Chosen) -> dict[Hashable, MedianTime]:
        """Time torch's variants, the rivals and ours in turns. What runs in the same way is run once."""
        contestants: dict[Hashable, Contestant] = {variant: self._torch(variant) for variant in self.variants}
        contestants |= {self._rival_key(c): self._rival(c) for c in rivals.values() if c is not None}
        contestants |= {_key(c): self._contestant(c) for c in ours.values() if c is not None}
        times = time_in_turns([*contestants.values()], self.rounds, self.machine.clock)
        return dict(zip(contestants, times, strict=True))

    def _same_time(self, reference: str, torchs: Mapping[str, MedianTime], under: Sequence[UnderLimit]) -> SameTime:
        """The least workspace with which ours ran as fast as the reference, in turns with it.

        The runs that there are come first. Then the desirable set is bisected: time falls as workspace grows.
        """
        runs = [one.ours for one in under if one.ours is not None and not one.ours.configuration.is_baseline]
        if baseline := baseline_of(self.measurements, self.task.batch_size):  # it needs what torch's call allocates
            runs.append(Run(replace(baseline, workspace_bytes=self._torch_bytes(TORCH)), torchs[TORCH]))
        fast = [run for run in runs if _is_as_fast(run.measured, torchs[reference])]
        found = min(fast, key=lambda run: run.workspace_bytes, default=None)
        points = self._smaller_and_likely(found, torchs[reference])
        first, last = 0, len(points)
        while first < last:
            middle = (first + last) // 2
            both = [self._torch(reference), self._contestant(points[middle])]
            theirs, ours = time_in_turns(both, self.rounds, self.machine.clock)
            if _is_as_fast(ours, theirs):
                last, found = middle, Run(points[middle], ours)
            else:
                first = middle + 1
        return SameTime(self._torch_bytes(reference), found)

    def _smaller_and_likely(self, found: Run | None, reference: MedianTime) -> list[Configuration]:
        """Desirable configurations that need less than ``found`` and may be as fast as the reference."""
        n = self.task.batch_size
        return [
            c
            for c in desirable_sets(self.measurements, n).of(n)
            if not c.is_baseline
            and c.time_s <= _LIKELY * (1 + WITHIN) * reference.time_s
            and (found is None or c.workspace_bytes < found.workspace_bytes)
        ]

    def _torch_bytes(self, variant: str) -> int:
        """Bytes that torch allocates beside its result, once it has found its engine."""
        torchs = self._torch(variant)
        peak = torchs.runner(partial(peak_allocated_bytes, torchs.call, self.machine.device))
        result = self.operands.written(self.task.problem.operation)
        return max(0, peak - result.numel() * result.itemsize)

    def _torch(self, variant: str) -> Contestant:
        return Contestant(partial(self.machine.run_torch, self.task.problem, self.operands), self.variants[variant])

    def _contestant(self, configuration: Configuration) -> Contestant:
        """The call of a configuration. Torch's own runs where torch does, with the same choice of an engine."""
        if configuration.is_baseline:
            return self._torch(TORCH)
        return Contestant(self.machine.whole_run(self.task.problem, configuration, self.operands))

    def _rival(self, configuration: Configuration) -> Contestant:
        rival = self.undivided.of_library(configuration)
        if rival is None:
            return self._contestant(configuration)
        return Contestant(partial(run_alone, rival, self.task.problem, self.operands))

    def _rival_key(self, configuration: Configuration) -> Hashable:
        key = _key(configuration)
        return key if self.undivided.of_library(configuration) is None else ("alone", key)


def _key(configuration: Configuration) -> Hashable:
    return TORCH if configuration.is_baseline else configuration.micro_configs


def _is_as_fast(ours: MedianTime, theirs: MedianTime) -> bool:
    return ours.time_s <= (1 + WITHIN) * theirs.time_s


def _outcome(outcome: Comparison | Exception | None) -> Outcome:
    return outcome.whole_run if isinstance(outcome, Comparison) else outcome
