"""One task (a convolution to tune) with its candidates and results, and the findings that ranks exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, prod
from typing import Any, cast

from mucudnn.core.errors import MucudnnError
from mucudnn.core.problem import ConvProblem
from mucudnn.core.records import Comparison, Failure, Measurement, MicroConfig, Task
from mucudnn.measuring.candidates import Candidate
from mucudnn.tuning.choose import Outcome, refuted
from mucudnn.tuning.infeasible import smallest_bytes
from mucudnn.tuning.result import TunedProblem, allowed

_FOUND = ("results", "left_out", "declared_bytes", "outcomes", "is_chosen")  # fields that other ranks need


@dataclass(slots=True)
class Job:
    """One task (a convolution to tune): its candidates and their results. left_out: candidates cut by the time limit.

    outcomes: whole runs or their errors, by configuration. declared_bytes: see ``baseline_bytes``. choice: None until
    it is made. is_own: whether this rank measures the task. is_chosen: whether the measuring rank has made a choice;
    None if unknown.
    """

    task: Task
    error_bound: float
    candidates: list[Candidate]
    unsupported: list[Failure]
    results: dict[MicroConfig, Measurement | Failure]
    left_out: tuple[MicroConfig, ...] = ()
    outcomes: dict[tuple[MicroConfig, ...], Outcome] = field(default_factory=dict)
    declared_bytes: int | None = None
    choice: TunedProblem | None = None
    is_own: bool = True
    is_chosen: bool | None = None

    def findings(self) -> Mapping[str, Any]:
        """Return the results that other ranks need for the same choice, with errors replaced by picklable ones."""
        outcomes = self.outcomes.items()
        readable = {of: MucudnnError(str(one)) if isinstance(one, Exception) else one for of, one in outcomes}
        found = {name: getattr(self, name) for name in _FOUND}
        return found | {"outcomes": readable, "is_chosen": self.choice is not None}

    def learn(self, told: Mapping[str, Any]) -> None:
        """Adopt the results of another rank, as returned by its ``findings``."""
        for name in _FOUND:
            setattr(self, name, told[name])

    @property
    def barred(self) -> Failure | None:
        """The permanent failure that forbids running torch's own undivided convolution; None if it may run."""
        result = self.results.get(self.task.baseline)
        is_barred = isinstance(result, Failure) and result.is_lasting and not result.is_passed_over
        return cast(Failure, result) if is_barred else None

    def measured_task(self, limit_bytes: int | None) -> Task:
        """Return the task with another limit, which torch's own is not exempt from if it must not run."""
        fits = self.task.baseline_exempt and self.barred is None
        in_headroom = self.task.in_headroom and self.barred is None
        return replace(self.task, limit_bytes=limit_bytes, baseline_exempt=fits, in_headroom=in_headroom)

    def baseline_bytes(self) -> int | None:
        """Return the workspace of torch's own, counted in a run; None if it was measured or cannot be counted.

        Each call repeats the run, since an earlier one may have lacked memory.
        """
        if self.barred is not None or isinstance(self.results.get(self.task.baseline), Measurement):
            return None
        baseline = next(replace(c) for c in self.candidates if c.micro_config == self.task.baseline)
        return baseline.workspace_bytes if baseline.is_countable else None

    def forget_failures(self) -> None:
        """Forget failed candidates, so that they are retried, except foreign code with a permanent failure."""
        foreign = {c.micro_config for c in self.candidates if c.is_foreign}
        self.results = {
            of: r
            for of, r in self.results.items()
            if isinstance(r, Measurement) or r.is_passed_over or (of in foreign and r.is_lasting)
        }

    def measurements(self) -> list[Measurement]:
        known = (self.results.get(candidate.micro_config) for candidate in self.candidates)
        return [result for result in known if isinstance(result, Measurement)]

    def allowed(self) -> list[Measurement]:
        """Return the measurements of algorithms whose errors are within the bound."""
        return allowed(self.measurements(), self.error_bound)

    def failed_candidates(self) -> list[Failure]:
        """Return the failures of candidates that ran, without unsupported and skipped ones."""
        known = (self.results.get(candidate.micro_config) for candidate in self.candidates)
        return [result for result in known if isinstance(result, Failure) and not result.is_passed_over]

    def failures(self) -> list[Failure]:
        return [*self.unsupported, *(result for result in self.results.values() if isinstance(result, Failure))]

    def tuned(self, choice: TunedProblem, runs: Mapping[tuple[MicroConfig, ...], Comparison]) -> TunedProblem:
        """Return the choice with the measurements and failures of all candidates.

        runs: whole runs of the problem, for any batch size.
        """
        measured = self.measurements()
        if self.barred is not None:
            choice = replace(choice, reason=f"by prediction, since torch's own is barred: {self.barred.reason}")
        task = replace(self.task, limit_bytes=choice.limit_bytes)
        known: dict[str, Any] = {
            "error_bound": self.error_bound,
            "left_out": self.left_out,
            "refuted": refuted(task, measured, runs),
        }
        return choice.knowing(measured, self.failures(), **known)

    def smallest_feasible_bytes(self) -> int | None:
        """Return the smallest workspace of a configuration of candidates without failures or excessive errors.

        Torch's own counts even if it failed for lack of memory, since running takes less memory than measuring.
        """
        return _least_declared_bytes(self._usable(), self.task.batch_size)

    def bytes_in_smallest_pieces(self) -> int | None:
        """Return the smallest workspace of a configuration of smallest micro-batches only, which takes few runs."""
        usable = self._usable()
        least = min((c.micro_batch_size for c in usable), default=0)
        smallest = [c for c in usable if c.micro_batch_size == least]
        return _least_declared_bytes(smallest, self.task.batch_size)

    def is_feasible(self) -> bool:
        """Return whether a configuration fits the limit. Torch's own is tried first, since it usually fits."""
        if self.is_chosen is not None:
            return self.is_chosen
        if (self.task.in_headroom or self.task.baseline_exempt) and self.barred is None:
            return True
        usable = self._usable()
        limit = inf if self.task.limit_bytes is None else self.task.limit_bytes
        torchs = [c for c in usable if c.algorithm.is_torchs_own]
        undivided = [c for c in torchs if c.micro_config == self.task.baseline]
        least = min((c.micro_batch_size for c in torchs), default=0)
        smallest_pieces = [c for c in torchs if c.micro_batch_size == least]
        known = [c for c in usable if not c.counts_any_run]
        ours = [c for c in known if not c.is_foreign]  # foreign ones have to be proven
        for candidates in (
            undivided,
            ours,
            known,
            smallest_pieces,
            torchs,
            [c for c in usable if c.handed_bytes <= limit],
        ):
            smallest = _least_declared_bytes(candidates, self.task.batch_size)
            if smallest is not None and smallest <= limit:
                return True
        return False

    def _usable(self) -> list[Candidate]:
        permitted = {m.micro_config.algorithm for m in self.allowed()}
        barred = {m.micro_config.algorithm for m in self.measurements()} - permitted
        lasting = [f for f in self.failures() if f.is_lasting or f.micro_config != self.task.baseline]
        failed = {f.micro_config for f in lasting if not f.is_passed_over}
        return [c for c in self.candidates if c.algorithm.name not in barred and c.micro_config not in failed]


def _least_declared_bytes(candidates: Sequence[Candidate], batch_size: int) -> int | None:
    """Return the smallest workspace of a configuration of the candidates; this may run them to count bytes."""
    return smallest_bytes([c.at_any_time() for c in candidates if c.is_countable], batch_size)


# Cost model of measuring a problem in a quick race, fitted on one core (AlexNet and MobileNetV2, torch 2.13, Xeon).
_OVERHEAD_S = 0.3
_FLOPS_PER_S = 5e9
_BYTES_PER_S = 35e6


class Alone:
    """Stand-in for the group of ranks that tune together, if there is only this process."""

    are_several = False

    def own(self, jobs: Sequence[Job], cost: Callable[[Job], float]) -> Sequence[Job]:
        """Return the jobs that this rank measures: here all. cost: estimates the cost of a job, in any unit."""
        return jobs

    def exchange(self, jobs: Sequence[Job]) -> None:
        """Exchange the jobs' results with the ranks of the same kind of device: here, do nothing."""

    def everywhere(self, holds: bool) -> bool:
        """Return whether a condition holds on all ranks: here, on this one."""
        return holds


def expected_s(problem: ConvProblem, batch_size: int) -> float:
    """Estimate the seconds to measure a problem, from its FLOPs and tensor sizes; only ratios are meaningful."""
    shapes = problem.x_shape(batch_size), problem.w_shape(), problem.y_shape(batch_size)
    moved_bytes = problem.item_bytes * sum(map(prod, shapes))
    return _OVERHEAD_S + problem.flops(batch_size) / _FLOPS_PER_S + moved_bytes / _BYTES_PER_S
