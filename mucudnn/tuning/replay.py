"""Replay: the choices that ``tune`` would make from stored measurements, without a device and without measuring.

``select_measurements`` reads them for a set of tasks: of one environment, and one version of each algorithm.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mucudnn.core.config import BatchSizePolicy, Config
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import ConvProblem
from mucudnn.core.records import Comparison, Environment, Measurement, MicroConfig, Task, source_of
from mucudnn.core.torch_settings import TORCHS_OWN
from mucudnn.kernels.algorithm import is_local
from mucudnn.kernels.registry import algorithms as every_algorithm
from mucudnn.solver.division import Division
from mucudnn.solver.reuse import micro_batch_sizes
from mucudnn.store.database import Database
from mucudnn.tuning.choose import choose, is_solvable
from mucudnn.tuning.divide import divide
from mucudnn.tuning.feasible import infeasible, smallest_bytes
from mucudnn.tuning.job import Job
from mucudnn.tuning.result import Tuning


@dataclass(frozen=True, slots=True)
class SelectedMeasurements:
    """Stored results of one environment from which ``replay`` solves tasks.

    versions: the version used, by algorithm. measurements: of each task, at the micro-batch sizes of the policy, with
    any error and workspace. whole_runs: of each task's problem, by configuration; in headroom, in fresh workspaces.
    """

    environment: Environment
    versions: Mapping[str, int]
    measurements: Mapping[Task, Sequence[Measurement]]
    whole_runs: Mapping[Task, Mapping[tuple[MicroConfig, ...], Comparison]]


def replay(tasks: Sequence[Task], config: Config, stored: SelectedMeasurements) -> Tuning:
    """Make the choices of ``tune_tasks`` from stored results only, with predictions in place of missing whole runs.

    With the stored results and the config of a tuning, the choices are the same as in that tuning.

    Raises ``InfeasibleError`` if no configuration fits, naming the tasks and the smallest sufficient workspace.
    """

    jobs = []
    for task in tasks:
        results = {m.micro_config: m for m in stored.measurements[task]}
        bound = config.error_bound(task.problem.dtype, stored.environment.numerics)
        jobs.append(Job(task, bound, (), (), {**results}, outcomes={**stored.whole_runs[task]}, is_own=False))
    division: Division[Task] | None = None
    if config.workspace_budget_bytes is not None:
        choices, division = divide(jobs, config.workspace_budget_bytes)
    else:
        without = [job for job in jobs if not is_solvable(job.task, job.allowed())]
        if without:
            raise infeasible({job.task: smallest_bytes(job.allowed(), job.task.batch_size) for job in without})
        choices = {job.task: choose(job) for job in jobs}
    problems = [choices[job.task].knowing(job.measurements(), error_bound=job.error_bound) for job in jobs]
    return Tuning(config, stored.environment, tuple(problems), division)


def select_measurements(
    database: Database,
    tasks: Sequence[Task],
    policy: BatchSizePolicy,
    *,
    algorithms: Collection[str] | None = None,
    strict: bool = False,
    environment: str | None = None,
) -> SelectedMeasurements:
    """Return the stored measurements that are needed to solve the tasks again without a device.

    algorithms: names of algorithms or sources to choose from besides torch's own; None for all measured ones. strict:
    use only torch's own and algorithms known to be local (a NaN spreads no further than in torch's). environment: part
    of the environment's description, or its number in the error that lists them; None for the only one with
    measurements of the tasks' problems. The newest version of each algorithm in the environment is used.

    Raises ``InvalidInputError`` for unknown algorithms, unless exactly one environment matches, and if the measurements
    of a task are missing or cannot cover its batch.
    """
    problems = frozenset(task.problem for task in tasks)
    chosen = _environment(database, problems, environment)
    versions = {name: found[-1] for name, found in database.versions(chosen).items()}
    if algorithms is not None:
        sources = {source_of(name) for name in versions}  # a GPU has hundreds of names
        if unknown := [name for name in algorithms if name not in versions and name not in sources]:
            raise InvalidInputError(f"algorithms has {', '.join(unknown)}; measured are {', '.join(sorted(sources))}")
        wanted = {TORCHS_OWN, *algorithms}
        versions = {name: at for name, at in versions.items() if not wanted.isdisjoint((name, source_of(name)))}
    stored = database.measurements_of_all(chosen, problems, versions)
    local = None
    if strict:
        every = every_algorithm(chosen.device_type)
        local = {problem: {TORCHS_OWN, *(one.name for one in every if is_local(one, problem))} for problem in problems}
    found = {}
    for task in tasks:
        sizes = frozenset(micro_batch_sizes(policy, task.batch_size))
        of_policy = [m for m in stored[task.problem] if m.micro_config.micro_batch_size in sizes]
        found[task] = [m for m in of_policy if local is None or m.micro_config.algorithm in local[task.problem]]
    lacking = [task for task, known in found.items() if not _can_cover(task.batch_size, known)]
    if lacking:
        lines = "".join(f"\n  {task}, batch {task.batch_size}" for task in lacking)
        raise InvalidInputError(
            f"the stored measurements lack {len(lacking)} of the {len(found)} convolutions asked for; measure them by "
            f"mucudnn tune, without --stored. On {chosen}:{lines}"
        )
    runs = {task: database.whole_runs(chosen, task.problem, versions, fresh=task.in_headroom) for task in found}
    return SelectedMeasurements(chosen, versions, found, runs)


def _environment(database: Database, problems: frozenset[ConvProblem], text: str | None) -> Environment:
    """Return the environment that ``text`` matches, by number or part of its description, if exactly one does."""
    every = dict(enumerate(database.environments(), start=1))
    if not every:
        raise InvalidInputError("there are no measurements to choose from; make some with mucudnn tune")
    covered = {number: len(database.problems(one) & problems) for number, one in every.items()}
    if text is None:
        matching = [number for number in every if covered[number]] or [*every]
    elif text.strip().isdecimal():
        matching = [number for number in every if number == int(text)]
    else:
        named = [number for number, one in every.items() if text.strip().lower() in str(one).lower()]
        matching = [number for number in named if str(every[number]) == text.strip()] or named
    if len(matching) == 1:
        return every[matching[0]]
    what = "the measurements are of several environments"
    if text is not None:
        what = f"environment is {text!r}, which picks none or several"
    lines = (f"\n  {i}: {every[i]}; has {covered[i]} of the {len(problems)} problems asked for" for i in every)
    raise InvalidInputError(f"{what}; pick one with --environment, by its number or part of its text:{''.join(lines)}")


def _can_cover(batch_size: int, measurements: Iterable[Measurement]) -> bool:
    """Whether micro-batches of the measured sizes can add up to the batch size."""
    sizes = {m.micro_config.micro_batch_size for m in measurements}
    reached = {0}
    for n in range(1, batch_size + 1):
        if any(n - size in reached for size in sizes):
            reached.add(n)
    return batch_size in reached
