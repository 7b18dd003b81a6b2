"""The ranks that tune together, as one of them sees it: those of its kind of device measure for each other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import asdict
from typing import Self, TypeVar

import torch.distributed as dist

from mucudnn.distributed.exchange import ALONE, Exchange
from mucudnn.distributed.fingerprint import Described, Fingerprint, digest, kinds, require_agreement, require_alike

T = TypeVar("T")


def deal(costs: Sequence[float], ranks: int) -> list[int]:
    """Return the rank, from 0, of each piece of work: the longest first, to the rank that has least to do so far.

    costs: of the pieces, in any unit; one that costs nothing goes to the rank with the fewest pieces. The last rank is
    done at most 4/3 - 1/(3 ranks) times as late as with the best dealing (Graham, 1969). The same costs always give
    the same answer.

    >>> deal([1, 5, 3, 3], ranks=2)
    [0, 0, 1, 1]
    """
    loads = [(0.0, 0, rank) for rank in range(ranks)]  # cost, number of pieces
    ranks_of = [0] * len(costs)
    for piece in sorted(range(len(costs)), key=lambda piece: -costs[piece]):
        load, count, rank = min(loads)
        ranks_of[piece] = rank
        loads[rank] = load + costs[piece], count + 1, rank
    return ranks_of


class Team:
    """The ranks of a process group. All of them call the same methods in the same order.

    Every method raises ``SharingError`` where a rank has failed or ended; see ``Exchange``.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._kinds: Sequence[Sequence[int]] = [range(exchange.size)]
        self._mates = self._kinds[0]
        self.is_writer = exchange.rank == 0

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> Self | None:
        """Return the team of a group, ``None`` being the default one; ``None``: it has one rank."""
        exchange = Exchange(group)
        return cls(exchange) if exchange.size > 1 else None

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of its kind."""
        return self._mates[0] == self._exchange.rank

    def propagate_errors(self) -> AbstractContextManager[None]:
        """Tell the others of an error inside, so that they do not wait."""
        return self._exchange.propagate_errors()

    def again(self) -> Self:
        """Return the same ranks, which agree on something else."""
        other = copy(self)
        other._exchange = self._exchange.again()
        return other

    def meet(self, fingerprint: Fingerprint) -> None:
        """Exchange fingerprints: find the ranks of this kind, and who writes at this place.

        Raises ``SharingError`` that names ranks and what differs where it must not.
        """
        every = [Fingerprint.from_plain(plain) for plain in self._exchange.gather(asdict(fingerprint))]
        require_alike(every, ALONE)
        by_kind = kinds(every)
        self._kinds, self._mates = [*by_kind.values()], by_kind[fingerprint.kind]
        places = [one.place for one in every]
        self.is_writer = places.index(fingerprint.place) == self._exchange.rank

    def gather(self, message: T) -> list[T]:
        """Return the message of every rank, of any kind."""
        return self._exchange.gather(message)

    def gather_of_kind(self, message: T) -> list[T]:
        """Return the messages of the ranks of this kind."""
        return self.of_kind(self._exchange.gather(message))

    def of_kind(self, gathered: Sequence[T]) -> list[T]:
        """Return what the ranks of this kind have said."""
        return [gathered[rank] for rank in self._mates]

    def own(self, costs: Sequence[float]) -> list[int]:
        """Return the numbers of the pieces of work that this rank does. costs: those of the first of its kind count."""
        (costs, *_) = self.gather_of_kind(costs)
        mine = self._mates.index(self._exchange.rank)
        return [piece for piece, rank in enumerate(deal(costs, len(self._mates))) if rank == mine]

    def agree(self, choices: Described) -> None:
        """Compare what was chosen by the ranks of each kind. It is the last exchange.

        Raises ``SharingError`` on every rank, which names convolutions, ranks and what differs.
        """
        digests = self._exchange.gather(digest(choices))
        if any(len({digests[rank] for rank in ranks}) > 1 for ranks in self._kinds):
            every = self._exchange.gather(choices)
            self._exchange.end()
            for ranks in self._kinds:
                require_agreement({rank: every[rank] for rank in ranks})
        self._exchange.end()
