"""The ranks that confirm a model together: they exchange what they know, and so decide the same."""

from __future__ import annotations

from typing import TypeVar

from mucudnn.distributed.agreement import Described
from mucudnn.distributed.fingerprint import by_rank
from mucudnn.distributed.team import Team
from mucudnn.words.errors import SharingError

T = TypeVar("T")


class Ranks:
    """The ranks of a team, which all call the same methods in the same order; without a team, this process alone.

    Every method raises ``SharingError`` where a rank has failed or ended.
    """

    def __init__(self, team: Team | None = None) -> None:
        self._team = team

    @property
    def are_several(self) -> bool:
        return self._team is not None

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes to the database."""
        return self._team is None or self._team.is_writer

    def gather(self, message: T) -> list[T]:
        """Return the message of every rank."""
        return [message] if self._team is None else self._team.gather(message)

    def of_kind(self, gathered: list[T]) -> list[T]:
        """Return the messages of the ranks on this kind of device."""
        return gathered if self._team is None else self._team.of_kind(gathered)

    def anywhere(self, holds: bool) -> bool:
        """Tell whether something holds on any rank."""
        return any(self.gather(holds))

    def everywhere(self, holds: bool) -> bool:
        """Tell whether something holds on all ranks."""
        return all(self.gather(holds))

    def require_same(self, what: str, value: str, remedy: str) -> None:
        """Raise ``SharingError`` where ranks have different values."""
        values = dict(enumerate(self.gather(value)))
        if len({*values.values()}) > 1:
            raise SharingError(f"{what} is {by_rank(values)}; {remedy}")

    def agree(self, decided: Described) -> None:
        """Raise ``SharingError`` where ranks have decided differently. It is the last exchange."""
        if self._team is not None:
            self._team.agree(decided)
