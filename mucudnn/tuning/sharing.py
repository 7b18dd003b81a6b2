"""Tuning shared by the ranks of a process group: distribution of work, and exchange of results."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from mucudnn.core import VERSION
from mucudnn.core.answers import TunedProblem
from mucudnn.core.config import Config, in_words
from mucudnn.core.problem import ConvProblem
from mucudnn.core.records import Task
from mucudnn.core.team import Team
from mucudnn.core.values import grouped
from mucudnn.distributed.ranks import Fingerprint, Ranks
from mucudnn.measuring.whole_runs import Machine
from mucudnn.store.database import Database
from mucudnn.store.schema import Row
from mucudnn.store.sqlite_file import MEMORY
from mucudnn.store.tuning_store import CopyingDatabase

T = TypeVar("T")

_NO_REASON_TO_DIFFER = ("database",)  # config fields that may differ: ranks may have their own files


@contextmanager
def sharing(team: Team, tasks: Sequence[Task], config: Config, machine: Machine, file: Database) -> Iterator[Sharing]:
    """Synchronize with the other ranks, exchange stored results of the tasks, and yield the connection to them.

    Raises ``SharingError`` if ranks differ in tasks, config or environment.
    """
    assert isinstance(team, Ranks)  # for type checkers
    fingerprint = fingerprint_of(tasks, config, machine, file)
    team.meet(fingerprint)
    with closing(CopyingDatabase(file)) as known:
        shared = Sharing(team, known)
        problems = dict.fromkeys(task.problem for task in tasks)
        shared.exchange_rows(file.every_row(machine.environment, problems))
        yield shared


@dataclass(frozen=True, slots=True)
class Sharing:
    """Connection of this rank to the other ranks of the tuning.

    known: the stored results of all ranks.
    """

    team: Ranks
    known: CopyingDatabase

    def own(self, problems: Sequence[ConvProblem], costs: Sequence[float]) -> frozenset[int]:
        """Return the numbers of the jobs that this rank measures, given their problems and costs.

        Jobs of one problem go to the same rank. Only the costs of the first rank of each kind of device count.
        """
        pieces = [*grouped((problem, number) for number, problem in enumerate(problems)).values()]
        taken = self.team.own([sum(costs[number] for number in piece) for piece in pieces])
        return frozenset(chain.from_iterable(pieces[piece] for piece in taken))

    def exchange(self, findings: Mapping[int, T]) -> dict[int, T]:
        """Send findings of jobs to the ranks of the same device kind, and new database rows to all ranks.

        Return the findings of the other ranks.

        findings: by the job's number.
        """
        self.exchange_rows(self.known.fresh_rows())
        told = chain.from_iterable(message.items() for message in self.team.of_kind(self.team.gather(findings)))
        return {number: finding for number, finding in told if number not in findings}

    def exchange_rows(self, rows: Sequence[Row]) -> None:
        """Send database rows to all ranks; each rank keeps them in memory, and one rank per file stores them."""
        self.known.take(chain.from_iterable(self.team.gather(rows)), copies=self.team.is_writer)

    def agree(self, tasks: Sequence[Task], tuned: Sequence[TunedProblem]) -> None:
        """Check that all ranks of a kind of device chose the same.

        Raises ``SharingError``, naming convolutions and ranks, if they differ.
        """
        exact = [(choice.configuration.micro_configs, choice.limit_bytes, choice.refuted) for choice in tuned]
        choices = [f"{choice.configuration}, {details}" for choice, details in zip(tuned, exact, strict=True)]
        self.team.agree(dict(zip(map(_in_words, tasks), choices, strict=True)))


def fingerprint_of(tasks: Sequence[Task], config: Config, machine: Machine, file: Database) -> Fingerprint:
    """Return the properties of this rank that ranks compare before measuring."""
    environment = machine.environment
    release, _, _ = environment.torch.partition("+")
    everywhere = {"mucudnn": VERSION, "torch": release} | {
        f"Config.{name}": str(value) for name, value in in_words(config).items() if name not in _NO_REASON_TO_DIFFER
    }
    in_kind = {
        "torch": environment.torch,
        "library": environment.library,
        "compiled": environment.compiled,
        "threads": str(environment.threads),
        "numerics": environment.numerics,
        "algorithms": ", ".join(f"{algorithm.name} {algorithm.version}" for algorithm in machine.algorithms),
        "batch size": ", ".join(str(size) for size in sorted({task.batch_size for task in tasks}, reverse=True)),
    }
    kind = f"{environment.device_type}, {environment.device} ({environment.capability})"
    place = os.getpid() if file.path == MEMORY else file.path.absolute().resolve()  # equal where ranks share the file
    return Fingerprint(kind, f"{socket.gethostname()}:{place}", everywhere, in_kind, tuple(map(_in_words, tasks)))


def _in_words(task: Task) -> str:
    words = [task.name or "", str(task.problem), f"batch {task.batch_size}", f"limit {task.limit_bytes}"]
    return f"{', '.join(filter(None, words))}, {task.count} times"
