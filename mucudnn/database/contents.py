"""Contents of a database, and of what was taken over into it, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mucudnn.running.environment import Environment


@dataclass(frozen=True, slots=True)
class EnvironmentRows:
    """Numbers of rows of one environment, superseded ones included.

    doubtful: measurements and whole runs that count, and should be measured again.
    """

    environment: Environment
    measurements: int
    failures: int
    verifications: int
    confirmations: int
    doubtful: int


@dataclass(frozen=True, slots=True)
class DatabaseInfo:
    """A database in numbers: the answer of ``mucudnn database info``."""

    path: Path
    size_bytes: int
    schema_version: int
    environments: tuple[EnvironmentRows, ...]


@dataclass(frozen=True, slots=True)
class MergeCounts:
    """Numbers of rows that were taken over, and that were there before."""

    added: int
    known: int
