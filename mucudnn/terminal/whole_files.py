"""Files of results: whole at any moment, however the process that writes them ends, and never over a database."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter, TextIOWrapper
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, TextIO

from mucudnn.words.errors import OutputError

SIDECARS = ("-wal", "-shm", "-journal")  # of an SQLite file
_SQLITE = b"SQLite format 3\0"
_STANDARD = {1: "stdout", 2: "stderr"}  # file descriptors


@contextmanager
def whole_text(path: Path) -> Iterator[TextIO]:
    """Open a stream of text, in UTF-8 and with line ends as they are given; see ``whole_file``."""
    with whole_file(path) as stream:
        text = TextIOWrapper(stream, encoding="utf-8", errors="backslashreplace", newline="", write_through=True)
        try:
            yield text
        finally:
            text.detach()


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a stream whose content replaces the file when the block ends; after an exception the file is what it was.

    A link stays a link: the file that it names is replaced. Mode and owner stay, too. Devices, pipes and this process's
    own standard output are written to as they are.

    Raises ``OutputError`` for what ``require_writable`` refuses, and where writing fails.
    """
    with _explained(path):
        found = _accepted(path)
        with _into(path) if is_stream(path) else _replacing(path, found) as stream:
            yield stream


def require_writable(path: Path) -> None:
    """Refuse a file that cannot be written, before anything is measured. Leaves no trace.

    Raises ``OutputError`` where the file cannot be written, or is a database.
    """
    with _explained(path):
        found = _accepted(path)
        if found is not None and stat.S_ISCHR(found.st_mode):
            _write_nothing(path)
        elif not is_stream(path):
            with _folder_beside(_target(path)):
                pass


def is_stream(path: Path) -> bool:
    """Whether what is written there replaces nothing: a device, a pipe, or this process's own standard output."""
    found = _status(path)
    return found is not None and (not stat.S_ISREG(found.st_mode) or _own_descriptor(found) is not None)


def beside(path: Path, what: str) -> Path:
    """Return the name of a second file that goes with one.

    >>> str(beside(Path("memory.csv"), "curve"))
    'memory-curve.csv'
    """
    return path.parent / f"{path.stem}-{what}{path.suffix}"


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"{path} cannot be written: {reason}; mend that, or name another file") from error


def _status(path: Path) -> os.stat_result | None:
    """Return the status; ``None``: nothing is there yet.

    Raises ``OSError`` where nothing can be: a circle of links, too long a name.
    """
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _accepted(path: Path) -> os.stat_result | None:
    """Return the status of what may be written to. Raises ``OutputError`` for everything else."""
    found = _status(path)
    _require_no_sidecar(_target(path))
    if found is None:
        _require_folder(path.parent)
        _require_folder(_target(path).parent)  # of what a link names
        return None
    if stat.S_ISDIR(found.st_mode):
        raise OutputError(f"{path} is a folder; name a file")
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISCHR(found.st_mode) or stat.S_ISFIFO(found.st_mode)):
        raise OutputError(f"{path} is neither a file nor a stream; name a file")
    if not os.access(path, os.W_OK):
        raise OutputError(f"{path} cannot be written; mend its permissions, or name another file")
    if stat.S_ISREG(found.st_mode) and _is_database(path):
        raise OutputError(f"{path} is an SQLite database, which would be lost; name another file")
    return found


def _require_no_sidecar(target: Path) -> None:
    """Refuse what SQLite keeps beside a database: it has rows that are nowhere else."""
    for sidecar in SIDECARS:
        database = Path(str(target).removesuffix(sidecar))
        if database != target and database.is_file() and _is_database(database):
            raise OutputError(f"{target} belongs to the database {database}, which would lose rows; name another file")


def _require_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise OutputError(f"the folder {folder} does not exist; make it, or name another file")


def _is_database(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return stream.read(len(_SQLITE)) == _SQLITE
    except PermissionError:  # that it may be written and not read is no reason against it
        return False


def _target(path: Path) -> Path:
    """Return the file that is replaced: what a link names, in the end."""
    return Path(os.path.realpath(path))


def _folder_beside(target: Path) -> TemporaryDirectory[str]:
    """Make a folder of its own name on the same file system: files made in it get the mode of new files there."""
    return TemporaryDirectory(prefix=".mucudnn-", dir=target.parent, ignore_cleanup_errors=True)


@contextmanager
def _replacing(path: Path, found: os.stat_result | None) -> Iterator[BinaryIO]:
    target = _target(path)
    with _folder_beside(target) as folder:
        new = Path(folder) / "new"
        with new.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())  # network file systems tell here that there is no room, or never
        if found is not None:
            _inherit(new, found)
        new.replace(target)


def _inherit(new: Path, replaced: os.stat_result) -> None:
    with suppress(PermissionError):  # only root gives files away
        os.chown(new, replaced.st_uid, replaced.st_gid)
    new.chmod(stat.S_IMODE(replaced.st_mode))


@contextmanager
def _into(path: Path) -> Iterator[BinaryIO]:
    """Write to a stream as it is; a reader of a pipe may stop before the end."""
    with suppress(BrokenPipeError), _opened(path) as stream:
        yield stream


def _opened(path: Path) -> BufferedWriter:
    """Open a stream. Standard output goes on where it is: opened anew, a file that it was led to would begin again."""
    descriptor = _own_descriptor(path.stat())
    if descriptor is None:
        return path.open("wb")
    with suppress(AttributeError):  # None, where it was closed
        getattr(sys, _STANDARD[descriptor]).flush()
    return os.fdopen(os.dup(descriptor), "wb")


def _own_descriptor(found: os.stat_result) -> int | None:
    """Return the number of this process's standard output or error, if the file is that."""
    for descriptor in _STANDARD:
        with suppress(OSError):  # closed
            if os.path.samestat(found, os.fstat(descriptor)):
                return descriptor
    return None


def _write_nothing(path: Path) -> None:
    """Write no byte: ``/dev/full`` refuses even that."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    try:
        os.write(descriptor, b"")
    finally:
        os.close(descriptor)
