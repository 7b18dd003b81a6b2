"""Selection of stored measurements for a set of tasks: one environment, one version of each algorithm."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from mucudnn.database.database import Database
from mucudnn.running.environment import Environment
from mucudnn.solver.policies import micro_batch_sizes
from mucudnn.words.config import BatchSizePolicy
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import ConvProblem
from mucudnn.words.results import Configuration, Measurement, WholeRun, package_of, source_of
from mucudnn.words.task import Task
from mucudnn.words.torch_settings import TORCHS_OWN

_MOST_LIKE_IT = 3  # similar problems that an error lists for each missing one


@dataclass(frozen=True, slots=True)
class SelectedMeasurements:
    """Measurements of one environment from which ``replay`` solves tasks. The database must stay open.

    versions: the version used, by algorithm. notes: sentences about measurements that were not used.
    """

    environment: Environment
    versions: Mapping[str, int]
    notes: tuple[str, ...]
    _measurements: Mapping[Task, Sequence[Measurement]]
    _database: Database

    def measurements(self, task: Task) -> Sequence[Measurement]:
        """Return a task's measurements at the micro-batch sizes of the policy, with any error and workspace."""
        return self._measurements[task]

    def whole_run(self, task: Task, configuration: Configuration) -> WholeRun | None:
        """Return the valid whole run (times of complete calls), in a fresh workspace for one in headroom; or None."""
        key = (self.environment, task.problem, configuration.micro_configs, self.versions)
        return self._database.whole_run(*key, fresh=task.in_headroom)


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
    use only torch's own and algorithms known to be local (a NaN spreads no further than in torch's), which library
    algorithms are not. environment: part of the environment's description, or its number in the error that lists them;
    None for the only one with measurements of the tasks' problems. Environments are never mixed. The newest version of
    each algorithm in the environment is used.

    Raises ``InvalidInputError`` for unknown algorithms, unless exactly one environment matches, and if the measurements
    of a task are missing or cannot cover its batch (naming each such task and its existing measurements).
    """
    problems = frozenset(task.problem for task in tasks)
    chosen = _environment(database, problems, environment)
    every_version = _named(database.versions(chosen), algorithms)
    versions = {algorithm: found[-1] for algorithm, found in every_version.items()}
    every = database.measurements_of_all(chosen, problems, versions)
    stored = _local(every, chosen.device_type) if strict else every
    found = {task: _of_policy(stored[task.problem], policy, task.batch_size) for task in tasks}
    _require_enough(database, chosen, policy, stored, found)
    set_aside = _set_aside(every, stored) if strict else ()
    notes = (*_notes(every_version), *_notes_of_packages(versions), *set_aside)
    return SelectedMeasurements(chosen, versions, notes, found, database)


def _named(versions: Mapping[str, Sequence[int]], algorithms: Collection[str] | None) -> Mapping[str, Sequence[int]]:
    """Return the versions of torch's own convolution and of the requested algorithms or sources."""
    if algorithms is None:
        return versions
    sources = {source_of(name) for name in versions}  # a GPU has hundreds of names
    if unknown := [name for name in algorithms if name not in versions and name not in sources]:
        raise InvalidInputError(f"algorithms has {_listed(unknown)}; measured are {_listed(sorted(sources))}")
    wanted = {TORCHS_OWN, *algorithms}
    return {name: found for name, found in versions.items() if not wanted.isdisjoint((name, source_of(name)))}


def _of_policy(measurements: Sequence[Measurement], policy: BatchSizePolicy, batch_size: int) -> list[Measurement]:
    allowed = frozenset(micro_batch_sizes(policy, batch_size))
    return [m for m in measurements if m.micro_config.micro_batch_size in allowed]


def _notes(versions: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    return tuple(
        f"{algorithm} was measured in versions {_listed(found)}: only {found[-1]}, the newest, is used"
        for algorithm, found in sorted(versions.items())
        if len(found) > 1
    )


def _notes_of_packages(algorithms: Iterable[str]) -> tuple[str, ...]:
    names = sorted(name for name in algorithms if package_of(name) is not None)
    what = "is an algorithm of another package" if len(names) == 1 else "are algorithms of other packages"
    return (f"{_listed(names)} {what}: where it is missing, PyTorch's own runs instead",) if names else ()


def _local(
    stored: Mapping[ConvProblem, Sequence[Measurement]], device_type: str
) -> dict[ConvProblem, list[Measurement]]:
    """Return the measurements of torch's own convolution and of local algorithms, which spread a NaN no further."""
    from mucudnn.kernels.registry import algorithms  # imported here, since it loads torch

    known = {algorithm.name: algorithm for algorithm in algorithms(device_type)}

    def is_local(name: str, problem: ConvProblem) -> bool:
        return name == TORCHS_OWN or (name in known and known[name].is_local(problem))

    return {
        problem: [m for m in measured if is_local(m.micro_config.algorithm, problem)]
        for problem, measured in stored.items()
    }


def _set_aside(
    every: Mapping[ConvProblem, Sequence[Measurement]], used: Mapping[ConvProblem, Sequence[Measurement]]
) -> tuple[str, ...]:
    missing = {m.micro_config.algorithm for problem in every for m in {*every[problem]}.difference(used[problem])}
    names = sorted({source_of(name) for name in missing})
    return (f"not known to be strict for each problem, and not used there: {_listed(names)}",) if names else ()


# One environment


def _environment(database: Database, problems: frozenset[ConvProblem], text: str | None) -> Environment:
    every = dict(enumerate(database.environments(), start=1))
    if not every:
        raise InvalidInputError("there are no measurements to solve from; make some with mucudnn tune")
    covered = {number: len(database.problems(every[number]) & problems) for number in every}
    if text is None:
        matching = [number for number in every if covered[number]] or [*every]
        what = "the measurements are of several environments, which are never mixed"
    else:
        matching = numbers_of(every, text)
        what = f"environment is {text!r}, which is {'none' if not matching else 'more than one'} of those stored"
    if len(matching) == 1:
        return every[matching[0]]
    lines = (
        f"\n  {number}: {every[number]}; has {covered[number]} of the {len(problems)} problems asked for"
        for number in matching or every
    )
    raise InvalidInputError(f"{what}; pick one with --environment, by its number or part of its text:{''.join(lines)}")


def numbers_of(every: Mapping[int, Environment], text: str) -> list[int]:
    """Return the numbers of the environments that ``text`` matches: a number or part of the description."""
    text = text.strip()
    if text.isdecimal():
        return [int(text)] if int(text) in every else []
    exact = [number for number, environment in every.items() if str(environment) == text]
    return exact or [number for number, environment in every.items() if text.lower() in str(environment).lower()]


# Coverage of the batches


def _require_enough(
    database: Database,
    environment: Environment,
    policy: BatchSizePolicy,
    stored: Mapping[ConvProblem, Sequence[Measurement]],
    found: Mapping[Task, Sequence[Measurement]],
) -> None:
    lacking = [task for task, measured in found.items() if not _can_cover(task.batch_size, _sizes(measured))]
    if not lacking:
        return
    known = database.problems(environment)
    lines = (f"\n  {task}, batch {task.batch_size}: {_instead(task, policy, stored, known)}" for task in lacking)
    raise InvalidInputError(
        f"the stored measurements lack {len(lacking)} of the {len(found)} convolutions asked for; ask for "
        f"others, or measure these with mucudnn tune. On {environment}:{''.join(lines)}"
    )


def _can_cover(batch_size: int, sizes: Collection[int]) -> bool:
    """Whether micro-batches of these sizes can add up to the batch size."""
    if batch_size in sizes or 1 in sizes:
        return True
    reached = {0}
    for n in range(1, batch_size + 1):
        if any(n - size in reached for size in sizes):
            reached.add(n)
    return batch_size in reached


def _instead(
    task: Task,
    policy: BatchSizePolicy,
    stored: Mapping[ConvProblem, Sequence[Measurement]],
    known: Collection[ConvProblem],
) -> str:
    """Describe the stored measurements for a task that they cannot cover."""
    if sizes := _sizes(stored[task.problem]):
        return (
            f"measured in micro-batches of {_listed(sizes)}; those that the policy {policy} allows do not add up to "
            f"{task.batch_size}"
        )
    if task.problem in known:
        return "measured only with other algorithms or older versions"
    return f"not measured{_others_like(task.problem, known)}"


def _others_like(problem: ConvProblem, known: Collection[ConvProblem]) -> str:
    """Describe the stored problems that differ from ``problem`` in the fewest fields, at most two."""
    differences = [_difference(problem, other) for other in known]
    fewest = min(map(len, differences), default=0)
    if not 1 <= fewest <= 2:
        return ", nor anything like it"
    nearest = sorted(", ".join(difference) for difference in differences if len(difference) == fewest)
    return ", but it is with " + " and with ".join(nearest[:_MOST_LIKE_IT])


def _difference(problem: ConvProblem, other: ConvProblem) -> list[str]:
    names = [field.name for field in fields(ConvProblem)]
    return [f"{name} {getattr(other, name)}" for name in names if getattr(other, name) != getattr(problem, name)]


def _sizes(measurements: Iterable[Measurement]) -> list[int]:
    return sorted({m.micro_config.micro_batch_size for m in measurements})


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
