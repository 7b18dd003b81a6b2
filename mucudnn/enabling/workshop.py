"""Look-up and tuning of one problem at a time, with machines and databases that are opened once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from mucudnn.database.database import Database
from mucudnn.database.selection import SelectedMeasurements
from mucudnn.measuring.whole_runs import Machine
from mucudnn.running.devices import made_current
from mucudnn.running.environment import Environment
from mucudnn.solver.policies import micro_batch_sizes
from mucudnn.tuning.benchmarker import permitted_algorithms
from mucudnn.tuning.choose import refuted
from mucudnn.tuning.replay import replay
from mucudnn.tuning.result import TunedProblem
from mucudnn.tuning.tuner import Priors, tune_tasks
from mucudnn.words.config import BatchSizePolicy, Config
from mucudnn.words.errors import InfeasibleError
from mucudnn.words.problem import ConvProblem
from mucudnn.words.results import MicroConfig
from mucudnn.words.task import Task
from mucudnn.words.torch_settings import TorchSettings, deterministic_torch
from mucudnn.words.warning import say_once

MachineOf = Callable[[str], Machine]


class Workshop:
    """Machines and databases with which problems are tuned under one config.

    Each thread has its own database connection, as SQLite requires. machine_of: makes the machine for a type of device.
    """

    def __init__(self, config: Config, machine_of: MachineOf | None = None) -> None:
        limits = [limit for limit in (config.time_limit_s, config.first_call_time_s) if limit is not None]
        self._config = replace(config, time_limit=min(limits, default=None))
        self._machine_of = machine_of or Machine.current
        self._machines: dict[tuple[object, ...], Machine] = {}
        self._priors: Priors = {}
        self._problems: dict[Environment, frozenset[ConvProblem]] = {}
        self._of_thread = threading.local()

    def check(self) -> None:
        """Open the database, and check the names of algorithms in the config.

        Raises ``DatabaseError`` if the file cannot be read, ``InvalidInputError`` for an unknown algorithm.
        """
        with self._ready(torch.device("cpu")) as (machine, _):
            permitted_algorithms(machine, self._config)

    def look_up(self, task: Task, device: torch.device) -> TunedProblem | None:
        """Choose for a task from stored measurements, without measuring.

        Returns None if nothing is stored, or if the choice was never measured as a whole at this batch size.
        """
        with self._ready(device) as (machine, database):
            if task.problem not in self._known(machine.environment, database):
                return None
            sizes = micro_batch_sizes(BatchSizePolicy(self._config.policy), task.batch_size)
            algorithms = permitted_algorithms(machine, self._config, task.problem, sizes)
            versions = {one.name: one.version for one in algorithms}
            key = machine.environment, task.problem, versions
            measured = [m for m in database.measurements(*key) if m.micro_config.micro_batch_size in sizes]
            stored = SelectedMeasurements(machine.environment, versions, (), {task: measured}, database)
            try:
                (tuned,) = replay([task], self._config, stored).problems
            except InfeasibleError:
                return None
            runs = database.whole_runs(*key)
            chosen = tuned.configuration
            has_run = chosen.micro_configs in runs or (chosen.is_baseline and _any_of_size(task.batch_size, runs))
            return replace(tuned, refuted=refuted(task, tuned.allowed_measurements, runs)) if has_run else None

    def tune(self, task: Task, device: torch.device) -> TunedProblem:
        """Measure what the database lacks, within the config's time limits, and return the choice.

        Raises the errors of ``tune_tasks``.
        """
        with self._ready(device) as (machine, database):
            (tuned,) = tune_tasks(
                [task], self._config, machine=machine, database=database, priors=self._priors, in_passing=True
            ).problems
        if any(measured.is_disturbed for measured in tuned.measurements):
            say_once(
                "the machine was busy while convolutions were tuned: run mucudnn database refresh when it is quiet, to "
                "repeat the doubtful measurements"
            )
        return tuned

    @contextmanager
    def _ready(self, device: torch.device) -> Iterator[tuple[Machine, Database]]:
        with made_current(device), deterministic_torch(self._config.deterministic):
            yield self._machine(device), self._database()

    def _known(self, environment: Environment, database: Database) -> frozenset[ConvProblem]:
        """Return the problems that the database had at the first look-up, so that only these are looked up again."""
        if environment not in self._problems:
            self._problems[environment] = database.problems(environment)
        return self._problems[environment]

    def _machine(self, device: torch.device) -> Machine:
        """Return the machine (device under measurement) for the current number of threads and settings of torch."""
        state = (device, TorchSettings.current()) if device.type == "cuda" else (device, torch.get_num_threads())
        if state not in self._machines:
            self._machines[state] = self._machine_of(device.type)
        return self._machines[state]

    def _database(self) -> Database:
        """Return this thread's database connection, opened again after a fork."""
        opened: tuple[int, Database] | None = getattr(self._of_thread, "opened", None)
        if opened is None or opened[0] != os.getpid():
            opened = self._of_thread.opened = os.getpid(), _writable(Database(self._config.database))
        return opened[1]


def _writable(database: Database) -> Database:
    if not database.read_only:
        return database
    say_once(f"database {database.path} cannot be written: tuned results are kept in this process only")
    return database.copy_in_memory()


def _any_of_size(batch_size: int, runs: Iterable[tuple[MicroConfig, ...]]) -> bool:
    return any(sum(part.micro_batch_size for part in parts) == batch_size for parts in runs)
