"""From convolutions to chosen configurations: measure what is not yet measured, solve, verify the choice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from mucudnn.bench.comparison import Comparison
from mucudnn.bench.profiler import Profile
from mucudnn.bench.race import Candidate, find_candidates
from mucudnn.config import BatchSizePolicy, Config
from mucudnn.configuration import NATIVE, Configuration, Failure, Measurement, MicroConfig
from mucudnn.database import Database, Verification
from mucudnn.errors import InfeasibleError, InvalidInputError
from mucudnn.kernels.algorithm import Algorithm
from mucudnn.problem import ConvProblem
from mucudnn.solver.front import desirable_sets
from mucudnn.solver.policies import micro_batch_sizes
from mucudnn.store import Store
from mucudnn.tuning import TunedProblem, Tuning, TuningInterrupted, allowed, baseline_of, relative_error_of
from mucudnn.units import format_bytes
from mucudnn.verification import Machine, contenders

__all__ = ["Progress", "TunedProblem", "Tuning", "TuningInterrupted", "tune"]

Progress = Callable[[str, float], None]

# A smaller lead is not worth it: the machine may be another one tomorrow, and torch's own is never slower than torch.
LEAST_GAIN = 0.03
OPERATOR_S = 30e-6  # what a call of ours through torch's dispatcher and autograd costs, and torch's own does not


def tune(
    problems: Iterable[ConvProblem],
    batch_size: int,
    config: Config | None = None,
    *,
    device: str = "cpu",
    progress: Progress | None = None,
    names: Mapping[ConvProblem, str] | None = None,
    database: Database | None = None,
    machine: Machine | None = None,
) -> Tuning:
    """Choose the fastest configuration of each problem within the workspace limit, and verify it against torch.

    Problems whose operation is not in ``config.operations`` are passed over. What the database has is not measured
    again; each new measurement is stored as it is made. ``progress`` is called with what is being done and the fraction
    that is done. ``names``: what problems are called in progress and errors. ``database``: instead of the file that the
    config names. ``machine``: instead of this one.

    Raises ``InfeasibleError`` (naming the smallest limit of every problem that has no configuration),
    ``InvalidInputError`` for an unknown algorithm, ``UnavailableError`` for a device that is not there,
    ``DatabaseError`` for a file that cannot be read (where it cannot be written there is a warning instead), and
    ``TuningInterrupted`` on Ctrl-C, with what is ready.
    """
    config = config or Config()
    machine = machine or Machine.current(device)
    wanted = [p for p in dict.fromkeys(problems) if p.operation in config.operations]
    if database is not None:
        return _Tuner(batch_size, config, machine, Store(database, machine.environment), progress, names).tune(wanted)
    with Database(config.database) as opened:
        return _Tuner(batch_size, config, machine, Store(opened, machine.environment), progress, names).tune(wanted)


@dataclass(slots=True)
class _Job:
    """One problem to be tuned: its candidates, and what is known of each."""

    problem: ConvProblem
    candidates: list[Candidate]
    unsupported: list[Failure]
    results: dict[MicroConfig, Measurement | Failure]

    def measurements(self) -> list[Measurement]:
        known = (self.results.get(candidate.micro_config) for candidate in self.candidates)
        return [result for result in known if isinstance(result, Measurement)]

    def failures(self) -> list[Failure]:
        return [*self.unsupported, *(result for result in self.results.values() if isinstance(result, Failure))]

    def smallest_feasible_bytes(self, batch_size: int, config: Config) -> int | None:
        """Least workspace of any configuration of candidates that did not fail and are not barred by their error."""
        return _smallest_bytes(self._usable(config), batch_size)

    def is_feasible(self, batch_size: int, config: Config) -> bool:
        """Torch's own are looked at first: mostly they fit, and nothing else must run to find out what it needs."""
        usable = self._usable(config)
        limit = inf if config.workspace_limit_bytes is None else config.workspace_limit_bytes
        for candidates in ([c for c in usable if c.is_native], [c for c in usable if c.handed_bytes <= limit]):
            smallest = _smallest_bytes(candidates, batch_size)
            if smallest is not None and smallest <= limit:
                return True
        return False

    def _usable(self, config: Config) -> list[Candidate]:
        known = self.measurements()
        permitted = allowed(known, config, self.problem)
        barred = {m.micro_config.algorithm for m in known} - {m.micro_config.algorithm for m in permitted}
        failed = {failure.micro_config for failure in self.failures()}
        return [c for c in self.candidates if c.algorithm.name not in barred and c.micro_config not in failed]


def _smallest_bytes(candidates: Sequence[Candidate], batch_size: int) -> int | None:
    """Workspaces are declared, so the solver can tell before anything is measured: any time will do."""
    if not candidates:
        return None
    smallest = desirable_sets([c.at_any_time() for c in candidates], batch_size).smallest(batch_size)
    return None if smallest is None else smallest.workspace_bytes


class _Tuner:
    """Tunes problems of one batch size under one config."""

    def __init__(
        self,
        batch_size: int,
        config: Config,
        machine: Machine,
        store: Store,
        progress: Progress | None,
        names: Mapping[ConvProblem, str] | None,
    ) -> None:
        self.batch_size, self.config, self.machine, self.store = batch_size, config, machine, store
        self.progress = progress or (lambda text, fraction: None)
        self.names = names or {}
        self.algorithms = _algorithms(machine, config)
        self.versions = {algorithm.name: algorithm.version for algorithm in self.algorithms}
        self.ready: list[TunedProblem] = []

    def tune(self, problems: Sequence[ConvProblem]) -> Tuning:
        try:
            jobs = [self._job(problem) for problem in problems]
            self._require_feasible(jobs)  # before minutes are spent on measuring
            infeasible = []
            for number, job in enumerate(jobs):
                self._measure(job, number / len(jobs), 1 / len(jobs))
                if job.is_feasible(self.batch_size, self.config):
                    self.ready.append(self._choose(job))
                else:
                    infeasible.append(job)
            self._require_feasible(infeasible)
        except KeyboardInterrupt:
            raise TuningInterrupted(self._tuning()) from None
        self.progress("done", 1.0)
        return self._tuning()

    def _tuning(self) -> Tuning:
        return Tuning(self.config, self.machine.environment, tuple(self.ready))

    def _job(self, problem: ConvProblem) -> _Job:
        self.progress(f"{self._name(problem)}: finding algorithms", 0.0)
        known = self.store.results(problem, self.versions)
        sizes = micro_batch_sizes(BatchSizePolicy(self.config.policy), self.batch_size)
        measured = [result for result in known if isinstance(result, Measurement)]
        candidates, unsupported = find_candidates(problem, self.algorithms, sizes, measured)
        return _Job(problem, candidates, unsupported, {result.micro_config: result for result in known})

    def _require_feasible(self, jobs: Sequence[_Job]) -> None:
        smallest = {
            self._name(job.problem): job.smallest_feasible_bytes(self.batch_size, self.config)
            for job in jobs
            if not job.is_feasible(self.batch_size, self.config)
        }
        if smallest:
            raise _infeasible(smallest, self.batch_size, self.config)

    def _name(self, problem: ConvProblem) -> str:
        return self.names.get(problem, str(problem))

    def _measure(self, job: _Job, start: float, share: float) -> None:
        profile = Profile(
            job.problem,
            self.batch_size,
            job.candidates,
            known=job.measurements(),
            known_failures=job.failures(),
            limit_bytes=self.config.workspace_limit_bytes,
            max_relative_error=self.config.error_bound(job.problem.dtype),
            time_limit_s=self.config.time_limit_s,
            device=self.machine.device,
            clock=self.machine.clock,
        )
        self.progress(f"{self._name(job.problem)}: measuring", start)
        for done, result in enumerate(profile.measure()):
            self.store.keep(job.problem, self.versions[result.micro_config.algorithm], result)
            job.results[result.micro_config] = result
            name = f"{result.micro_config.algorithm} {result.micro_config.micro_batch_size}"
            self.progress(f"{self._name(job.problem)}: {name}", start + share * done / len(job.candidates))

    def _choose(self, job: _Job) -> TunedProblem:
        """The contender that whole runs find the fastest; torch's own unless that is faster by more than the noise."""
        measurements = allowed(job.measurements(), self.config, job.problem)
        limit = self.config.workspace_limit_bytes
        verified = self._verified(job.problem, contenders(measurements, self.batch_size, limit))
        best = max(verified, key=lambda configuration: _speedup(verified[configuration]))
        chosen, time_s, reason = self._verdict(best, verified[best], baseline_of(measurements, self.batch_size))
        return TunedProblem(
            problem=job.problem,
            batch_size=self.batch_size,
            configuration=chosen,
            baseline_s=verified[best].baseline_s,
            time_s=time_s,
            relative_error=relative_error_of(chosen, measurements),
            reason=reason,
            measurements=tuple(job.measurements()),
            failures=tuple(job.failures()),
        )

    def _verified(
        self, problem: ConvProblem, configurations: Sequence[Configuration]
    ) -> dict[Configuration, Verification]:
        """Whole runs against torch, of those that were not run before. Raises the error if none of them runs."""
        known = {c: self.store.verification(problem, c, self.versions) for c in configurations}
        missing = [c for c, verification in known.items() if verification is None]
        outcomes = self.machine.compare(problem, self.batch_size, missing) if missing else []
        for configuration, outcome in zip(missing, outcomes, strict=True):
            if isinstance(outcome, Comparison):
                verification = Verification(outcome.baseline_s, outcome.time_s, outcome.uncertainty)
                self.store.keep_verification(problem, configuration, self.versions, verification)
                known[configuration] = verification
        verified = {c: verification for c, verification in known.items() if verification is not None}
        if not verified:
            raise next(outcome for outcome in outcomes if isinstance(outcome, Exception))
        return verified

    def _verdict(
        self, best: Configuration, verification: Verification, baseline: Configuration | None
    ) -> tuple[Configuration, float, str]:
        """What to run, its seconds, and why."""
        limit = self.config.workspace_limit_bytes
        speedup = f"{_speedup(verification):.2f} ± {verification.noise:.2f}"
        if best.is_baseline:
            return best, verification.baseline_s, "torch's own, undivided: nothing else can compute this"
        if baseline is not None and limit is not None and baseline.workspace_bytes > limit:
            needed = format_bytes(baseline.workspace_bytes)
            return best, verification.time_s, f"fastest within the limit, speedup {speedup}; torch's own needs {needed}"
        in_a_model = verification.baseline_s / (verification.time_s + OPERATOR_S)
        if baseline is None or in_a_model - max(verification.noise, LEAST_GAIN) > 1:
            return best, verification.time_s, f"fastest in whole runs, speedup {speedup}"
        reason = f"torch's own: {best} is not faster by more than the noise or {LEAST_GAIN:.0%}, speedup {speedup}"
        return baseline, verification.baseline_s, reason


def _speedup(verification: Verification) -> float:
    return verification.baseline_s / verification.time_s


def _algorithms(machine: Machine, config: Config) -> list[Algorithm]:
    """Those that the config allows; it always names torch's own. Raises ``InvalidInputError`` for unknown names."""
    names = [algorithm.name for algorithm in machine.algorithms]
    wanted = names if config.algorithms is None else [NATIVE, *config.algorithms]
    if unknown := [name for name in wanted if name not in (NATIVE, *names)]:
        raise InvalidInputError(f"algorithms has {', '.join(unknown)}; this machine has {', '.join(names)}")
    named = [algorithm for algorithm in machine.algorithms if algorithm.name in wanted]
    return [algorithm for algorithm in named if algorithm.deterministic or not config.deterministic]


def _infeasible(smallest: Mapping[str, int | None], batch_size: int, config: Config) -> InfeasibleError:
    """One error for all problems, by their names: what each of them needs at least."""
    lines = [
        f"  {name}: " + ("no algorithm can compute it" if needed is None else f"at least {_exactly(needed)}")
        for name, needed in smallest.items()
    ]
    needed = [size for size in smallest.values() if size is not None]
    most = max(needed) if len(needed) == len(smallest) else None
    advice = "" if most is None else f"\nRaise the workspace limit to {_exactly(most)} or more"
    limit = format_bytes(config.workspace_limit_bytes)
    what = f"no configuration of batch {batch_size} fits the workspace limit of {limit}:"
    return InfeasibleError("\n".join((what, *lines)) + advice, most)


def _exactly(size_bytes: int) -> str:
    """A limit that is enough: the rounded number alone could be too small."""
    return f"{size_bytes}B ({format_bytes(size_bytes)})"
