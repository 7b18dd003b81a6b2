"""Answers of solvers, and the choice for one problem with its reason (``TunedProblem``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from math import inf, isfinite
from typing import Any

from mucudnn.core.problem import ConvProblem
from mucudnn.core.records import Configuration, Failure, Measurement, MicroConfig, Task, allowed, is_busy, source_of
from mucudnn.core.torch_settings import TORCHS_OWN
from mucudnn.core.values import format_bytes, format_seconds


class Status(StrEnum):
    OPTIMAL = "optimal"  # proven in whole picoseconds and bytes
    FEASIBLE = "feasible"  # within the limit; the gap bounds what a better answer could save


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Base class of solver answers.

    objective_s: the predicted time.
    bound_s: a lower bound on the best time.
    solve_time_s: the wall time of the solver, which is ignored when answers are compared.
    """

    objective_s: float
    bound_s: float
    status: Status
    solve_time_s: float = field(compare=False)

    @property
    def gap(self) -> float:
        """The optimality gap: the largest fraction of ``objective_s`` that a better answer could save."""
        return (self.objective_s - self.bound_s) / self.objective_s if self.objective_s else 0.0

    @property
    def verdict(self) -> str:
        """The quality of the answer in words: optimal, or the fraction of its time that a better answer could save."""
        return "optimal" if self.status is Status.OPTIMAL else f"at most {self.gap:.2g} of it could be saved"

    def proof(self) -> dict[str, object]:
        """Return times, gap, status and solve time as plain values for ``json.dumps``, with units in the names."""
        return {
            "objective_s": self.objective_s,
            "bound_s": self.bound_s,
            "gap": self.gap,
            "status": str(self.status),
            "solve_time_s": self.solve_time_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Account(Answer):
    """The best configuration of one problem, with figures on how it was found. It is always optimal.

    what: the name of the problem, in words.
    front_size: the size of the desirable set (the Pareto front of time and workspace).
    smallest_feasible_bytes: the least workspace in the set.
    """

    what: str
    batch_size: int
    measurements: int
    front_size: int
    limit_bytes: int | None
    smallest_feasible_bytes: int
    configuration: Configuration

    def to_json(self) -> dict[str, object]:
        """Return the configuration and all figures as plain values for ``json.dumps``, with units in the names."""
        return {
            **self.proof(),
            "what": self.what,
            "batch_size": self.batch_size,
            "measurements": self.measurements,
            "front_size": self.front_size,
            "limit_bytes": self.limit_bytes,
            "smallest_feasible_bytes": self.smallest_feasible_bytes,
            "workspace_bytes": self.configuration.workspace_bytes,
            "configuration": str(self.configuration),
        }

    def __str__(self) -> str:
        return (
            f"{self.what or 'convolution'}, batch {self.batch_size}: {self.configuration}, "
            f"{format_seconds(self.objective_s)} in "
            f"{format_bytes(self.configuration.workspace_bytes)} (limit {format_bytes(self.limit_bytes)}, smallest "
            f"feasible {format_bytes(self.smallest_feasible_bytes)}), {self.verdict}; {self.front_size} desirable "
            f"configurations from {self.measurements} measurements, {format_seconds(self.solve_time_s)}"
        )


@dataclass(frozen=True, slots=True)
class TunedProblem:
    """The choice for one problem, with its reason.

    Times are medians of complete calls, interleaved with torch's own. If a replay has no whole runs, they are
    predictions, as ``reason`` says. ``measurements`` and ``failures`` cover all candidates, including those that exceed
    the workspace limit or ``error_bound``.

    configuration: what runs; its ``time_s`` is the solver's prediction.
    baseline_s: time of torch's own convolution; None if it was not measured at this batch size.
    relative_error: None for torch's own if it could not be compared.
    limit_bytes: the workspace limit, or the problem's share of a budget.
    left_out: candidates not measured for lack of time.
    refuted: configurations of smaller batches that were not faster than torch's own in whole runs.
    account: the solver's result under the limit, before whole runs; None if nothing measured fits, and for a share of a
    budget.
    in_place: times in the model's own step, or what a graph runs, in words; empty if it was not confirmed.
    unrestricted_s: the time of the fastest choice, of one whose bits do not depend on the batch; None for others.
    load: the machine's load during the whole runs, as in ``Measurement``; None if unknown.
    """

    problem: ConvProblem
    batch_size: int
    configuration: Configuration
    baseline_s: float | None
    time_s: float
    relative_error: float | None
    reason: str
    measurements: tuple[Measurement, ...] = ()
    failures: tuple[Failure, ...] = ()
    limit_bytes: int | None = None
    error_bound: float = inf
    left_out: tuple[MicroConfig, ...] = ()
    refuted: tuple[tuple[MicroConfig, ...], ...] = ()
    account: Account | None = field(default=None, compare=False, repr=False)
    in_place: str = ""
    unrestricted_s: float | None = None
    load: float | None = field(default=None, compare=False)

    @classmethod
    def of(
        cls,
        task: Task,
        configuration: Configuration,
        baseline_s: float | None,
        time_s: float,
        reason: str,
        load: float | None = None,
    ) -> TunedProblem:
        """Return the choice for a task, without the results of its candidates, which ``knowing`` adds."""
        return cls(
            problem=task.problem,
            batch_size=task.batch_size,
            configuration=configuration,
            baseline_s=baseline_s,
            time_s=time_s,
            relative_error=None,
            reason=reason,
            limit_bytes=task.limit_bytes,
            load=load,
        )

    def knowing(
        self,
        measurements: Sequence[Measurement],
        failures: Sequence[Failure] = (),
        *,
        error_bound: float,
        left_out: tuple[MicroConfig, ...] = (),
        refuted: tuple[tuple[MicroConfig, ...], ...] = (),
    ) -> TunedProblem:
        """Return a copy of this choice with the measurements and failures of all candidates added."""
        return replace(
            self,
            relative_error=relative_error_of(self.configuration, measurements),
            reason=self.reason + ("; of what was measured within the time limit" if left_out else ""),
            measurements=tuple(measurements),
            failures=tuple(failures),
            error_bound=error_bound,
            left_out=left_out,
            refuted=refuted,
        )

    @property
    def allowed_measurements(self) -> list[Measurement]:
        """Measurements of the algorithms whose errors are within the bound."""
        return allowed(self.measurements, self.error_bound)

    @property
    def barred(self) -> Failure | None:
        """The permanent failure that forbids running torch's own undivided convolution; None if it may run."""
        baseline = MicroConfig(TORCHS_OWN, self.batch_size)
        lasting = (f for f in self.failures if f.micro_config == baseline and f.is_lasting and not f.is_passed_over)
        return next(lasting, None)

    @property
    def least_baseline_s(self) -> float | None:
        """Time of torch's own convolution, or the least it takes if it was too slow to be measured; None if unknown."""
        return self.baseline_s if self.barred is None else self.barred.least_s

    @property
    def is_disturbed(self) -> bool:
        """Whether the choice depends on measurements made on a busy machine."""
        compared = {*self.configuration.micro_configs, MicroConfig(TORCHS_OWN, self.batch_size)}
        return is_busy(self.load) or any(m.is_disturbed for m in self.measurements if m.micro_config in compared)

    @property
    def speedup(self) -> float | None:
        """Time of torch's own convolution / time of the chosen configuration; None if the former is unknown."""
        return None if self.baseline_s is None else self.baseline_s / self.time_s

    def __str__(self) -> str:
        chosen = self.configuration
        speedup = "unknown" if self.speedup is None else f"{self.speedup:.2f}"
        error = "not measured" if self.relative_error is None else f"{self.relative_error:.1e}"
        left_out = left_out_in_words([self])
        return "\n".join(
            (
                f"{self.problem}, batch {self.batch_size}",
                f"  PyTorch    {self._torchs_time()}",
                f"  chosen     {chosen}: {format_seconds(self.time_s)} (predicted {format_seconds(chosen.time_s)}), "
                f"speedup {speedup}",
                f"  workspace  {format_bytes(chosen.workspace_bytes)}, relative error {error}",
                *([f"  in place   {self.in_place}"] if self.in_place else []),
                f"  why        {self.reason}",
                *([f"  left out   {left_out}"] if left_out else []),
            )
        )

    def _torchs_time(self) -> str:
        if self.least_baseline_s is None:
            return "not measured"
        return ("more than " if self.baseline_s is None else "") + format_seconds(self.least_baseline_s)

    def to_json(self) -> dict[str, Any]:
        """Return the choice as plain values for ``json.dumps``, in seconds and bytes."""
        bound = self.error_bound if isfinite(self.error_bound) else None
        return {name: value for name, value in asdict(self).items() if name not in ("account", "in_place")} | {
            "speedup": self.speedup,
            "error_bound": bound,
        }


def left_out_in_words(tuned: Sequence[TunedProblem]) -> str:
    """Return a description of the candidates that a time limit left unmeasured; empty if there are none."""
    unmeasured = [micro_config for problem in tuned for micro_config in problem.left_out]
    if not unmeasured:
        return ""
    worth_measuring = sum(len(problem.measurements) for problem in tuned) + len(unmeasured)
    names = ", ".join(sorted({source_of(micro_config.algorithm) for micro_config in unmeasured}))
    return f"time limit: {len(unmeasured)} of {worth_measuring} candidates were not measured ({names}): give it more"


def row_of(tuned: TunedProblem) -> dict[str, Any]:
    return asdict(tuned.problem) | {
        "batch_size": tuned.batch_size,
        "configuration": str(tuned.configuration),
        "baseline_s": tuned.baseline_s,
        "time_s": tuned.time_s,
        "predicted_s": tuned.configuration.time_s,
        "speedup": tuned.speedup,
        "workspace_bytes": tuned.configuration.workspace_bytes,
        "relative_error": tuned.relative_error,
        "unmeasured": len(tuned.left_out),
        "is_disturbed": tuned.is_disturbed,
    }


def relative_error_of(configuration: Configuration, measurements: Iterable[Measurement]) -> float | None:
    """Return the largest error of a configuration's algorithms against float64; None if none was measured."""
    used = set(configuration.algorithms)
    return max((m.relative_error for m in measurements if m.micro_config.algorithm in used), default=None)
