"""``tune``, which measures candidates without stored results, and chooses configurations by timing complete calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.distributed import ProcessGroup

from mucudnn.core.config import Config, config_or_default
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import MOST_ELEMENTS, ConvProblem
from mucudnn.core.records import Task
from mucudnn.core.terminal import Progress
from mucudnn.core.torch_settings import deterministic_torch
from mucudnn.core.values import instance, several, shown, whole
from mucudnn.distributed import propagate_errors, team_of
from mucudnn.measuring.clocks import kept_heap
from mucudnn.measuring.whole_runs import Machine
from mucudnn.running.devices import device_named, made_current
from mucudnn.running.dispatcher import untouched
from mucudnn.running.problems import largest_batch_size
from mucudnn.store.database import Database
from mucudnn.store.environment_store import EnvironmentStore
from mucudnn.tuning.benchmarker import Benchmarker, Priors
from mucudnn.tuning.result import TunedProblem, Tuning, TuningInterrupted
from mucudnn.tuning.workspaces import tune_each, tune_together

if TYPE_CHECKING:
    from mucudnn.distributed.team import Team

__all__ = ["Priors", "Progress", "TunedProblem", "Tuning", "TuningInterrupted", "tune", "tune_tasks"]


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

    With ``config.workspace_budget``, a budget is divided over all problems instead. Problems whose operation is not in
    ``config.operations`` are skipped. Stored results are not measured again; each new measurement is stored at once.
    ``device``: ``"cpu"``, ``"cuda"`` (the current GPU), a GPU by its number such as ``"cuda:1"``, or a
    ``torch.device``. ``progress`` is called with a description of the current work and the fraction that is done.
    ``names``: names of problems for progress and errors. ``database``: replaces the config's file. ``machine``:
    replaces this machine.

    In an initialized ``torch.distributed`` process group, all ranks must call it with the same problems: each measures
    its share, and all make the same choices. With ``Config(share_tuning=False)`` each rank tunes for itself.
    ``process_group``: replaces the default group.

    Raises ``InfeasibleError`` (naming the smallest limit of every problem that has no configuration, or the smallest
    budget), ``InvalidInputError`` for invalid arguments, an unknown algorithm, or a batch that is too large,
    ``UnavailableError`` for a missing device, ``DatabaseError`` for a file that cannot be read (if it cannot be written
    there is a warning instead), ``BrokenDeviceError`` if a candidate leaves the GPU unusable for this process (the next
    process skips it), ``SharingError`` if ranks differ or one of them is lost, and ``TuningInterrupted`` on Ctrl-C,
    with the finished problems.
    """
    config, place = config_or_default(config), device_named(device)
    names = instance(Mapping, {} if names is None else names, "names")  # type: ignore[type-abstract]
    samples, limit = whole(batch_size, "batch_size", 1), config.workspace_limit_bytes
    given = [instance(ConvProblem, problem, "one of problems") for problem in several(problems)]
    wanted = dict.fromkeys(problem for problem in given if problem.operation in config.operations)
    fits = config.baseline_exempt
    tasks = [Task(p, samples, limit, name=names.get(p, ""), baseline_exempt=fits) for p in wanted]
    team = team_of(config, process_group)
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
    """Tune tasks of any batch sizes, limits and counts, as ``tune`` does; the result has their order.

    priors: cache of expected times from earlier calls, which is updated; reading them from the database is slow.
    in_passing: whether tuning happens inside a user's call, so that it neither waits for a quiet machine nor warns of a
    busy one. team: the ranks that tune together; it is closed at the end of this call.
    """
    require_callable(progress)
    if database is not None:
        instance(Database, database, "database")  # a path belongs in the config
    if machine is not None:
        instance(Machine, machine, "machine")
    with ExitStack() as stack:
        for context in (propagate_errors(team), untouched, kept_heap()):
            stack.enter_context(context)
        on, opened = stack.enter_context(machine_and_database(config, device, machine, database))
        _require_countable(tasks, on.device)
        benchmarker = partial(Benchmarker, config, on, progress=progress, priors=priors, in_passing=in_passing)
        if team is None:
            return _tune(benchmarker(EnvironmentStore(opened, on.environment)), tasks)
        from mucudnn.tuning.sharing import sharing  # only needed with several ranks

        with sharing(team, tasks, config, on, opened) as (ranks, known):
            tuning = _tune(benchmarker(EnvironmentStore(known, on.environment), ranks=ranks), tasks)
            ranks.agree(tasks, tuning.problems)
            return tuning


@contextmanager
def machine_and_database(
    config: Config, device: str = "cpu", machine: Machine | None = None, database: Database | None = None
) -> Iterator[tuple[Machine, Database]]:
    """Yield the machine and the database: by default the current machine and the config's database file.

    Within the context, torch's determinism is set as in the config, since it is part of the machine's environment.
    """
    with deterministic_torch(config.deterministic), ExitStack() as stack:
        machine = machine or Machine.current(device)
        yield machine, stack.enter_context(Database(config.database)) if database is None else database


def require_callable(progress: object) -> None:
    """Raise ``InvalidInputError`` if ``progress`` is not callable, before anything is measured."""
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


def _tune(benchmarker: Benchmarker, tasks: Sequence[Task]) -> Tuning:
    """Find the tasks' candidates, measure them, solve, and verify the choices by whole runs; return the results.

    Ctrl-C keeps the finished problems.
    """
    try:
        jobs = [benchmarker.job(task) for task in tasks]
        benchmarker.begin(jobs)
        each_has_its_limit = benchmarker.config.workspace_budget_bytes is None
        tuning = tune_each(benchmarker, jobs) if each_has_its_limit else tune_together(benchmarker, jobs)
    except KeyboardInterrupt:
        raise TuningInterrupted(benchmarker.tuning()) from None
    benchmarker.end()
    return tuning
