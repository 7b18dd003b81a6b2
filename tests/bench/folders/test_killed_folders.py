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


def noted(told: Path) -> list[str]:
    """Subjects that were added, as the writers say; a name that is only half there does not count."""
    return [name for name in told.read_text().splitlines() if name.endswith(".")] if told.exists() else []


def test_a_killed_run_loses_at_most_what_it_was_writing(tmp_path: Path) -> None:
    folder, told, source = tmp_path / "folder", tmp_path / "told", random.Random(0)
    with writers(tmp_path / "log") as process:
        for kills in range(1, how_many(10, 30) + 1):
            enough = len(noted(told)) + source.randrange(1, 12)
            writer = int(ask(process, f"{folder} {told}"))
            deadline = time.monotonic() + 60
            while len(noted(told)) < enough:
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(source.uniform(0.0, 0.002))
            os.kill(writer, signal.SIGKILL)
            assert ask(process, "wait") == str(-signal.SIGKILL), "it was killed while it wrote"
            added = noted(told)
            read = read_folder(folder)
            sizes = read.rows.groupby("subject").size()
            assert {name.removesuffix(".") for name in added} <= set(sizes[sizes == 2].index)
            assert len(sizes) <= len(added) + kills  # it may be killed before it has noted what is added
        assert ask(process, f"{folder} {told}")
        assert ask(process, "wait") == "0", (tmp_path / "log").read_text()
    read = read_folder(folder)
    assert sorted(read.rows["subject"]) == sorted(str(number) for number in range(SUBJECTS) for _ in "12")
    assert all(len(samples) == 9 for samples in read.rows["samples_s"])
    assert len(noted(told)) == len({*noted(told)}), "what is in the folder is not measured again"
