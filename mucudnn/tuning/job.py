"""One task while it is tuned: its candidates, their results, and the findings that ranks exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, prod
from typing import Any, cast

from mucudnn.measuring.candidates import Candidate
from mucudnn.tuning.choose import Outcome, refuted
from mucudnn.tuning.infeasible import smallest_bytes
from mucudnn.tuning.result import LeftOut, TunedProblem, allowed
from mucudnn.words.errors import MucudnnError
from mucudnn.words.problem import ConvProblem
from mucudnn.words.results import Failure, Measurement, MicroConfig, WholeRun
from mucudnn.words.task import Task

_FOUND = ("results", "left_out", "declared_bytes", "outcomes", "is_chosen")  # what other ranks need to choose alike


@dataclass(slots=True)
class Job:
    """One task: its candidates and their results. left_out: by the time limit.

    outcomes: of whole runs, by configuration. declared_bytes: see ``baseline_bytes``. choice: None until it is made.
    is_own: whether it is measured here. is_chosen: whether the rank that measures it has made a choice; None if
    unknown.
    """

    task: Task
    error_bound: float
    candidates: list[Candidate]
    unsupported: list[Failure]
    results: dict[MicroConfig, Measurement | Failure]
    left_out: LeftOut = field(default_factory=LeftOut)
    outcomes: dict[tuple[MicroConfig, ...], Outcome] = field(default_factory=dict)
    declared_bytes: int | None = None
    choice: TunedProblem | None = None
    is_own: bool = True
    is_chosen: bool | None = None

    def findings(self) -> Mapping[str, Any]:
        """Return what other ranks need to choose alike. Exceptions are replaced by ones that can be pickled."""
        outcomes = self.outcomes.items()
        readable = {of: MucudnnError(str(one)) if isinstance(one, Exception) else one for of, one in outcomes}
        found = {name: getattr(self, name) for name in _FOUND}
        return found | {"outcomes": readable, "is_chosen": self.choice is not None}

    def learn(self, told: Mapping[str, Any]) -> None:
        """Take over the findings of another rank."""
        for name in _FOUND:
            setattr(self, name, told[name])

    @property
    def barred(self) -> Failure | None:
        """The lasting failure of the baseline, which is then neither run nor chosen; None if there is none."""
        result = self.results.get(self.task.baseline)
        is_barred = isinstance(result, Failure) and result.is_lasting and not result.is_passed_over
        return cast(Failure, result) if is_barred else None

    def measured_task(self, limit_bytes: int | None) -> Task:
        """Return the task under another limit, from which a barred baseline is not exempt."""
        fits = self.task.baseline_exempt and self.barred is None
        in_headroom = self.task.in_headroom and self.barred is None
        return replace(self.task, limit_bytes=limit_bytes, baseline_exempt=fits, in_headroom=in_headroom)

    def baseline_bytes(self) -> int | None:
        """Count the workspace of an unmeasured baseline by running it; None if it was measured or cannot be counted.

        It is counted again, since there may have been no memory the first time.
        """
        if self.barred is not None or isinstance(self.results.get(self.task.baseline), Measurement):
            return None
        baseline = next(replace(c) for c in self.candidates if c.micro_config == self.task.baseline)
        return baseline.workspace_bytes if baseline.is_countable else None

    def forget_failures(self) -> None:
        """Forget failures, so that they are retried, except those of foreign code, which may have ended a process."""
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
        """Return measurements of algorithms that the error bound allows."""
        return allowed(self.measurements(), self.error_bound)

    def failed_candidates(self) -> list[Failure]:
        """Return the failures of candidates that ran: not of unsupported problems, nor of candidates passed over."""
        known = (self.results.get(candidate.micro_config) for candidate in self.candidates)
        return [result for result in known if isinstance(result, Failure) and not result.is_passed_over]

    def failures(self) -> list[Failure]:
        return [*self.unsupported, *(result for result in self.results.values() if isinstance(result, Failure))]

    def tuned(self, choice: TunedProblem, runs: Mapping[tuple[MicroConfig, ...], WholeRun]) -> TunedProblem:
        """Return the choice with everything known of the candidates. runs: whole runs of any batch size."""
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
        """Return the least workspace of a configuration of candidates that did not fail and are within the error bound.

        A baseline that failed for lack of memory counts: measuring takes more memory than running.
        """
        return _least_declared_bytes(self._usable(), self.task.batch_size)

    def bytes_in_smallest_pieces(self) -> int | None:
        """Return the least workspace with the smallest micro-batches alone, so that few candidates must run."""
        usable = self._usable()
        least = min((c.micro_batch_size for c in usable), default=0)
        smallest = [c for c in usable if c.micro_batch_size == least]
        return _least_declared_bytes(smallest, self.task.batch_size)

    def is_feasible(self) -> bool:
        """Whether any configuration fits. The baseline is checked first: it mostly fits, which takes few runs."""
        if self.is_chosen is not None:
            return self.is_chosen
        if (self.task.in_headroom or self.task.baseline_exempt) and self.barred is None:
            return True
        usable = self._usable()
        limit = inf if self.task.limit_bytes is None else self.task.limit_bytes
        torchs = [c for c in usable if c.algorithm.is_torchs_own and not c.algorithm.is_search]
        undivided = [c for c in torchs if c.micro_config == self.task.baseline]
        least = min((c.micro_batch_size for c in torchs), default=0)
        smallest_pieces = [c for c in torchs if c.micro_batch_size == least]
        known = [c for c in usable if not c.counts_any_run]
        for candidates in (undivided, known, smallest_pieces, torchs, [c for c in usable if c.handed_bytes <= limit]):
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
    """Solve for the least declared workspace, with made-up times, so that nothing has to be measured."""
    return smallest_bytes([c.at_any_time() for c in candidates if c.is_countable], batch_size)


# To measure a problem quickly on one core, all candidates and samples together (AlexNet and MobileNetV2, torch 2.13,
# Intel Xeon 2.50 GHz). Only the ratios count: they say how much longer a large convolution takes than a small one.
_OVERHEAD_S = 0.3
_FLOPS_PER_S = 5e9
_BYTES_PER_S = 35e6


class Alone:
    """The ranks of a tuning on a single rank."""

    are_several = False

    def own(self, jobs: Sequence[Job], cost: Callable[[Job], float]) -> Sequence[Job]:
        """Return the jobs that this rank measures. cost: the expected cost of a job, in any unit."""
        return jobs

    def exchange(self, jobs: Sequence[Job]) -> None:
        """Exchange findings with the ranks of the same kind of device."""

    def everywhere(self, holds: bool) -> bool:
        """Return whether a condition holds on all ranks, of any kind of device, so that they go on alike."""
        return holds


def expected_s(problem: ConvProblem, batch_size: int) -> float:
    """Estimate how long a problem takes to measure, from its FLOPs and tensors; only ratios are meaningful."""
    shapes = problem.x_shape(batch_size), problem.w_shape(), problem.y_shape(batch_size)
    moved_bytes = problem.item_bytes * sum(map(prod, shapes))
    return _OVERHEAD_S + problem.flops(batch_size) / _FLOPS_PER_S + moved_bytes / _BYTES_PER_S
