"""The database of a process that shares its measuring with others: rows in memory, with new rows also in a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from mucudnn.database.database import Database
from mucudnn.database.schema import Row
from mucudnn.database.sqlite_file import MEMORY
from mucudnn.running.environment import Environment
from mucudnn.words.errors import DatabaseError
from mucudnn.words.warning import warn

_NETWORK_FILE_SYSTEMS = (
    *("afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "orangefs", "panfs", "pvfs2"),
    *("smb3", "smbfs", "wekafs", "fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs", "fuse.s3fs", "fuse.sshfs"),
)


class CopyingDatabase(Database):
    """Copy of a database file in memory. Added rows are also written to the file at once.

    Nothing is lost if the process ends, and rows that other processes add to the file do not change later answers.
    ``take`` adds rows of other processes. A file that cannot be written is abandoned after one warning. On a network
    file system, where locks between hosts are unreliable, only ``take`` writes, in a single process.
    """

    def __init__(self, file: Database) -> None:
        super().__init__(MEMORY)
        file._file.copy_to(self._file)
        self._behind: Database | None = file
        self._fresh: list[Row] = []
        network = None if file.path == MEMORY else network_file_system(file.path)
        self._is_written_late = network is not None
        if file.read_only:
            self._behind = None
            _warn(f"database {file.path} cannot be written")
        elif self._is_written_late:
            warn(
                f"database {file.path} is in a network folder ({network}): ranks keep measurements in memory, and one "
                "of them writes all when tuning ends; name a local file to store each measurement at once",
            )

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
        if not self._is_written_late:
            self._copy(Database.commit, row)
        super().commit(row)
        self._fresh.append(row)

    def add_rate(self, environment: Environment, rate: float) -> None:
        if not self._is_written_late:
            self._copy(Database.add_rate, environment, rate)
        super().add_rate(environment, rate)

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


def network_file_system(path: Path) -> str | None:
    """Return the type of the network file system that holds a path, or None if it is local or unknown.

    On network file systems, locks between hosts are unreliable.
    """
    place, mount, kind = path.absolute().resolve(), "", ""
    with suppress(OSError):
        for found in psutil.disk_partitions(all=True):
            if place.is_relative_to(found.mountpoint) and len(found.mountpoint) >= len(mount):
                mount, kind = found.mountpoint, found.fstype
    return kind if kind in _NETWORK_FILE_SYSTEMS else None
