"""The database of a process that shares its measuring with others: rows in memory, with new rows also in a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from mucudnn.core.errors import DatabaseError, warn
from mucudnn.store.database import Database
from mucudnn.store.schema import Row
from mucudnn.store.sqlite_file import MEMORY


class CopyingDatabase(Database):
    """Copy of a database file in memory. Added rows are also written to the file at once.

    Nothing is lost if the process ends, and rows that other processes add to the file do not change later answers.
    ``take`` adds rows of other processes. A file that cannot be written is abandoned after one warning.
    """

    def __init__(self, file: Database) -> None:
        super().__init__(MEMORY)
        file._file.copy_to(self._file)
        self._behind: Database | None = None if file.read_only else file
        self._fresh: list[Row] = []
        if file.read_only:
            _warn(f"database {file.path} cannot be written")

    def fresh_rows(self) -> Sequence[Row]:
        """Return the rows added since the last call of this method, except those added by ``take``."""
        rows, self._fresh = self._fresh, []
        return rows

    def take(self, rows: Iterable[Row], *, copies: bool) -> None:
        """Add missing rows of other processes, with their time stamps. copies: whether to write them to the file."""
        found = [*rows]
        self.add_exported(found)
        if copies and found:
            self._copy(Database.add_exported, found)

    def commit(self, row: Row) -> None:
        self._copy(Database.commit, row)
        super().commit(row)
        self._fresh.append(row)

    def _copy(self, add: Callable[..., object], *what: object) -> None:
        if self._behind is None:
            return
        try:
            add(self._behind, *what)
        except DatabaseError as error:
            self._behind = None
            _warn(str(error))


def _warn(why: str) -> None:
    warn(f"tuning goes on, but its measurements are kept in memory only: {why}")
