"""What the database tests store, and expect to find again."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Comparison, Environment, Failure, Measurement, MicroConfig
from mucudnn.store.database import Database

HERE = Environment("AMD EPYC", "AVX512", 2, "2.13.0", "oneDNN 3.12.0", "avx512")
PROBLEM = ConvProblem(Operation.FORWARD, 64, 27, 28, 192, 5, 4, (1, 2), (2, 1), (1, 3), 2)
STEPS_S = (2.6e-3, 2.4e-3, 2.5e-3, 2.49e-3, 2.51e-3)
FAST = Measurement(MicroConfig("gemm", 8), 1e-6, 2.5e-3, 64, 2**40, 1e-16, 0.01, 5, None, (1e-6,), STEPS_S)
FAILED = Failure(MicroConfig("fft", 8), "out of memory")
VERSIONS = {"gemm": 1, "fft": 1}
VERIFIED = Comparison(2.0, 1.0, 0.1, None, (2.1, 2.0, 1.9), (1.2, 1.0, 0.9))
FULL = ((FAST,), (FAILED,), VERIFIED)


def fill(path: Path) -> Path:
    """Make a database with one measurement, one failure and one verification."""
    with Database(path) as database:
        database.add(HERE, PROBLEM, 1, FAST)
        database.add_failure(HERE, PROBLEM, 1, FAILED)
        database.add_whole_run(HERE, PROBLEM, [FAST.micro_config], VERSIONS, VERIFIED)
    return path


def rows_of(
    path: Path, environment: Environment, problem: ConvProblem, versions: dict[str, int] = VERSIONS
) -> tuple[object, ...]:
    with Database(path) as database:
        return (
            database.measurements(environment, problem, versions),
            database.failures(environment, problem, versions),
            database.whole_run(environment, problem, [FAST.micro_config], versions),
        )


def change(path: Path, sql: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(sql)
    connection.close()
