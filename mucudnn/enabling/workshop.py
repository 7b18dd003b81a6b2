"""Look-up and tuning of single problems, and configurations derived from the nearest tuned size."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import inf, log

import torch

from mucudnn.core.answers import TunedProblem
from mucudnn.core.config import BatchSizePolicy, Config
from mucudnn.core.errors import InfeasibleError, InvalidInputError, LibraryError, UnavailableError, say_once
from mucudnn.core.problem import ConvProblem
from mucudnn.core.records import Configuration, Environment, MicroConfig, Task
from mucudnn.core.torch_settings import TORCHS_OWN, TorchSettings, deterministic_torch
from mucudnn.kernels.registry import algorithm as algorithm_named
from mucudnn.measuring.candidates import is_foreign
from mucudnn.measuring.whole_runs import Machine
from mucudnn.running.devices import made_current
from mucudnn.running.executable import Executable
from mucudnn.solver.front import desirable_sets
from mucudnn.solver.reuse import micro_batch_sizes
from mucudnn.store.database import Database
from mucudnn.tuning.choose import refuted
from mucudnn.tuning.job import permitted_algorithms
from mucudnn.tuning.replay import SelectedMeasurements, replay
from mucudnn.tuning.result import configurations_of
from mucudnn.tuning.tuner import Priors, tune_tasks

FIRST_CALL_S = 1.0  # time limit of a problem that is tuned in the user's own call
MachineOf = Callable[[str], Machine]


class Workshop:
    """Machines and databases with which problems are tuned under one config.

    Each thread has its own database connection, as SQLite requires. machine_of: makes the machine for a type of device.
    """

    def __init__(self, config: Config, machine_of: MachineOf | None = None) -> None:
        self._config = config if config.time_limit is not None else replace(config, time_limit=FIRST_CALL_S)
        self._machine_of = machine_of or partial(Machine.current, keep_heap=config.keep_heap)
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
            known = self._problems.get(machine.environment)
            if known is None:  # only what is stored now needs to be looked up later
                known = self._problems[machine.environment] = database.problems(machine.environment)
            if task.problem not in known:
                return None
            sizes = micro_batch_sizes(BatchSizePolicy(self._config.policy), task.batch_size)
            algorithms = permitted_algorithms(machine, self._config, task.problem, sizes)
            versions = {one.name: one.version for one in algorithms}
            key = machine.environment, task.problem, versions
            measured = [m for m in database.measurements(*key) if m.micro_config.micro_batch_size in sizes]
            runs = database.whole_runs(*key)
            stored = SelectedMeasurements(machine.environment, versions, {task: measured}, {task: runs})
            try:
                (tuned,) = replay([task], self._config, stored).problems
            except InfeasibleError:
                return None
            chosen = tuned.configuration
            sizes_run = {sum(part.micro_batch_size for part in parts) for parts in runs}
            has_run = chosen.micro_configs in runs or (chosen.is_baseline and task.batch_size in sizes_run)
            return replace(tuned, refuted=refuted(task, tuned.allowed_measurements, runs)) if has_run else None

    def tune(self, task: Task, device: torch.device) -> TunedProblem:
        """Measure candidates without stored results, within the config's time limits, and return the choice.

        Raises the errors of ``tune_tasks``.
        """
        with self._ready(device) as (machine, database):
            (tuned,) = tune_tasks(
                [task], self._config, machine=machine, database=database, priors=self._priors, in_passing=True
            ).problems
        if any(measured.is_disturbed for measured in tuned.measurements):
            say_once(
                "the machine was busy while convolutions were tuned: some timings may be too high, and are "
                "measured again the next time they are needed on a quiet machine"
            )
        return tuned

    @contextmanager
    def _ready(self, device: torch.device) -> Iterator[tuple[Machine, Database]]:
        """Yield the machine (for torch's current number of threads and settings) and this thread's database."""
        with made_current(device), deterministic_torch(asked=self._config.deterministic):
            state = (device, TorchSettings.current()) if device.type == "cuda" else (device, torch.get_num_threads())
            if state not in self._machines:
                self._machines[state] = self._machine_of(device.type)
            opened: tuple[int, Database] | None = getattr(self._of_thread, "opened", None)
            if opened is None or opened[0] != os.getpid():  # a fork needs a connection of its own
                database = Database(self._config.database)
                if database.read_only:
                    say_once(f"database {database.path} cannot be written: tuned results are kept in this process only")
                    database = database.copy_in_memory()
                opened = self._of_thread.opened = os.getpid(), database
            yield self._machines[state], opened[1]


# Configurations for sizes that were not tuned

# Speedups change slowly with the size. Beyond these limits, a speedup may not carry over to another size.
_LEAST_SPEEDUP = 1.1
_MOST_TIMES_PIXELS = 2.0


def nearest(
    problem: ConvProblem, batch_size: int, tuned: Sequence[TunedProblem], device_type: str
) -> tuple[Configuration, TunedProblem] | None:
    """Return a configuration for this size, and the tuned size that it derives from; None to run torch's convolution.

    tuned: the sizes of the same layer that were tuned. For another batch size, the stored measurements are solved
    again. For another image size, the algorithm that won at the nearest size is used if it won clearly, can compute the
    problem, and is within the limit.
    """
    same = [one for one in tuned if one.problem == problem]
    if not same:
        near = [one for one in tuned if _pixels_apart(problem, one.problem) <= log(_MOST_TIMES_PIXELS)]
        if not near:
            return None
        of = min(near, key=lambda one: (_pixels_apart(problem, one.problem), _distance(batch_size, one.batch_size)))
        configuration = _at_other_images(problem, batch_size, of, device_type)
        return None if configuration is None else (configuration, of)
    of = min(same, key=lambda one: _distance(batch_size, one.batch_size))
    if of.configuration.is_baseline:
        return None
    if batch_size <= of.batch_size:
        found = configurations_of(of).get(batch_size)
    else:
        found = desirable_sets(of.allowed_measurements, batch_size).fastest(batch_size, of.limit_bytes)
    # Torch's convolution in micro-batches was not compared with the undivided one for this batch size.
    if found is None or (batch_size != of.batch_size and found.algorithms == (TORCHS_OWN,)):
        return None
    return found, of


def _at_other_images(problem: ConvProblem, n: int, of: TunedProblem, device_type: str) -> Configuration | None:
    won = of.configuration
    if won.is_baseline or of.speedup is None or of.speedup < _LEAST_SPEEDUP or len(won.algorithms) > 1:
        return None
    (name,) = won.algorithms
    time_s = of.time_s * problem.flops(n) / of.problem.flops(of.batch_size)
    limit = inf if of.limit_bytes is None else of.limit_bytes
    size = min(n, max(part.micro_batch_size for part in won.micro_configs))
    while size:  # micro-batches of one size and a remainder, of half the size each time
        rest = (MicroConfig(name, n % size),) if n % size else ()
        micro_configs = (MicroConfig(name, size),) * (n // size) + rest
        workspace_bytes = _workspace_bytes(problem, Configuration(micro_configs, time_s, 0), device_type)
        if workspace_bytes is not None and workspace_bytes <= limit:
            return Configuration(micro_configs, time_s, workspace_bytes)
        size //= 2
    return None


def _workspace_bytes(problem: ConvProblem, configuration: Configuration, device_type: str) -> int | None:
    """Return the workspace of the configuration; None if it does not support this problem or is not proven for it."""
    try:
        for part in set(configuration.micro_configs):
            found = algorithm_named(part.algorithm, device_type)
            unproven = is_foreign(found, problem)
            if unproven or found.supports_micro_batch(problem, part.micro_batch_size) is not None:
                return None
        return Executable.of(problem, configuration, device_type=device_type).workspace_bytes
    except (InvalidInputError, LibraryError, UnavailableError):
        return None


def _pixels_apart(one: ConvProblem, other: ConvProblem) -> float:
    return abs(log(one.h * one.w / (other.h * other.w)))


def _distance(one: int, other: int) -> float:
    return abs(log(one / other))
