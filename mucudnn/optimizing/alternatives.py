"""Other dtypes and memory formats in which the convolutions of a model were measured on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

from mucudnn.database.selection import select_measurements
from mucudnn.tuning.replay import replay
from mucudnn.tuning.result import TunedProblem
from mucudnn.tuning.tuner import machine_and_database
from mucudnn.words.config import BatchSizePolicy, Config
from mucudnn.words.errors import DatabaseError, InfeasibleError, InvalidInputError
from mucudnn.words.problem import MemoryFormat
from mucudnn.words.task import Task
from mucudnn.words.units import format_seconds

_DTYPES = ("float32", "bfloat16", "float16")


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
    measured, and nothing is returned if the database cannot be read.
    """
    found, policy = [], BatchSizePolicy(Config().policy)
    given = {(tuned.problem.dtype, tuned.problem.memory_format) for tuned in every}
    with suppress(DatabaseError), machine_and_database(Config(), device) as (machine, database):
        for dtype, memory_format in product(_DTYPES, MemoryFormat):
            problems = [replace(tuned.problem, dtype=dtype, memory_format=memory_format) for tuned in every]
            tasks = [Task(problem, tuned.batch_size) for problem, tuned in zip(problems, every, strict=True)]
            if (dtype, memory_format) in given:
                continue
            with suppress(InvalidInputError, InfeasibleError):  # some were not measured
                unique, here = [*dict.fromkeys(tasks)], str(machine.environment)
                stored = select_measurements(database, unique, policy, environment=here)
                chosen = dict(zip(unique, replay(unique, Config(), stored).problems, strict=True))
                time_s = sum(chosen[task].configuration.time_s for task in tasks)
                found.append(Alternative(dtype, memory_format, time_s))
    return tuple(sorted(found, key=lambda one: one.time_s))
