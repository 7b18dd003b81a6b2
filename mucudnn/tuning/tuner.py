"""``tune``: measures what is not yet measured, then chooses configurations, with whole runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch.distributed import ProcessGroup

from mucudnn.database.database import Database
from mucudnn.database.environment_store import EnvironmentStore
from mucudnn.distributed.team import Team, telling
from mucudnn.measuring.candidates import find_candidates
from mucudnn.measuring.prior import Prior
from mucudnn.measuring.profiler import ProfilingJob
from mucudnn.measuring.quick_search import QuickSearch
from mucudnn.measuring.timing.comparison import QUICK, THOROUGH, Comparison
from mucudnn.measuring.timing.kept_heap import kept_heap
from mucudnn.measuring.timing.peak_rate import peak_flops_per_s
from mucudnn.measuring.whole_runs import Machine
from mucudnn.running.devices import device_named, largest_batch_size, made_current
from mucudnn.running.dispatcher import untouched
from mucudnn.running.environment import Environment
from mucudnn.solver.policies import micro_batch_sizes
from mucudnn.tuning.choose import Outcome, Verify, choose, divide, is_solvable
from mucudnn.tuning.contenders import JUST_AS_FAST, NEARLY_AS_FAST
from mucudnn.tuning.infeasible import infeasible, smallest_bytes, unaffordable
from mucudnn.tuning.job import Job
from mucudnn.tuning.permitted import permitted_algorithms
from mucudnn.tuning.quiet import MOST_WAITED_S, Quiet
from mucudnn.tuning.result import LeftOut, TunedProblem, Tuning, TuningInterrupted, allowed
from mucudnn.tuning.sharing import Sharing, expected_s, sharing
from mucudnn.words.config import BatchSizePolicy, Config, config_or_default
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import MOST_ELEMENTS, ConvProblem, Operation
from mucudnn.words.progress import Progress, silent
from mucudnn.words.results import (
    Configuration,
    Failure,
    Measurement,
    MicroConfig,
    WholeRun,
)
from mucudnn.words.task import Task
from mucudnn.words.torch_settings import deterministic_torch
from mucudnn.words.values import instance, several, shown, whole

__all__ = ["Progress", "TunedProblem", "Tuning", "TuningInterrupted", "tune", "tune_tasks"]


Priors = dict[Environment, Prior]


def tune(
    problems: Iterable[ConvProblem] | ConvProblem,
    batch_size: int,
    config: Config | None = None,
    *,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
    names: Mapping[ConvProblem, str] | None = None,
    database: Database | None = None,
    machine: Machine | None = None,
    process_group: ProcessGroup | None = None,
) -> Tuning:
    """Choose the fastest configuration of each problem within the workspace limit, and verify it against torch.

    With ``config.workspace_budget`` the budget is divided over all problems instead. Problems whose operation is not in
    ``config.operations`` are passed over. What the database has is not measured again; each new measurement is stored
    as it is made. ``device``: ``"cpu"``, ``"cuda"`` (the current GPU), a GPU by its number, ``"cuda:1"``, or a
    ``torch.device``. ``progress`` is called with what is being done and the fraction that is done. ``names``: what
    problems are called in progress and errors. ``database``: instead of the file that the config names. ``machine``:
    instead of this one.

    Under an initialised ``torch.distributed`` process group of several ranks all of them call it, with the same
    problems: each measures its share, and all choose the same (``Config(share_tuning=False)``: each for itself).
    ``process_group``: another one than the default.

    Raises ``InfeasibleError`` (naming the smallest limit of every problem that has no configuration, or the smallest
    budget), ``InvalidInputError`` for an unknown algorithm, for other values than these and for a batch that is too
    large, ``UnavailableError`` for a device that is not there,
    ``DatabaseError`` for a file that cannot be read (where it cannot be written there is a warning instead),
    ``BrokenDeviceError`` where a candidate leaves the GPU unusable for this process (the next one skips it),
    ``SharingError`` where ranks are not alike or one of them is lost, and ``TuningInterrupted`` on Ctrl-C, with what is
    ready.
    """
    config, place = config_or_default(config), device_named(device)
    names = instance(Mapping, {} if names is None else names, "names")  # type: ignore[type-abstract]
    samples, limit = whole(batch_size, "batch_size", 1), config.workspace_limit_bytes
    given = [instance(ConvProblem, problem, "one of problems") for problem in several(problems)]
    wanted = dict.fromkeys(problem for problem in given if problem.operation in config.operations)
    fits = config.torchs_own_fits
    tasks = [Task(p, samples, limit, name=names.get(p, ""), torchs_own_fits=fits) for p in wanted]
    team = Team.of(config, process_group)
    with made_current(place):
        return tune_tasks(
            tasks, config, device=place.type, progress=progress, database=database, machine=machine, team=team
        )


def tune_tasks(
    tasks: Sequence[Task],
    config: Config,
    *,
    device: str = "cpu",
    progress: Progress | None = None,
    database: Database | None = None,
    machine: Machine | None = None,
    priors: Priors | None = None,
    in_passing: bool = False,
    team: Team | None = None,
) -> Tuning:
    """Do what ``tune`` does for tasks of any batch sizes, limits and counts; the answer has their order.

    priors: those of earlier calls, which this one uses and adds to: reading a whole database takes a moment.
    in_passing: in a call of the user's, that neither waits for a quiet machine nor is told each time that it is busy.
    team: the ranks that tune the same together; it ends with this.
    """
    require_callable(progress)
    if database is not None:
        instance(Database, database, "database")  # a file is named in the config
    if machine is not None:
        instance(Machine, machine, "machine")
    with ExitStack() as stack:
        for context in (telling(team), untouched, kept_heap()):
            stack.enter_context(context)
        on, opened = stack.enter_context(machine_and_database(config, device, machine, database))
        _require_countable(tasks, on.device)
        tuner = partial(_Tuner, config, on, progress=progress, priors=priors, in_passing=in_passing)
        if team is None:
            return tuner(EnvironmentStore(opened, on.environment)).tune(tasks)
        with sharing(team, tasks, config, on, opened) as (shared, known):
            tuning = tuner(EnvironmentStore(known, on.environment), sharing=shared).tune(tasks)
            shared.agree(tasks, tuning.problems)
            return tuning


@contextmanager
def machine_and_database(
    config: Config, device: str = "cpu", machine: Machine | None = None, database: Database | None = None
) -> Iterator[tuple[Machine, Database]]:
    """Provide what tuning under a config needs: those given, or this machine and the file of the config, opened.

    While it lasts, torch is as deterministic as the config asks, since that is part of the machine's environment.
    """
    with deterministic_torch(config.deterministic), ExitStack() as stack:
        machine = machine or Machine.current(device)
        yield machine, stack.enter_context(Database(config.database)) if database is None else database


def require_callable(progress: object) -> None:
    """Raises ``InvalidInputError`` before anything is measured."""
    if not (progress is None or callable(progress)):
        raise InvalidInputError(f"progress is {shown(progress)}; give a function of a text and a fraction, or None")


def _require_countable(tasks: Sequence[Task], device: str) -> None:
    for task in tasks:
        most = largest_batch_size(task.problem, device)
        if task.batch_size > most:
            raise InvalidInputError(
                f"{task}: batch_size is {task.batch_size}; it must be at most {most} on device {device!r}, so that x "
                f"and y have at most {MOST_ELEMENTS} elements"
            )


class _Tuner:
    """Tunes tasks under one config.

    A stored failure of torch's own, undivided, is not believed: everything is compared with it. Other stored failures
    are, unless nothing is left that fits. What was measured in an older way is measured again: it cannot be compared
    with what is measured now.
    """

    def __init__(
        self,
        config: Config,
        machine: Machine,
        store: EnvironmentStore,
        progress: Progress | None = None,
        priors: Priors | None = None,
        in_passing: bool = False,
        sharing: Sharing | None = None,
    ) -> None:
        self.config, self.machine, self.store = config, machine, store
        self.progress, self.at = progress or silent, 0.0
        patience_s = 0.0 if in_passing else MOST_WAITED_S
        self.quiet = Quiet(machine.watch, store, lambda text: self.progress(text, self.at), patience_s)
        self.in_passing = in_passing
        self.versions = {algorithm.name: algorithm.version for algorithm in permitted_algorithms(machine, config)}
        self.ready: list[TunedProblem] = []
        self.sharing = sharing
        self.measured: dict[ConvProblem, dict[MicroConfig, Measurement]] = {}  # by this tuning
        self._priors = {} if priors is None else priors

    def tune(self, tasks: Sequence[Task]) -> Tuning:
        try:
            jobs = [self._job(task) for task in tasks]
            if self.machine.prover is not None and any(job.task.baseline not in job.results for job in jobs):
                self.machine.prover.start()
                self.machine.watch.forget()
            tuning = self._one_by_one(jobs) if self.config.workspace_budget_bytes is None else self._together(jobs)
        except KeyboardInterrupt:
            raise TuningInterrupted(self._tuning()) from None
        if self.machine.prover is not None:
            self.machine.prover.rest()
        if self.in_passing:
            self.quiet.store_rate()
        else:
            self.quiet.end()
        self.progress("done", 1.0)
        return tuning

    def _one_by_one(self, jobs: Sequence[Job]) -> Tuning:
        """Workspace reuse: each task under its own limit."""
        for job in jobs:
            if not job.is_feasible():
                job.forget_failures()
        self._require_feasible(jobs)  # before minutes are spent on measuring
        own = self._own(jobs)
        for number, job in enumerate(own):
            self._measure(job, job.task.limit_bytes, number / len(own), 1 / len(own))
            if job.is_feasible():
                job.declared_bytes = job.baseline_bytes()
                self._choose(job)
        if self.sharing is not None:
            self._choose_all(jobs)
        self._require_feasible([job for job in jobs if job.choice is None])
        return self._tuning()

    def _choose(self, job: Job) -> None:
        margin = NEARLY_AS_FAST if self.config.thorough else JUST_AS_FAST
        job.choice = choose(job.task, self._allowed(job), self._verifier([job]), job.declared_bytes, margin)
        self.ready.append(job.tuned(job.choice, self._runs(job.task)))

    def _choose_all(self, jobs: Sequence[Job]) -> None:
        """Choose for all tasks from what all ranks have measured."""
        self._exchange(jobs)
        self.ready.clear()
        for job in jobs:
            if job.is_feasible():
                self._choose(job)

    def _together(self, jobs: Sequence[Job]) -> Tuning:
        """Workspace division: one budget for all tasks."""
        budget = self.config.workspace_budget_bytes
        if not self._is_affordable(jobs):
            for job in jobs:
                job.forget_failures()
        self._require_affordable(jobs)  # before minutes are spent on measuring
        own = self._own(jobs)
        for number, job in enumerate(own):
            self._measure(job, budget, number / len(own), 1 / len(own))
            job.declared_bytes = job.baseline_bytes()
        self._exchange(jobs)
        if not self._is_divisible_everywhere(jobs):
            for number, job in enumerate(own):
                self._measure(job, budget, number / len(own), 1 / len(own), thoroughly=True)
            self._exchange(jobs)
        self._require_affordable(jobs)  # with what failed
        divided = divide(
            {job.task: self._allowed(job) for job in jobs},
            budget,
            self._verifier(jobs),
            {job.task: job.declared_bytes for job in jobs},
            partial(self._run_ahead, jobs),
        )
        for job in jobs:
            self.ready.append(job.tuned(divided.choices[job.task], self._runs(job.task)))
        return Tuning(self.config, self.machine.environment, tuple(self.ready), divided)

    def _own(self, jobs: Sequence[Job]) -> Sequence[Job]:
        """Return those that are measured here: all of them, or what other ranks leave."""
        if self.sharing is None:
            return jobs
        own = self.sharing.own([job.task for job in jobs], lambda: [self._expected_cost(job) for job in jobs])
        for number, job in enumerate(jobs):
            job.is_own = number in own
        return [job for job in jobs if job.is_own]

    def _expected_cost(self, job: Job) -> float:
        """Estimate what it takes to measure what is missing. Something always is: whole runs may have to be made."""
        full_s = expected_s(job.task.problem, job.task.batch_size)
        if not job.measurements():
            return full_s
        budget = self.config.workspace_budget_bytes
        limit = job.task.limit_bytes if budget is None else budget
        return full_s * (1 + len(self._search(job, limit).missing())) / (1 + len(job.candidates))

    def _exchange(self, jobs: Sequence[Job]) -> None:
        """Tell the ranks of this kind what was found out here, and learn what they did."""
        if self.sharing is not None:
            own = {number: job.findings() for number, job in enumerate(jobs) if job.is_own}
            for number, findings in self.sharing.exchange(own).items():
                jobs[number].learn(findings)

    def _verifier(self, jobs: Sequence[Job]) -> Verify:
        of_task = {job.task: job for job in jobs}
        return lambda task, configurations: self._outcomes(of_task[task], configurations)

    def _outcomes(self, job: Job, configurations: Sequence[Configuration]) -> dict[Configuration, Outcome]:
        """Return whole runs, made now where the task is measured here; None: the rank that measures it made none."""
        if job.barred is not None:  # nothing can be compared with it
            return dict.fromkeys(configurations)
        unknown = [c for c in configurations if c.micro_configs not in job.outcomes] if job.is_own else []
        if unknown:
            made = self._verify(job.task, unknown)
            job.outcomes |= {configuration.micro_configs: outcome for configuration, outcome in made.items()}
        return {c: job.outcomes.get(c.micro_configs) for c in configurations}

    def _run_ahead(self, jobs: Sequence[Job], wanted: Mapping[Task, Sequence[Configuration]]) -> None:
        """Run whole what will be asked for next: on each rank what it has measured."""
        if self.sharing is not None:
            for job in jobs:
                if job.is_own:
                    self._outcomes(job, wanted.get(job.task, ()))
            self._exchange(jobs)

    def _tuning(self) -> Tuning:
        return Tuning(self.config, self.machine.environment, tuple(self.ready))

    def _job(self, task: Task) -> Job:
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
        """Whether a stored failure counts."""
        return failure.micro_config != task.baseline and not (self.config.thorough and failure.is_passed_over)

    def _allowed(self, job: Job) -> list[Measurement]:
        return allowed(job.measurements(), job.error_bound)

    def _require_feasible(self, jobs: Sequence[Job]) -> None:
        without = [job for job in jobs if not job.is_feasible()]
        if without:
            needed = {job.task: job.smallest_feasible_bytes() for job in without}
            raise infeasible(needed, {job.task: job.failed_candidates() for job in without})

    def _is_affordable(self, jobs: Sequence[Job]) -> bool:
        """Whether the smallest configurations are within the budget together. The smallest micro-batches come first."""
        each = (Job.bytes_in_smallest_pieces, Job.smallest_feasible_bytes)
        return any(self._fit_budget(map(smallest, jobs)) for smallest in each)

    def _is_divisible_everywhere(self, jobs: Sequence[Job]) -> bool:
        """Whether it is for the ranks of all kinds, which measure again together."""
        divisible = self._is_divisible(jobs)
        return divisible if self.sharing is None else self.sharing.everywhere(divisible)

    def _is_divisible(self, jobs: Sequence[Job]) -> bool:
        """Whether what was measured fits the budget. The quick search may pass over what needs least."""
        return self._fit_budget(smallest_bytes(self._allowed(job), job.task.batch_size) for job in jobs)

    def _fit_budget(self, sizes: Iterable[int | None]) -> bool:
        """Whether these bytes, one size for each job, are within the budget together; None: a job has none."""
        budget = self.config.workspace_budget_bytes
        if budget is None:
            return True
        total = 0
        for size in sizes:
            if size is None:
                return False
            total += size
        return total <= budget

    def _require_affordable(self, jobs: Sequence[Job]) -> None:
        """Raises ``InfeasibleError`` if the budget is less than the smallest configurations need together."""
        if not self._is_affordable(jobs):
            needed = {job.task: job.smallest_feasible_bytes() for job in jobs}
            failed = {job.task: job.failed_candidates() for job in jobs}
            raise unaffordable(needed, self.config.workspace_budget_bytes, failed)

    def _measure(
        self, job: Job, limit_bytes: int | None, start: float, share: float, *, thoroughly: bool = False
    ) -> None:
        self.at = start
        self.progress(f"{job.task}: measuring", start)
        measured = self.measured.setdefault(job.task.problem, {})
        job.results |= measured  # tasks of one problem differ in limits or epilogues
        with ExitStack() as measuring:
            for source in self.machine.sources:
                measuring.enter_context(source.measuring())
            every = self._profiling(job, limit_bytes)
            results = self.quiet.measured(every) if thoroughly else self._results(job, limit_bytes)
            for done, result in enumerate(results):
                self.store.add(job.task.problem, self.versions[result.micro_config.algorithm], result)
                job.results[result.micro_config] = result
                if isinstance(result, Measurement):
                    measured[result.micro_config] = result
                name = f"{result.micro_config.algorithm} {result.micro_config.micro_batch_size}"
                self.progress(f"{job.task}: {name}", start + share * done / len(job.candidates))
        if self.config.time_limit_s is not None:
            search = self._search(job, limit_bytes)
            hurried = search.hurried() if isinstance(search, ProfilingJob) else ()
            job.left_out = LeftOut(*(tuple(c.micro_config for c in some) for some in (search.missing(), hurried)))

    def _results(self, job: Job, limit_bytes: int | None) -> Iterator[Measurement | Failure]:
        """Measure what is missing. The quick search may find nothing within a small limit; then all are measured."""
        yield from self.quiet.measured(self._search(job, limit_bytes))
        if not self.config.thorough and not is_solvable(job.measured_task(limit_bytes), self._allowed(job)):
            yield from self.quiet.measured(self._profiling(job, limit_bytes))

    def _search(self, job: Job, limit_bytes: int | None) -> ProfilingJob | QuickSearch:
        profiling = self._profiling(job, limit_bytes)
        if self.config.thorough:
            return profiling
        every_size, device = self.config.workspace_budget_bytes is not None, self.machine.device
        flops_per_s = peak_flops_per_s(device, job.task.problem.dtype)
        return QuickSearch.of(profiling, self._prior(), every_size, flops_per_s)

    def _profiling(self, job: Job, limit_bytes: int | None) -> ProfilingJob:
        problem = job.task.problem
        return ProfilingJob(
            problem,
            job.task.batch_size,
            job.candidates,
            known=job.measurements(),
            known_failures=job.failures(),
            limit_bytes=limit_bytes,
            max_relative_error=job.error_bound,
            time_limit_s=self.config.time_limit_s,
            may_keep=problem.operation is Operation.FORWARD and self.config.cache_budget_bytes != 0,
            torchs_own_fits=job.task.torchs_own_fits,
            device=self.machine.device,
            clock=self.machine.clock,
            watch=self.machine.watch,
        )

    def _prior(self) -> Prior:
        """Return what this machine has measured before, to which this tuning adds."""
        environment = self.machine.environment
        if environment not in self._priors:
            learnt = self._priors[environment] = Prior()
            for problem, measurements in self.store.every_measurement(self.versions).items():
                learnt.learn(problem, [m for m in measurements if not (m.is_disturbed or m.is_outdated)])
        return self._priors[environment]

    def _runs(self, task: Task) -> Mapping[tuple[MicroConfig, ...], WholeRun]:
        runs = self.store.whole_runs(task.problem, self.versions, task.how)
        return {parts: run for parts, run in runs.items() if not run.is_outdated}

    def _verify(self, task: Task, configurations: Sequence[Configuration]) -> dict[Configuration, Outcome]:
        """Return whole runs against torch; those that were not made before are made now."""
        problem, how = task.problem, task.how
        known: dict[Configuration, Outcome] = {
            c: self.quiet.believed(self.store.whole_run(problem, c, self.versions, how)) for c in configurations
        }
        missing = [c for c, run in known.items() if run is None]
        rounds = THOROUGH if self.config.thorough else QUICK
        compare = partial(
            self.machine.compare,
            problem,
            task.batch_size,
            keeps_workspace=not task.in_headroom,
            epilogue=task.epilogue,
            rounds=rounds,
        )
        outcomes = self.quiet.compared(problem, missing, compare)
        for configuration, outcome in zip(missing, outcomes, strict=True):
            if isinstance(outcome, Comparison):
                self.store.add_whole_run(problem, configuration, self.versions, outcome.whole_run, how)
                known[configuration] = outcome.whole_run
            else:
                known[configuration] = outcome
        return known
