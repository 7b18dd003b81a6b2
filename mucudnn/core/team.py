"""The ranks that tune together, as tuning and confirming see them: here this process alone."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Self, TypeVar

T = TypeVar("T")


class Team:
    """This process alone; ``Ranks`` of a process group derive from it. All ranks call the same methods in one order."""

    are_several: bool = False
    rank: int = 0

    def gather(self, message: T) -> list[T]:
        """Send a message to all ranks, and return the messages of all ranks, by rank."""
        return [message]

    def of_rank_0(self, message: T) -> T:
        """Return the message of rank 0, which decides for all."""
        return self.gather(message)[0]

    def anywhere(self, *, holds: bool) -> bool:
        """Return whether a condition holds on any rank."""
        return any(self.gather(holds))

    def everywhere(self, *, holds: bool) -> bool:
        """Return whether a condition holds on all ranks."""
        return all(self.gather(holds))

    def require_same(self, setting: str, value: str, remedy: str) -> None:
        """Raise ``SharingError`` if the ranks have different values of a setting that must be equal."""

    def propagate_errors(self) -> AbstractContextManager[None]:
        """Return a context that sends an error raised in its block to the other ranks, so that they stop waiting."""
        return nullcontext()

    def again(self) -> Self:
        """Return a team of the same ranks, for further messages after this one has been closed."""
        return self


ALONE = Team()
