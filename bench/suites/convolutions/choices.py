"""Choices of a run of convolutions: policies, limits, memory formats and rounds."""

from __future__ import annotations

from dataclasses import dataclass

from mucudnn.bench.contests.timing import TurnRounds
from mucudnn.words.config import BatchSizePolicy
from mucudnn.words.problem import MemoryFormat

ROUNDS = 15
# Calls of milliseconds are sampled for so long: what two runs of them differ by chance is then some percent.
MOST_ROUNDS, SHORT_S = 81, 0.5


@dataclass(frozen=True, slots=True)
class Choices:
    """Choices of a run: the policies and the workspace limits (bytes; None: none) under which ours is chosen.

    Without policies ours is chosen as the config says, for the whole table at once; where it seems slower than torch,
    both are timed once more, in twice the rounds. memory_formats: those in which each problem is measured, in the same
    turns; none: the table's own.

    rounds: samples of each contestant; under policies short calls get more, up to ``MOST_ROUNDS``.

    time_limit_s: no problem is begun that would not be done by then, as far as the others tell; None: all are. It does
    not decide what is measured, so that a later run may have another one.

    budgets: bytes, each of which is divided over the whole table. at_best: whether each problem has two limits of its
    own, too: the workspace of the fastest undivided algorithm, and one byte less. same_time: whether the least
    workspace is sought with which ours is as fast as torch.
    """

    policies: tuple[BatchSizePolicy, ...] = ()
    limits: tuple[int | None, ...] = ()
    memory_formats: tuple[MemoryFormat, ...] = ()
    rounds: int = ROUNDS
    time_limit_s: float | None = None
    budgets: tuple[int, ...] = ()
    at_best: bool = False
    same_time: bool = False

    @property
    def turns(self) -> TurnRounds:
        """Number of rounds of a contest."""
        if not self.policies:
            return TurnRounds(self.rounds, self.rounds, 0.0)
        return TurnRounds(self.rounds, max(self.rounds, MOST_ROUNDS), SHORT_S)
