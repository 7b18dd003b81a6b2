"""Look-up and tuning of single problems, and configurations derived from the nearest tuned size."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import log

import torch

from mucudnn.core.answers import TunedProblem
from mucudnn.core.config import BatchSizePolicy, Config
from mucudnn.core.errors import InfeasibleError, InvalidInputError, LibraryError, UnavailableError, say_once, tolerated
from mucudnn.core.problem import ConvProblem
from mucudnn.core.records import Configuration, Environment, MicroConfig, Task
from mucudnn.core.torch_settings import TORCHS_OWN, TorchSettings, deterministic_torch
from mucudnn.enabling.status import Decision, Origin
from mucudnn.kernels.registry import algorithm as algorithm_named
from mucudnn.measuring.candidates import is_foreign
from mucudnn.measuring.proving.prover import prover
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

    Each thread has its own database connection, as SQLite requires.

    machine_of: makes the machine for a type of device.
    """

    def __init__(self, config: Config, machine_of: MachineOf | None = None) -> None:
        self._config = config if config.time_limit is not None else replace(config, time_limit=FIRST_CALL_S)
        self._machine_of = machine_of or partial(Machine.current, keep_heap=config.keep_heap)
        self._machines: dict[tuple[object, ...], Machine] = {}
        self._priors: Priors = {}
        self._problems: dict[Environment, frozenset[ConvProblem]] = {}
        self._filters: dict[tuple[object, ...], frozenset[tuple[int, ...]]] = {}  # by device and number of threads
        self._stored: dict[tuple[object, ...], frozenset[ConvProblem]] = {}  # likewise
        self._thread = threading.local()

    def check(self) -> None:
        """Open the database, and check the names of algorithms in the config.

        Raises ``DatabaseError`` if the file cannot be read, ``InvalidInputError`` for an unknown algorithm.
        """
        with self._ready(torch.device("cpu")) as (machine, _):
            permitted_algorithms(machine, self._config)

    def prepare(self) -> None:
        """Begin what the first tuning would otherwise lack: the proving process, which takes a second to start."""
        with tolerated(Exception):  # tuning will tell
            prover().start(waits=False)

    def may_know(self, w_shape: Sequence[int], device: torch.device) -> bool:
        """Return whether something may be stored for filters of this size: True before anything was looked up.

        w_shape: (K, C // groups, R, S), or without R.
        """
        filters = self._filters.get((device, torch.get_num_threads()))
        return filters is None or (*w_shape[:2], *w_shape[-1:]) in filters  # torch reports a w without dimensions

    def may_have(self, problem: ConvProblem, device: torch.device) -> bool:
        """Return whether something may be stored for a problem: True before anything was looked up."""
        problems = self._stored.get((device, torch.get_num_threads()))
        return problems is None or problem in problems

    def look_up(self, task: Task, device: torch.device) -> TunedProblem | None:
        """Choose for a task from stored measurements, without measuring.

        Returns None if nothing is stored, or if the choice was never measured as a whole at this batch size.
        """
        with self._ready(device) as (machine, database):
            environment = machine.environment
            if environment not in self._problems:  # only what is stored now needs to be looked up later
                self._problems[environment] = database.problems(environment)
            if (device, torch.get_num_threads()) not in self._filters:
                filters = frozenset((*p.w_shape()[:2], p.s) for p in self._problems[environment])
                self._filters[device, torch.get_num_threads()] = filters
                self._stored[device, torch.get_num_threads()] = self._problems[environment]
            if task.problem not in self._problems[environment]:
                return None

            # Choose as a replay does, from what the permitted algorithms have stored.
            sizes = micro_batch_sizes(BatchSizePolicy(self._config.policy), task.batch_size)
            algorithms = permitted_algorithms(machine, self._config, task.problem, sizes)
            versions = {algorithm.name: algorithm.version for algorithm in algorithms}
            measurements = database.measurements(environment, task.problem, versions)
            runs = database.whole_runs(environment, task.problem, versions)
            usable = [m for m in measurements if m.micro_config.micro_batch_size in sizes]
            stored = SelectedMeasurements(environment, versions, {task: usable}, {task: runs})
            try:
                (tuned,) = replay([task], self._config, stored).problems
            except InfeasibleError:
                return None

            # What was never run whole is measured rather than trusted.
            chosen = tuned.configuration
            sizes_run = {sum(part.micro_batch_size for part in parts) for parts in runs}
            has_run = chosen.micro_configs in runs or (chosen.is_baseline and task.batch_size in sizes_run)
            return replace(tuned, refuted=refuted(task, tuned.allowed_measurements, runs)) if has_run else None

    def look_up_nearest(self, task: Task, device: torch.device) -> list[TunedProblem]:
        """Choose from what is stored for the nearest other size of the task's layer, for each batch size that was run.

        ``look_up`` comes first. Returns an empty list if no size is near.
        """
        with self._ready(device) as (machine, database):
            stored = self._problems[machine.environment]
            near = [p for p in stored if p.layer == task.problem.layer and are_near(p, task.problem)]
            if not near:
                return []
            problem = min(near, key=lambda p: (_pixels_apart(p, task.problem), str(p)))
            versions = {one.name: one.version for one in permitted_algorithms(machine, self._config, problem)}
            runs = database.whole_runs(machine.environment, problem, versions)
        sizes = {sum(part.micro_batch_size for part in parts) for parts in runs}
        found = (self.look_up(replace(task, problem=problem, batch_size=size), device) for size in sorted(sizes))
        return [tuned for tuned in found if tuned is not None]

    def tune(self, task: Task, device: torch.device) -> TunedProblem:
        """Measure candidates without stored results, within the config's time limits, and return the choice.

        Raises the errors of ``tune_tasks``.
        """
        with self._ready(device) as (machine, database):
            (tuned,) = tune_tasks(
                [task], self._config, machine=machine, database=database, priors=self._priors, in_passing=True
            ).problems
        if any(measurement.is_disturbed for measurement in tuned.measurements):
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
            if getattr(self._thread, "process", None) != os.getpid():  # a fork needs a connection of its own
                database = Database(self._config.database)
                if database.read_only:
                    say_once(f"database {database.path} cannot be written: tuned results are kept in this process only")
                    database = database.copy_in_memory()
                self._thread.process, self._thread.database = os.getpid(), database
            yield self._machines[state], self._thread.database


# Configurations for sizes that were not tuned

# Speedups change slowly with the size. Beyond these limits, a speedup may not carry over to another size.
_LEAST_SPEEDUP = 1.1
_MOST_TIMES_PIXELS = 2.0


def nearest(problem: ConvProblem, batch_size: int, sizes: Sequence[TunedProblem], device_type: str) -> Decision | None:
    """Return what to run for this size, as derived from the nearest tuned size; None to run torch's convolution.

    sizes: the sizes of the same layer that were tuned. For another batch size, the stored measurements are solved
    again. For another image size, the algorithm that won at the nearest size is used if it won clearly, can compute the
    problem, and is within the limit.
    """
    near = [tuned for tuned in sizes if are_near(problem, tuned.problem)]
    if not near:
        return None

    def distance(tuned: TunedProblem) -> tuple[bool, float, float]:
        batches_apart = abs(log(batch_size / tuned.batch_size))
        return tuned.problem != problem, _pixels_apart(problem, tuned.problem), batches_apart

    tuned = min(near, key=distance)
    derive = _at_other_batch if tuned.problem == problem else partial(_at_other_images, problem, device_type)
    configuration = None if tuned.configuration.is_baseline else derive(batch_size, tuned)
    if configuration is None:
        return None
    share = problem.flops(batch_size) / tuned.problem.flops(tuned.batch_size)
    return Decision(
        origin=Origin.NEAREST,
        why=f"as for {tuned.problem.h}x{tuned.problem.w}, batch {tuned.batch_size}",
        configuration=configuration,
        limit_bytes=tuned.limit_bytes,
        baseline_s=None if tuned.baseline_s is None else tuned.baseline_s * share,
        time_s=tuned.time_s * share,
    )


def _at_other_batch(batch_size: int, tuned: TunedProblem) -> Configuration | None:
    if batch_size <= tuned.batch_size:
        configuration = configurations_of(tuned).get(batch_size)
    else:
        configuration = desirable_sets(tuned.allowed_measurements, batch_size).fastest(batch_size, tuned.limit_bytes)
    # Torch's convolution in micro-batches was not compared with the undivided one for this batch size.
    is_torchs = configuration is not None and configuration.algorithms == (TORCHS_OWN,)
    return None if is_torchs and batch_size != tuned.batch_size else configuration


def _at_other_images(
    problem: ConvProblem, device_type: str, batch_size: int, tuned: TunedProblem
) -> Configuration | None:
    winner = tuned.configuration
    if tuned.speedup is None or tuned.speedup < _LEAST_SPEEDUP or len(winner.algorithms) > 1:
        return None
    (name,) = winner.algorithms
    time_s = tuned.time_s * problem.flops(batch_size) / tuned.problem.flops(tuned.batch_size)
    size = min(batch_size, max(part.micro_batch_size for part in winner.micro_configs))
    while size:  # micro-batches of one size and a remainder, of half the size each time
        micro_batches = [size] * (batch_size // size) + [batch_size % size] * (batch_size % size > 0)
        micro_configs = tuple(MicroConfig(name, samples) for samples in micro_batches)
        workspace_bytes = _workspace_bytes(problem, Configuration(micro_configs, time_s, 0), device_type)
        if workspace_bytes is not None and (tuned.limit_bytes is None or workspace_bytes <= tuned.limit_bytes):
            return Configuration(micro_configs, time_s, workspace_bytes)
        size //= 2
    return None


def _workspace_bytes(problem: ConvProblem, configuration: Configuration, device_type: str) -> int | None:
    """Return the workspace of the configuration; None if it does not support this problem or is not proven for it."""
    try:
        for part in set(configuration.micro_configs):
            algorithm = algorithm_named(part.algorithm, device_type)
            is_unproven = is_foreign(algorithm, problem)
            if is_unproven or algorithm.supports_micro_batch(problem, part.micro_batch_size) is not None:
                return None
        return Executable.of(problem, configuration, device_type=device_type).workspace_bytes
    except (InvalidInputError, LibraryError, UnavailableError):
        return None


def are_near(problem: ConvProblem, other: ConvProblem) -> bool:
    return _pixels_apart(problem, other) <= log(_MOST_TIMES_PIXELS)


def _pixels_apart(problem: ConvProblem, near: ConvProblem) -> float:
    """Return the logarithm of how many times as many pixels the images of one problem have."""
    return abs(log(problem.h * problem.w / (near.h * near.w)))
