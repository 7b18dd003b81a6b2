"""Measuring on several devices of this machine, with a process for each and one database file for all.

The processes exchange nothing: the caller finds their results in the database, and measures what is missing.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from tempfile import TemporaryFile

import torch

from mucudnn.database.database import Database
from mucudnn.database.sqlite_file import MEMORY
from mucudnn.distributed.team import deal
from mucudnn.running.devices import device_named, made_current
from mucudnn.tuning.job import expected_s
from mucudnn.tuning.tuner import tune_tasks
from mucudnn.words.config import ALL_DEVICES, Config
from mucudnn.words.errors import InfeasibleError, InvalidInputError
from mucudnn.words.task import Task
from mucudnn.words.torch_settings import float32_precisions, set_float32_precisions
from mucudnn.words.warning import warn

_PROGRAM = "import sys; sys.path[:] = {path!r}; from mucudnn.tuning.on_devices import main; main()"


@dataclass(frozen=True, slots=True)
class Part:
    """The tasks to measure on one device, with the settings of torch that the results depend on."""

    device: str
    tasks: Sequence[Task]
    config: Config
    threads: int
    precisions: tuple[str, str]

    def measure(self) -> None:
        """Measure the tasks with these settings. Raises the errors of ``tune_tasks`` but ``InfeasibleError``."""
        torch.set_num_threads(self.threads)
        set_float32_precisions(self.precisions)
        device = device_named(self.device)
        with made_current(device), suppress(InfeasibleError):  # which the caller will raise for all tasks
            tune_tasks(self.tasks, self.config, device=device.type)


def measure_on_devices(tasks: Sequence[Task], config: Config, device_type: str, database: Database) -> None:
    """Measure the tasks on ``config.devices``, in a process for each; the results are then in the database.

    Does nothing for fewer than two devices, or if the database has no file that can be written. If a process fails, its
    tasks stay unmeasured, with a warning. Tasks of one problem stay together.

    Raises ``InvalidInputError`` for devices of another kind than ``device_type``. Ctrl-C ends all processes.
    """
    devices = _names(config, device_type)
    if len(devices) < 2 or database.read_only or database.path == MEMORY:
        return
    with ExitStack() as stack:
        running = []
        for part in _parts(tasks, devices, replace(config, database=database.path)):
            program = [sys.executable, "-c", _PROGRAM.format(path=sys.path)]
            told = stack.enter_context(TemporaryFile())
            process = stack.enter_context(subprocess.Popen(program, stdin=subprocess.PIPE, stderr=told))
            stack.callback(process.terminate)  # after an error or Ctrl-C here
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin:
                pickle.dump(part, process.stdin)
            running.append((part.device, process, told))
        for device, process, told in running:
            if process.wait() != 0:
                told.seek(0)
                lines = told.read().decode(errors="replace").splitlines() or [f"exit status {process.returncode}"]
                warn(f"measuring on {device} failed, and its share is measured here: {lines[-1]}", RuntimeWarning)


def main() -> None:
    """Measure the part that standard input has, as a process of ``measure_on_devices``."""
    part: Part = pickle.load(sys.stdin.buffer)
    part.measure()


def _names(config: Config, device_type: str) -> Sequence[str]:
    if config.devices != ALL_DEVICES:
        kind = config.devices[0].partition(":")[0]
        if kind != device_type:
            raise InvalidInputError(
                f"devices are {', '.join(config.devices)}, and the convolutions are on {device_type}: name devices of "
                "that kind, or all"
            )
        return config.devices
    return [f"cuda:{number}" for number in range(torch.cuda.device_count())] if device_type == "cuda" else ["cpu"]


def _parts(tasks: Sequence[Task], devices: Sequence[str], config: Config) -> list[Part]:
    config = replace(config, devices=(), share_tuning=False)
    of_problem = {task.problem: task.batch_size for task in tasks}
    places = deal([expected_s(problem, n) for problem, n in of_problem.items()], len(devices))
    place_of = dict(zip(of_problem, places, strict=True))
    settings = torch.get_num_threads(), float32_precisions()
    shares = [[task for task in tasks if place_of[task.problem] == place] for place in range(len(devices))]
    return [Part(device, share, config, *settings) for device, share in zip(devices, shares, strict=True) if share]
