"""A run of ``--out`` that is killed at any moment: what it had added is there, and the next run goes on after it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.effort import how_many
from support.places import TESTS

from mucudnn.bench.folders.reading import read_folder

WRITER = TESTS / "support" / "folder_writer.py"
SUBJECTS = 400


@contextmanager
def writers(log: Path) -> Iterator[subprocess.Popen[str]]:
    """Start the process that forks a writer for each line that it is told, so that torch is loaded once."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS)))}
    with log.open("w") as errors:
        started = subprocess.Popen(
            [sys.executable, str(WRITER), str(SUBJECTS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )
        try:
            yield started
        finally:
            started.communicate(timeout=60)


def ask(process: subprocess.Popen[str], line: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_a_killed_run_loses_at_most_what_it_was_writing(tmp_path: Path) -> None:
    folder, told, source = tmp_path / "folder", tmp_path / "told", random.Random(0)
    with writers(tmp_path / "log") as process:
        for _ in range(how_many(12, 100)):
            writer = int(ask(process, f"{folder} {told}"))
            time.sleep(source.uniform(0.0, 0.15))
            os.kill(writer, signal.SIGKILL)
            ask(process, "wait")
            if not (folder / "environment.json").exists():
                continue
            added = told.read_text().splitlines() if told.exists() else []
            read = read_folder(folder)
            rows = read.rows.drop_duplicates(["subject", "contestant"])
            both = rows[rows.groupby("subject")["contestant"].transform("size") == 2]
            assert {name for name in added if name.endswith(".")} <= {f"{name}." for name in both["subject"]}
        assert ask(process, f"{folder} {told}")
        assert ask(process, "wait") == "0", (tmp_path / "log").read_text()
    read = read_folder(folder)
    assert sorted(read.rows["subject"]) == sorted(str(number) for number in range(SUBJECTS) for _ in "12")
    assert all(len(samples) == 9 for samples in read.rows["samples_s"])
    again = [name for name in told.read_text().splitlines() if name.endswith(".")]
    assert len(again) == len({*again}), "what is in the folder is not measured again"


def test_it_was_really_killed_while_it_wrote(tmp_path: Path) -> None:
    """Otherwise the test above would say nothing: a writer that is killed half way has not done all."""
    folder, told = tmp_path / "folder", tmp_path / "told"
    with writers(tmp_path / "log") as process:
        writer = int(ask(process, f"{folder} {told}"))
        deadline = time.monotonic() + 60
        while not told.exists() or len(told.read_text().splitlines()) < 3:
            assert time.monotonic() < deadline
        os.kill(writer, signal.SIGKILL)
        assert ask(process, "wait") == str(-signal.SIGKILL)
    assert 0 < len(read_folder(folder).rows) < 2 * SUBJECTS
    with pytest.raises(ProcessLookupError):
        os.kill(writer, 0)
