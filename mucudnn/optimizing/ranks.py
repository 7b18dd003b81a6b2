"""The ranks that confirm a model together: all know the same of each other, and so decide the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median, median_low
from typing import TypeVar

from mucudnn.distributed.agreement import Described
from mucudnn.distributed.fingerprint import by_rank
from mucudnn.distributed.team import Team
from mucudnn.optimizing.in_place import Place, Spent
from mucudnn.optimizing.steps_in_turns import StepTimes
from mucudnn.words.errors import SharingError

T = TypeVar("T")


class Alone:
    """One process, which asks nobody."""

    def of_all(self, own: StepTimes) -> StepTimes:
        """Return a step as all ranks have seen it."""
        return own

    def anywhere(self, holds: bool) -> bool:
        """Tell whether something holds on any rank."""
        return holds

    def everywhere(self, holds: bool) -> bool:
        """Tell whether something holds on all ranks."""
        return not self.anywhere(not holds)

    def known_to_all(self, known: T | None) -> T | None:
        """Return what all ranks know alike; ``None`` where one knows nothing, or something else."""
        return known

    def to_write(self, row: T) -> list[T]:
        """Return what this rank has to write, of the rows that the ranks have."""
        return [row]

    def require_same(self, what: str, value: str, remedy: str) -> None:
        """Raise ``SharingError`` where ranks have different values."""

    def agree(self, decided: Described) -> None:
        """Raise ``SharingError`` where ranks have decided differently. Nothing is asked afterwards."""


class Together(Alone):
    """The ranks of a process group, which all call the same methods in the same order.

    Ranks of one kind of device judge together, those of other kinds go through as many steps: a step may hold
    collectives of all. Every method raises ``SharingError`` where a rank has failed or ended.
    """

    def __init__(self, team: Team) -> None:
        self._team = team

    def of_all(self, own: StepTimes) -> StepTimes:
        """Return what counts of a step: that of the slowest rank of this kind, since ranks wait for each other.

        A convolution has the median of the ranks. What disturbs one rank, of any kind, disturbs the step.
        """
        every = self._team.gather(own)
        of_kind = self._team.of_kind(every)
        load = max((times.load for times in every if times.load is not None), default=None)
        return StepTimes(max(times.time_s for times in of_kind), _medians(of_kind), load)

    def anywhere(self, holds: bool) -> bool:
        return any(self._team.gather(holds))

    def known_to_all(self, known: T | None) -> T | None:
        first, *others = self._team.gather_of_kind(known)
        return first if self.everywhere(first is not None and all(one == first for one in others)) else None

    def to_write(self, row: T) -> list[T]:
        distinct: list[T] = []
        for one in self._team.gather(row):
            if one not in distinct:
                distinct.append(one)
        return distinct if self._team.is_writer else []

    def require_same(self, what: str, value: str, remedy: str) -> None:
        values = dict(enumerate(self._team.gather(value)))
        if len({*values.values()}) > 1:
            raise SharingError(f"{what} is {by_rank(values)}; {remedy}")

    def agree(self, decided: Described) -> None:
        self._team.agree(decided)


def _medians(of_ranks: Sequence[StepTimes]) -> Mapping[Place, Spent]:
    """Return the median over the ranks, at each place; in the order of the first rank."""
    spent: dict[Place, list[Spent]] = {}
    for times in of_ranks:
        for place, one in times.convolutions.items():
            spent.setdefault(place, []).append(one)
    return {
        place: Spent(median_low(one.calls for one in every), median(one.time_s for one in every))
        for place, every in spent.items()
    }
