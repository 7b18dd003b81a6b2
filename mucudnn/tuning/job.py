"""One task with its candidates and results (``Job``), and what the steps of a tuning share (``Context``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, cast

from mucudnn.core.answers import TunedProblem
from mucudnn.core.config import BatchSizePolicy, Config
from mucudnn.core.errors import InvalidInputError, MucudnnError
from mucudnn.core.problem import ConvProblem
from mucudnn.core.records import Comparison, Environment, Failure, Measurement, MicroConfig, Task, allowed, source_of
from mucudnn.core.terminal import Progress
from mucudnn.core.torch_settings import TORCHS_OWN
from mucudnn.kernels.algorithm import Algorithm, is_local
from mucudnn.measuring.candidates import Candidate, Counted, find_candidates
from mucudnn.measuring.quiet import Quiet
from mucudnn.measuring.whole_runs import Machine
from mucudnn.solver.reuse import micro_batch_sizes
from mucudnn.store.tuning_store import EnvironmentStore
from mucudnn.tuning.prior import Prior

if TYPE_CHECKING:
    from mucudnn.tuning.sharing import Sharing

Priors = dict[Environment, Prior]
Outcome = Comparison | Exception | None  # a whole run, its error, or None if it was not run

_FOUND = ("results", "left_out", "declared_bytes", "outcomes", "is_chosen")  # fields that other ranks need


@dataclass(slots=True)
class Context:
    """What the steps of one tuning share: the machine, the store, the time, and what was found so far.

    A stored failure of torch's own convolution is retried, since everything is compared with it. Other failed
    candidates are retried only if no fitting one is left.

    ranks: the ranks that tune together; None if this process tunes alone.
    in_passing: as for ``tune_tasks``.
    versions: of the algorithms that may run.
    results: of each problem, the one place for them, which its tasks share.
    due_s: when the time of all problems begun so far ends.
    race_ends_s: when the current race does. Both are None without a time limit.
    ready: problems tuned so far, which survive an interruption.
    """

    config: Config
    machine: Machine
    store: EnvironmentStore
    quiet: Quiet
    progress: Progress
    priors: Priors
    ranks: Sharing | None = None
    versions: dict[str, int] = field(default_factory=dict)
    in_passing: bool = False
    results: dict[ConvProblem, dict[MicroConfig, Measurement | Failure]] = field(default_factory=dict)
    due_s: float | None = None
    race_ends_s: float | None = None
    ready: list[TunedProblem] = field(default_factory=list)

    def prior(self) -> Prior:
        """Return the expected times from all measurements of this machine so far, to which this tuning adds its own."""
        environment = self.machine.environment
        if environment not in self.priors:
            learnt = self.priors[environment] = Prior()
            for problem, measurements in self.store.every_measurement(self.versions).items():
                learnt.learn(problem, [m for m in measurements if not m.is_disturbed])
        return self.priors[environment]


@dataclass(slots=True)
class Job:
    """One task (a convolution to tune): its candidates and their results.

    candidates: empty if the task is solved from stored results, which then are all of candidates.
    results: of the problem, which its tasks share.
    counted: scratch bytes of candidates that were counted.
    left_out: candidates cut by the time limit.
    outcomes: whole runs or their errors, by configuration.
    declared_bytes: workspace of torch's own, counted in a run; None if it was measured or cannot be counted.
    choice: None until it is made.
    is_own: whether this process measures the task, and makes its whole runs.
    is_chosen: whether the measuring rank has made a choice; None if unknown.
    """

    task: Task
    error_bound: float
    candidates: Sequence[Candidate]
    unsupported: Sequence[Failure]
    results: dict[MicroConfig, Measurement | Failure]
    counted: Counted = field(default_factory=dict)
    left_out: tuple[MicroConfig, ...] = ()
    outcomes: dict[tuple[MicroConfig, ...], Outcome] = field(default_factory=dict)
    declared_bytes: int | None = None
    choice: TunedProblem | None = None
    is_own: bool = True
    is_chosen: bool | None = None

    def findings(self) -> Mapping[str, Any]:
        """Return the results that other ranks need for the same choice, with errors replaced by picklable ones."""
        outcomes = {c: MucudnnError(str(o)) if isinstance(o, Exception) else o for c, o in self.outcomes.items()}
        findings = {name: getattr(self, name) for name in _FOUND}
        return findings | {"outcomes": outcomes, "is_chosen": self.choice is not None}

    def learn(self, told: Mapping[str, Any]) -> None:
        """Adopt the results of another rank, as returned by its ``findings``."""
        for name in _FOUND:
            setattr(self, name, told[name])

    def barred(self) -> Failure | None:
        """Return the permanent failure that forbids running torch's own undivided convolution; None if it may run."""
        result = self.results.get(self.task.baseline)
        is_barred = isinstance(result, Failure) and result.is_lasting and not result.is_passed_over
        return cast(Failure, result) if is_barred else None

    def forget_failures(self) -> None:
        """Forget failed candidates, so that they are retried, except foreign code with a permanent failure."""
        for candidate in self.candidates:
            result = self.results.get(candidate.micro_config)
            if isinstance(result, Measurement) or result is None or result.is_passed_over:
                continue
            if not (candidate.is_foreign and result.is_lasting):
                del self.results[candidate.micro_config]

    def measurements(self) -> list[Measurement]:
        """Return the measurements in the order of the candidates."""
        micro_configs = [c.micro_config for c in self.candidates] or self.results
        results = (self.results.get(micro_config) for micro_config in micro_configs)
        return [result for result in results if isinstance(result, Measurement)]

    def allowed(self) -> list[Measurement]:
        """Return the measurements of algorithms whose errors are within the bound."""
        return allowed(self.measurements(), self.error_bound)

    def failures(self) -> list[Failure]:
        return [*self.unsupported, *(result for result in self.results.values() if isinstance(result, Failure))]


def exchange(jobs: Sequence[Job], ranks: Sharing) -> None:
    """Exchange the jobs' results with the other ranks, so that all have the results of all jobs."""
    findings = {number: job.findings() for number, job in enumerate(jobs) if job.is_own}
    for number, told in ranks.exchange(findings).items():
        jobs[number].learn(told)


def job_of(context: Context, task: Task) -> Job:
    """Return a ``Job`` for a task: its candidates, and their stored results."""
    context.progress(f"{task}: finding algorithms", 0.0)
    config, machine = context.config, context.machine
    sizes = micro_batch_sizes(BatchSizePolicy(config.policy), task.batch_size)
    algorithms = permitted_algorithms(machine, config, task.problem, sizes)
    context.versions |= {algorithm.name: algorithm.version for algorithm in algorithms}
    results = context.results.setdefault(task.problem, {})
    stored = context.store.results(task.problem, context.versions)
    results |= {result.micro_config: result for result in context.quiet.trusted(stored)}
    if isinstance(results.get(task.baseline), Failure):
        del results[task.baseline]
    measured = [result for result in results.values() if isinstance(result, Measurement)]
    proofs = machine.proofs(task.batch_size, waits=not context.in_passing)
    candidates, unsupported = find_candidates(task.problem, algorithms, sizes, measured, proofs)
    bound = config.error_bound(task.problem.dtype, machine.environment.numerics)
    return Job(task, bound, candidates, unsupported, results)


def permitted_algorithms(
    machine: Machine, config: Config, problem: ConvProblem | None = None, sizes: Sequence[int] = ()
) -> list[Algorithm]:
    """Return the algorithms that a config allows, including those that sources offer for the given problem.

    Raises ``InvalidInputError`` for unknown names.
    """
    names = [*(algorithm.name for algorithm in machine.algorithms), *(source.name for source in machine.sources)]
    if unknown := [name for name in config.algorithms or () if source_of(name) not in (TORCHS_OWN, *names)]:
        raise InvalidInputError(f"algorithms has {', '.join(unknown)}; this machine has {', '.join(names)}")
    algorithms = [*machine.algorithms]
    if problem is not None:
        for source in machine.sources:
            algorithms += source.offered(problem, sizes)
    permitted = [algorithm for algorithm in algorithms if _is_allowed(algorithm, config)]
    if problem is None or not config.strict:
        return permitted
    return [a for a in permitted if a.name == TORCHS_OWN or is_local(a, problem)]


def _is_allowed(algorithm: Algorithm, config: Config) -> bool:
    """Whether the config allows an algorithm by name or source, and by determinism; torch's own is always allowed."""
    name = algorithm.name
    return config.allows(name) and (algorithm.deterministic or name == TORCHS_OWN or not config.deterministic)


# Cost model of measuring a problem, fitted on one core (AlexNet and MobileNetV2, torch 2.13, Xeon).
_OVERHEAD_S = 0.3
_FLOPS_PER_S = 5e9
_BYTES_PER_S = 35e6


def expected_s(problem: ConvProblem, batch_size: int) -> float:
    """Estimate the seconds to measure a problem, from its FLOPs and tensor sizes; only ratios are meaningful."""
    shapes = problem.x_shape(batch_size), problem.w_shape(), problem.y_shape(batch_size)
    moved_bytes = problem.item_bytes * sum(map(prod, shapes))
    return _OVERHEAD_S + problem.flops(batch_size) / _FLOPS_PER_S + moved_bytes / _BYTES_PER_S
