"""Files that are replaced as a whole: an output file is complete or unchanged, and a database is never overwritten.

Results are written as JSON objects and CSV rows, with null for infinity and NaN in JSON.
"""

from __future__ import annotations

import csv
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, TextIO

from mucudnn.core.errors import OutputError

SIDECARS = ("-wal", "-shm", "-journal")  # of an SQLite file
_SQLITE = b"SQLite format 3\0"
_STANDARD_OUTPUT = ("-", "/dev/stdout")


@contextmanager
def whole_text(path: Path) -> Iterator[TextIO]:
    """Open a UTF-8 text stream whose content replaces the file as in ``whole_file``; line ends are kept as written."""
    with whole_file(path) as stream:
        text = TextIOWrapper(stream, encoding="utf-8", errors="backslashreplace", newline="", write_through=True)
        try:
            yield text
        finally:
            text.detach()


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a stream whose content replaces the file at the end of the block; after an exception the file is unchanged.

    A link stays a link: its target is replaced. Mode and owner are kept. Devices, pipes and standard output are written
    to directly.

    Raises ``OutputError`` for files that ``require_writable`` rejects, and if writing fails.
    """
    with explained(path):
        _require_replaceable(path)
        with _stream(path) if is_stream(path) else _replacing(path) as stream:
            yield stream


def require_writable(path: Path) -> None:
    """Check that a file can be written, without changing it.

    Raises ``OutputError`` if the file cannot be written, or is a database or a part of one.
    """
    with explained(path):
        _require_replaceable(path)
        if not is_stream(path):
            with _folder_beside(path):
                pass


def is_stream(path: Path) -> bool:
    """Whether the path is a device, a pipe or standard output, so that writing replaces nothing."""
    return str(path) in _STANDARD_OUTPUT or (path.exists() and not path.is_file())


def beside(path: Path, content: str) -> Path:
    """Return the name of a second file beside ``path``. For a stream, return the stream, which takes both contents.

    >>> str(beside(Path("memory.csv"), "curve"))
    'memory-curve.csv'
    """
    return path if is_stream(path) and not path.is_dir() else path.with_name(f"{path.stem}-{content}{path.suffix}")


def write_each(*files: tuple[Path | None, Callable[[Path], None]]) -> None:
    """Write each file whose path is not None by calling its function, even if another file fails.

    Raises ``OutputError`` with all failures, after trying all files.
    """
    failures = []
    for path, write in files:
        if path is not None:
            try:
                write(path)
            except OutputError as error:
                failures.append(str(error))
    if failures:
        raise OutputError("\n".join(failures))


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write one JSON object, with null for infinity and NaN. The file is replaced as a whole."""
    with whole_text(path) as stream:
        stream.write(json.dumps(_finite(record), indent=2, allow_nan=False) + "\n")


def json_line(record: Mapping[str, Any]) -> str:
    """Return a JSON object as one line of a JSON Lines file, with null for infinity and NaN."""
    return json.dumps(_finite(record), allow_nan=False) + "\n"


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as CSV, with the keys of the first row as columns; write an empty file if there are no rows."""
    with whole_text(path) as stream:
        writer = csv.DictWriter(stream, rows[0] if rows else ())
        if rows:
            writer.writeheader()
        writer.writerows(rows)


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if isfinite(value) else None
        case Mapping():
            return {key: _finite(element) for key, element in value.items()}
        case list() | tuple():
            return [_finite(element) for element in value]
    return value


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Raise ``OutputError``, which names the file or folder, for an ``OSError`` in the block."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"{path} cannot be written: {reason}; fix that, or name another") from error


def _require_replaceable(path: Path) -> None:
    """Raise ``OutputError`` for folders, databases, Python files and files in a missing folder."""
    if is_stream(path) and not path.is_dir():
        return
    target = Path(os.path.realpath(path))
    if path.is_dir():
        raise OutputError(f"{path} is a folder; name a file")
    for folder in (path.parent, target.parent):
        if not folder.is_dir():
            raise OutputError(f"the folder {folder} does not exist; create it, or name another file")
    if target.suffix == ".py":
        raise OutputError(f"{path} is a Python file; name another one")
    if target.exists() and not os.access(target, os.W_OK):
        raise OutputError(f"{path} cannot be written; change its permissions, or name another file")
    if _is_database(target):
        raise OutputError(f"{path} is an SQLite database, which would be lost; name another file")
    for sidecar in SIDECARS:
        database = Path(str(target).removesuffix(sidecar))
        if database != target and _is_database(database):  # a sidecar may have the only copy of rows
            raise OutputError(f"{target} belongs to the database {database}, which would lose rows; name another file")


def _is_database(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return stream.read(len(_SQLITE)) == _SQLITE
    except (FileNotFoundError, PermissionError):  # a file that is writable but not readable is no database
        return False


def _folder_beside(path: Path) -> TemporaryDirectory[str]:
    """Create a temporary folder beside the file, from which a new file can be moved onto it by renaming."""
    parent = Path(os.path.realpath(path)).parent
    return TemporaryDirectory(prefix=".mucudnn-", dir=parent, ignore_cleanup_errors=True)


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    with _folder_beside(path) as folder:
        new = Path(folder) / "new"
        with new.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())  # network file systems report a full disk only here
        if path.exists():
            status = path.stat()
            with suppress(PermissionError):  # only root can change the owner
                os.chown(new, status.st_uid, status.st_gid)
            new.chmod(stat.S_IMODE(status.st_mode))
        new.replace(os.path.realpath(path))


@contextmanager
def _stream(path: Path) -> Iterator[BinaryIO]:
    """Open a pipe, device or standard output directly; it is no error if the reader of a pipe stops early."""
    if str(path) in _STANDARD_OUTPUT:  # opening it again would truncate a file that it is redirected to
        sys.stdout.flush()
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    else:
        with suppress(BrokenPipeError), path.open("wb") as stream:
            yield stream
