"""Other dtypes and memory formats in which the convolutions of a model were measured on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from mucudnn.database.rows import default_path
from mucudnn.database.selection import select_measurements
from mucudnn.tuning.replay import replay
from mucudnn.tuning.result import TunedProblem
from mucudnn.tuning.tuner import machine_and_database
from mucudnn.words.config import BatchSizePolicy, Config
from mucudnn.words.errors import InfeasibleError, InvalidInputError, MucudnnError
from mucudnn.words.problem import MemoryFormat
from mucudnn.words.task import Task
from mucudnn.words.units import format_seconds

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Alternative:
    """The predicted time of all tuned convolutions in another dtype or memory format, in seconds."""

    dtype: str
    memory_format: MemoryFormat
    time_s: float

    def __str__(self) -> str:
        return f"{self.dtype} and {self.memory_format}, {format_seconds(self.time_s)}"


def stored_alternatives(every: Sequence[TunedProblem], device: str = "cpu") -> tuple[Alternative, ...]:
    """Return the other dtypes and memory formats in which all these problems were measured, the fastest first.

    Times are of the choices that the measurements in the default database allow without a workspace limit. Nothing is
    measured or created, and nothing is returned if the database cannot be read, or on a machine without the device.
    """
    found, config = list[Alternative](), Config()
    if not Path(config.database or default_path()).expanduser().exists():
        return ()
    given = {(tuned.problem.dtype, tuned.problem.memory_format) for tuned in every}
    with suppress(MucudnnError), machine_and_database(config, device) as (machine, database):
        for dtype, memory_format in product(DTYPES, MemoryFormat):
            if (dtype, memory_format) in given:
                continue
            problems = (replace(tuned.problem, dtype=dtype, memory_format=memory_format) for tuned in every)
            tasks = [Task(problem, tuned.batch_size) for problem, tuned in zip(problems, every, strict=True)]
            with suppress(InvalidInputError, InfeasibleError):  # some were not measured
                unique, policy = [*dict.fromkeys(tasks)], BatchSizePolicy(config.policy)
                stored = select_measurements(database, unique, policy, environment=str(machine.environment))
                chosen = dict(zip(unique, replay(unique, config, stored).problems, strict=True))
                time_s = sum(chosen[task].configuration.time_s for task in tasks)
                found.append(Alternative(dtype, memory_format, time_s))
    return tuple(sorted(found, key=lambda one: one.time_s))
