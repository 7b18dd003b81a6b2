"""The database file among faults and other processes: what is committed stays, what is unusable is refused and kept."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.database_rows import (
    FAILED,
    FAST,
    FULL,
    HERE,
    PROBLEM,
    VERSIONS,
    change,
    fill,
    rows_of,
)
from support.places import TESTS

from mucudnn.core.errors import DatabaseError
from mucudnn.store.database import Database


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return fill(tmp_path / "full.sqlite")


def test_without_a_write_ahead_log_read_only_and_in_memory(path: Path) -> None:
    change(path, "PRAGMA journal_mode = DELETE")
    with Database(path) as database:
        database.add(HERE, PROBLEM, 1, FAST)
    assert rows_of(path, HERE, PROBLEM) == FULL
    slower = replace(FAST, step_s=1.0)
    with Database(path, read_only=True) as database, database.copy_in_memory() as copy:
        assert database.measurements(HERE, PROBLEM, VERSIONS) == (FAST,)
        with pytest.raises(DatabaseError, match=r"can only be read; change its permissions"):
            database.add(HERE, PROBLEM, 1, FAST)
        copy.add(HERE, PROBLEM, 1, slower)
        assert copy.measurements(HERE, PROBLEM, VERSIONS) == (slower,)
        assert copy.failures(HERE, PROBLEM, VERSIONS) == (FAILED,)
    assert rows_of(path, HERE, PROBLEM) == FULL


@pytest.fixture
def unwritable(path: Path) -> Iterator[Path]:
    """The same database in a folder that this process may not write, even where the tests run as root."""
    folder = Path(tempfile.mkdtemp())
    copy = Path(shutil.copy(path, folder))
    copy.chmod(0o444)
    folder.chmod(0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield copy
    finally:
        os.seteuid(user)
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_unwritable_files_are_opened_for_reading(unwritable: Path) -> None:
    with Database(unwritable) as database:
        assert database.read_only
        assert database.measurements(HERE, PROBLEM, VERSIONS) == (FAST,)
    with pytest.raises(DatabaseError, match="does not exist, and cannot be created in that folder"):
        Database(unwritable.parent / "new.sqlite")


@contextmanager
def no_space() -> Iterator[None]:
    """Files cannot grow, as on a full disk or over a quota: a limit of this process stands for them."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(DatabaseError, match=r"cannot grow: the disk is full.*free space, or name another"):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_file_that_cannot_grow_is_not_called_damaged(path: Path) -> None:
    with Database(path) as database, no_space():
        database.add(HERE, PROBLEM, 1, FAST)
    with no_space():
        Database(path)
    assert rows_of(path, HERE, PROBLEM) == FULL


# Processes

WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from dataclasses import replace
from support.database_rows import FAST, HERE, PROBLEM, Database, MicroConfig
with Database(sys.argv[1]) as database:
    for size in range(1, int(sys.argv[4]) + 1):
        database.add(HERE, PROBLEM, 1, replace(FAST, micro_config=MicroConfig(sys.argv[2], size)))
        print(size, flush=True)
"""


def start_writer(path: Path, algorithm: str, rows: int) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", WRITER, str(path), algorithm, str(TESTS), str(rows)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def test_sigkill_keeps_every_committed_row(tmp_path: Path) -> None:
    path = tmp_path / "killed.sqlite"
    with start_writer(path, "gemm", 10**6) as writer:
        assert writer.stdout is not None
        while int(writer.stdout.readline()) < 20:
            pass
        writer.send_signal(signal.SIGKILL)
        committed = max([20, *map(int, writer.stdout.read().splitlines())])
    with Database(path) as database:
        kept = [m.micro_config.micro_batch_size for m in database.measurements(HERE, PROBLEM, VERSIONS)]
        assert kept == list(range(1, len(kept) + 1))
        assert len(kept) in (committed, committed + 1)  # one may be committed and not yet printed
        database.add(HERE, PROBLEM, 1, FAST)  # and it goes on
