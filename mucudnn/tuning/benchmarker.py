"""The benchmarker of one tuning, which races the candidates of each task and then times the best configurations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from mucudnn.core.config import BatchSizePolicy, Config
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Comparison, Configuration, Failure, Measurement, MicroConfig, Task, source_of
from mucudnn.core.terminal import Progress, silent
from mucudnn.core.torch_settings import TORCHS_OWN
from mucudnn.kernels.algorithm import Algorithm
from mucudnn.measuring.candidates import find_candidates
from mucudnn.measuring.clocks import peak_flops_per_s
from mucudnn.measuring.turns import QUICK, THOROUGH
from mucudnn.measuring.whole_runs import Machine
from mucudnn.running.environment import Environment
from mucudnn.solver.reuse import micro_batch_sizes
from mucudnn.store.environment_store import EnvironmentStore
from mucudnn.tuning.choose import Outcome, Verify, is_solvable
from mucudnn.tuning.job import Alone, Job, expected_s
from mucudnn.tuning.prior import Prior
from mucudnn.tuning.quiet import MOST_WAITED_S, Quiet
from mucudnn.tuning.race import Race
from mucudnn.tuning.result import TunedProblem, Tuning

Priors = dict[Environment, Prior]

_FEWEST_ROUNDS = QUICK.least + 1  # with a first one that may not count
_RACED = 2 / 3  # of the time limit; whole runs, and what a candidate takes beyond the limit, have the rest


class Benchmarker:
    """Benchmarker of tasks under one config. Each result is stored at once, and stored results are reused.

    A stored failure of torch's own convolution is retried, since everything is compared with it. Other failed
    candidates are retried only if no fitting one is left.

    ranks: group of processes that tune together. ready: problems tuned so far, which survive an interruption.
    """

    def __init__(
        self,
        config: Config,
        machine: Machine,
        store: EnvironmentStore,
        progress: Progress | None = None,
        priors: Priors | None = None,
        in_passing: bool = False,
        ranks: Alone | None = None,
    ) -> None:
        self.config, self.machine, self.store = config, machine, store
        self.progress, self.at = progress or silent, 0.0
        patience_s = 0.0 if in_passing else MOST_WAITED_S
        self.quiet = Quiet(machine.watch, lambda text: self.progress(text, self.at), patience_s)
        self.in_passing = in_passing
        self.ranks = ranks or Alone()
        self.versions = {algorithm.name: algorithm.version for algorithm in permitted_algorithms(machine, config)}
        self.ready: list[TunedProblem] = []
        self._measured: dict[ConvProblem, dict[MicroConfig, Measurement]] = {}  # in this tuning
        self._due_s: float | None = None  # when the time of all problems begun so far ends
        self._race_ends_s: float | None = None  # None without a time limit
        self._priors = {} if priors is None else priors

    def tuning(self) -> Tuning:
        """Return a ``Tuning`` of the problems tuned so far."""
        return Tuning(self.config, self.machine.environment, tuple(self.ready))

    def begin(self, jobs: Sequence[Job]) -> None:
        """Start the process that proves foreign code, if a job has no result for torch's own convolution."""
        if self.machine.prover is not None and any(job.task.baseline not in job.results for job in jobs):
            self.machine.prover.start()
            self.machine.watch.forget()

    def end(self) -> None:
        """Let the proving process free its memory, and warn if disturbed results remain."""
        if self.machine.prover is not None:
            self.machine.prover.rest()
        if not self.in_passing:
            self.quiet.end()
        self.progress("done", 1.0)

    def job(self, task: Task) -> Job:
        """Return a ``Job`` for a task: its candidates, and their stored results."""
        self.progress(f"{task}: finding algorithms", 0.0)
        sizes = micro_batch_sizes(BatchSizePolicy(self.config.policy), task.batch_size)
        algorithms = permitted_algorithms(self.machine, self.config, task.problem, sizes)
        self.versions |= {algorithm.name: algorithm.version for algorithm in algorithms}
        stored = self.quiet.believed_results(self.store.results(task.problem, self.versions))
        known = [r for r in stored if isinstance(r, Measurement) or self._is_believed(r, task)]
        measured = [result for result in known if isinstance(result, Measurement)]
        proofs = self.machine.proofs(task.batch_size, checks_samples=not self.config.thorough)
        candidates, unsupported = find_candidates(task.problem, algorithms, sizes, measured, proofs)
        bound = self.config.error_bound(task.problem.dtype, self.machine.environment.numerics)
        return Job(task, bound, candidates, unsupported, {result.micro_config: result for result in known})

    def _is_believed(self, failure: Failure, task: Task) -> bool:
        """Whether a stored failure of a candidate is valid, so that the candidate is not measured again."""
        return failure.micro_config != task.baseline and not (self.config.thorough and failure.is_passed_over)

    def measure(
        self, job: Job, limit_bytes: int | None, start: float, share: float, *, thoroughly: bool = False
    ) -> None:
        """Measure the job's missing candidates within a workspace limit, and store the results.

        start, share: begin and length of this job's part of the tuning's progress, from 0 to 1.
        """
        self.at = start
        self.progress(f"{job.task}: measuring", start)
        self._begin_race()
        measured = self._measured.setdefault(job.task.problem, {})
        job.results |= measured  # tasks of one problem differ in limits
        with ExitStack() as measuring:
            for source in self.machine.sources:
                measuring.enter_context(source.measuring())
            every = self._race(job, limit_bytes, thorough=True)
            results = self.quiet.measured(every) if thoroughly else self._results(job, limit_bytes)
            for done, result in enumerate(results):
                self.store.add(job.task.problem, self.versions[result.micro_config.algorithm], result)
                job.results[result.micro_config] = result
                if isinstance(result, Measurement):
                    measured[result.micro_config] = result
                name = f"{result.micro_config.algorithm} {result.micro_config.micro_batch_size}"
                self.progress(f"{job.task}: {name}", start + share * done / len(job.candidates))
        job.declared_bytes = job.baseline_bytes()
        if self.config.time_limit_s is not None:
            left_out = self._race(job, limit_bytes, thorough=self.config.thorough).missing()
            job.left_out = tuple(candidate.micro_config for candidate in left_out)

    def _begin_race(self) -> None:
        """Give the next race its part of the time limit, less what earlier problems took beyond theirs."""
        if (limit_s := self.config.time_limit_s) is not None:
            now_s = self.machine.clock.now()
            self._due_s = limit_s + (now_s if self._due_s is None else self._due_s)
            self._race_ends_s = now_s + _RACED * max(0.0, min(limit_s, self._due_s - now_s))

    def _results(self, job: Job, limit_bytes: int | None) -> Iterator[Measurement | Failure]:
        """Measure the job's missing candidates in a quick race, then in a thorough race if none fits the limit."""
        yield from self.quiet.measured(self._race(job, limit_bytes, thorough=self.config.thorough))
        if not self.config.thorough and not is_solvable(job.measured_task(limit_bytes), job.allowed()):
            yield from self.quiet.measured(self._race(job, limit_bytes, thorough=True))

    def _race(self, job: Job, limit_bytes: int | None, *, thorough: bool) -> Race:
        return Race(
            task=replace(job.task, limit_bytes=limit_bytes),
            candidates=job.candidates,
            machine=self.machine,
            stored=job.measurements(),
            stored_failures=job.failures(),
            max_relative_error=job.error_bound,
            time_limit_s=self._race_ends_s and max(0.0, self._race_ends_s - self.machine.clock.now()),
            may_keep=job.task.problem.operation is Operation.FORWARD and self.config.cache_budget_bytes != 0,
            prior=self._prior(),
            every_size=self.config.workspace_budget_bytes is not None,
            flops_per_s=peak_flops_per_s(self.machine.device, job.task.problem.dtype),
            thorough=thorough,
        )

    def _prior(self) -> Prior:
        """Return the expected times from all measurements of this machine so far, to which this tuning adds its own."""
        environment = self.machine.environment
        if environment not in self._priors:
            learnt = self._priors[environment] = Prior()
            for problem, measurements in self.store.every_measurement(self.versions).items():
                learnt.learn(problem, [m for m in measurements if not m.is_disturbed])
        return self._priors[environment]

    def expected_cost(self, job: Job) -> float:
        """Estimate the cost of measuring the job's missing candidates; never 0, since whole runs may be needed."""
        full_s = expected_s(job.task.problem, job.task.batch_size)
        if not job.measurements():
            return full_s
        budget = self.config.workspace_budget_bytes
        limit = job.task.limit_bytes if budget is None else budget
        missing = self._race(job, limit, thorough=self.config.thorough).missing()
        return full_s * (1 + len(missing)) / (1 + len(job.candidates))

    def verifier(self, jobs: Sequence[Job]) -> Verify:
        """Return a function that returns whole runs (complete calls) of these jobs' tasks, making missing ones."""
        of_task = {job.task: job for job in jobs}
        return lambda task, configurations: self.outcomes(of_task[task], configurations)

    def outcomes(self, job: Job, configurations: Sequence[Configuration]) -> dict[Configuration, Outcome]:
        """Return whole runs (complete calls) of configurations; make missing ones if this rank measures the job.

        The outcome is None if the job's rank has not run the configuration.
        """
        if job.barred is not None:  # there is no baseline to compare with
            return dict.fromkeys(configurations)
        missing = [c for c in configurations if c.micro_configs not in job.outcomes] if job.is_own else []
        if unknown := self._in_time(missing, is_first=not job.outcomes):
            made = self._verify(job.task, unknown)
            job.outcomes |= {configuration.micro_configs: outcome for configuration, outcome in made.items()}
        return {c: job.outcomes.get(c.micro_configs) for c in configurations}

    def _in_time(self, configurations: Sequence[Configuration], *, is_first: bool) -> Sequence[Configuration]:
        """Return the first configurations whose whole runs end within the time limit, at least one if none was run."""
        if self._due_s is None or self.config.workspace_budget_bytes is not None:
            return configurations
        left_s = self._due_s - self.machine.clock.now()
        kept: list[Configuration] = []
        for configuration in configurations:
            in_a_round_s = configuration.time_s + sum(max(c.time_s, configuration.time_s) for c in kept)
            if not (is_first and not kept) and _FEWEST_ROUNDS * (in_a_round_s + configuration.time_s) > left_s:
                break
            kept.append(configuration)
        return kept

    def _verify(self, task: Task, configurations: Sequence[Configuration]) -> dict[Configuration, Outcome]:
        """Return whole runs of configurations, compared with torch's own: stored ones, or made now."""
        problem, fresh = task.problem, task.in_headroom
        known: dict[Configuration, Outcome] = {
            c: self.quiet.believed(self.store.whole_run(problem, c.micro_configs, self.versions, fresh=fresh))
            for c in configurations
        }
        missing = [c for c, run in known.items() if run is None]
        rounds = THOROUGH if self.config.thorough and self.config.time_limit_s is None else QUICK
        compare = partial(
            self.machine.compare,
            problem,
            task.batch_size,
            keeps_workspace=not fresh,
            rounds=rounds,
        )
        outcomes = self.quiet.compared(problem, missing, compare)
        for configuration, outcome in zip(missing, outcomes, strict=True):
            if isinstance(outcome, Comparison):
                self.store.add_whole_run(problem, configuration.micro_configs, self.versions, outcome, fresh=fresh)
            known[configuration] = outcome
        return known

    def runs(self, task: Task) -> Mapping[tuple[MicroConfig, ...], Comparison]:
        """Return the stored whole runs of a task's problem, for any batch size."""
        return self.store.whole_runs(task.problem, self.versions, fresh=task.in_headroom)


def permitted_algorithms(
    machine: Machine, config: Config, problem: ConvProblem | None = None, sizes: Sequence[int] = ()
) -> list[Algorithm]:
    """Return the algorithms that a config allows, including those that sources offer for the given problem.

    Raises ``InvalidInputError`` for unknown names.
    """
    names = [*(algorithm.name for algorithm in machine.algorithms), *(source.name for source in machine.sources)]
    if unknown := [name for name in config.algorithms or () if source_of(name) not in (TORCHS_OWN, *names)]:
        raise InvalidInputError(f"algorithms has {', '.join(unknown)}; this machine has {', '.join(names)}")
    allowed = [algorithm for algorithm in machine.algorithms if _is_allowed(algorithm, config)]
    if problem is None:
        return allowed
    offered = (algorithm for source in machine.sources for algorithm in source.offered(problem, sizes))
    every = (*allowed, *(algorithm for algorithm in offered if _is_allowed(algorithm, config)))
    return [one for one in every if not config.strict or one.name == TORCHS_OWN or one.is_local(problem)]


def _is_allowed(algorithm: Algorithm, config: Config) -> bool:
    """Whether the config allows an algorithm by name or source, and by determinism; torch's own is always allowed."""
    name = algorithm.name
    named = config.algorithms is None or bool({name, source_of(name)} & {TORCHS_OWN, *config.algorithms})
    return named and (algorithm.deterministic or name == TORCHS_OWN or not config.deterministic)
