"""Settings of a benchmark run of convolutions: policies, limits, memory formats and rounds."""

from __future__ import annotations

from dataclasses import dataclass

from mucudnn.bench.contests.timing import TurnRounds
from mucudnn.words.config import BatchSizePolicy
from mucudnn.words.problem import MemoryFormat

ROUNDS = 15
# Short calls are sampled for SHORT_S seconds, which brings the noise between two runs down to a few percent.
MOST_ROUNDS, SHORT_S = 81, 0.5


@dataclass(frozen=True, slots=True)
class Choices:
    """Settings of a run: the policies and workspace limits (bytes, None: no limit) under which mucudnn chooses.

    Without policies, mucudnn chooses under the config for the whole table at once; if its choice seems slower than
    torch, both are timed once more, with twice the rounds. memory_formats: measured interleaved for each problem; if
    empty, the table's own.

    rounds: time samples of each contestant; under policies, short calls get more, up to ``MOST_ROUNDS``.

    time_limit_s: a problem is started only if it is expected to finish by then; None for no time limit. A resumed run
    may have another time limit.

    budgets: bytes, each divided over the whole table. at_best: whether each problem also gets two limits of its own:
    the workspace of the fastest undivided algorithm, and one byte less. same_time: whether to search for the smallest
    workspace with which mucudnn is as fast as torch.
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
        """The rule for the number of rounds in which the contestants of a problem are timed."""
        if not self.policies:
            return TurnRounds(self.rounds, self.rounds, 0.0)
        return TurnRounds(self.rounds, max(self.rounds, MOST_ROUNDS), SHORT_S)
