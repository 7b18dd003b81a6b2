"""SIGKILL at random moments: no row that was stored is lost, every file is whole, and the next run goes on."""

from __future__ import annotations

import random
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from support.command_line import HEADING
from support.database_rows import FAST, HERE, PROBLEM
from support.effort import how_many
from support.processes import forking, run_command

from mucudnn.core.records import Environment, Failure, MicroConfig
from mucudnn.store.database import Database
from mucudnn.store.exports import export_json_lines

pytestmark = [pytest.mark.fuzz, pytest.mark.slow]

SIZE = how_many(1_000, 10_000)  # rows: enough that a command is in the middle of something for a while
TUNE = ("--batch", "2", "--algorithms", "gemm,direct", "--time-limit", "20ms", "--threads", "1")
TUNE += ("--operations", "forward")
Rows = frozenset[tuple[object, ...]]


def started(arguments: Iterable[object], log: Path) -> BaseProcess:
    """A process of ``mucudnn``."""
    process = forking().Process(target=run_command, args=([*map(str, arguments)], log))
    process.start()
    return process


def run(arguments: Iterable[object], log: Path) -> None:
    process = started(arguments, log)
    process.join()
    assert process.exitcode == 0, log.read_text()


# What is killed


def filled(path: Path, environments: Iterable[Environment], rows_each: int) -> None:
    """One of a hundred rows is a failure."""
    with Database(":memory:") as source:
        source.add(HERE, PROBLEM, 1, FAST)
        source.add_failure(HERE, PROBLEM, 1, Failure(MicroConfig("fft", 8), "too large"))
        one, failed = source.every_row()

    def rows() -> Iterator[dict[str, object]]:
        for number, environment in enumerate(environments):
            for size in range(rows_each):
                kind = failed if size % 100 == 99 else one
                at = f"2026-01-31T12:00:{number % 60:02}.{size:06}+00:00"
                yield {**kind, "device": environment.device, "micro_batch_size": size + 1, "measured_at": at}

    with Database(path) as database:
        database.add_exported(rows())


def one_environment(name: str) -> list[Environment]:
    return [replace(HERE, device=name)]


@dataclass(frozen=True)
class Case:
    """A command in a folder of its own. target: what it writes. grows: row by row, not as a whole."""

    prepare: Callable[[Path], None]
    arguments: tuple[str, ...]
    target: str = "target.sqlite"
    grows: bool = False


def prepare_tune(folder: Path) -> None:
    (folder / "layers.csv").write_text(HEADING + "".join(f"layer{k},3,6,6,{k},3,3,1,1,1,1\n" for k in range(2, 5)))
    filled(folder / "target.sqlite", one_environment("elsewhere"), 10)


def prepare_merge(folder: Path) -> None:
    filled(folder / "source.sqlite", one_environment("source"), SIZE)
    filled(folder / "target.sqlite", one_environment("target"), 10)


def prepare_import(folder: Path) -> None:
    prepare_merge(folder)
    with Database(folder / "source.sqlite") as source, (folder / "source.jsonl").open("w") as stream:
        export_json_lines(source, stream)


def prepare_export(folder: Path) -> None:
    filled(folder / "source.sqlite", one_environment("source"), SIZE)
    (folder / "rows.jsonl").write_text("the old one\n" * 1000)


CASES = {
    "tune": Case(prepare_tune, ("tune", "layers.csv", *TUNE, "--database", "target.sqlite"), grows=True),
    "merge": Case(prepare_merge, ("database", "merge", "source.sqlite", "--database", "target.sqlite")),
    "import": Case(prepare_import, ("database", "merge", "source.jsonl", "--database", "target.sqlite")),
    "export": Case(prepare_export, ("database", "export", "rows.jsonl", "--database", "source.sqlite"), "rows.jsonl"),
}


class Prepared:
    """A case that ran once without a kill: what it begins with, how long it takes and what there is in the end."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self._begin = case, folder / "begin"
        self._begin.mkdir()
        case.prepare(self._begin)
        end = self.copy(folder / "end")
        start = time.perf_counter()
        run(self.arguments(end), folder / "log")
        self.life_s = time.perf_counter() - start
        self.before, self.after = (contents(place / case.target) for place in (self._begin, end))
        self.sources = {path.name: path.read_bytes() for path in self._begin.glob("source*")}

    def copy(self, folder: Path) -> Path:
        return Path(shutil.copytree(self._begin, folder))

    def arguments(self, folder: Path) -> list[object]:
        there = {path.name for path in self._begin.iterdir()} | {self.case.target}
        return [folder / argument if argument in there else argument for argument in self.case.arguments]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Prepared]:
    return cache(lambda name: Prepared(CASES[name], tmp_path_factory.mktemp(name)))


def contents(path: Path) -> Rows | bytes:
    """All rows of a database, or the bytes of any other file."""
    return rows_in(path) if path.suffix == ".sqlite" else path.read_bytes()


def rows_in(path: Path) -> Rows:
    """Measurements, failures and whole runs by their values."""
    found: set[tuple[object, ...]] = set()
    with closing(sqlite3.connect(path, timeout=10)) as connection:
        for table in ("measurements", "verifications"):
            rows = connection.execute(
                f"SELECT device, {table}.* FROM {table} JOIN environments ON environments.id = environment_id"
            )
            found |= {(table, device, *values) for device, _, *values in rows}
    return frozenset(found)


def kill(process: BaseProcess, moment: float, look: Callable[[], Rows]) -> Rows:
    """What a reader sees committed until the moment comes."""
    seen: Rows = frozenset()
    while time.perf_counter() < moment:
        seen |= look()
        time.sleep(0.001)
    process.kill()
    process.join()
    return seen


def check(path: Path) -> None:
    if path.suffix == ".sqlite":
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == []


@pytest.mark.parametrize("seed", range(how_many(8, 200)))
def test_kills(seed: int, tmp_path: Path, prepared: Callable[[str], Prepared]) -> None:
    this = prepared([*CASES][seed % len(CASES)])
    folder = this.copy(tmp_path / "killed")
    target = folder / this.case.target
    process = started(this.arguments(folder), tmp_path / "log")
    moment = time.perf_counter() + random.Random(seed).random() * this.life_s
    seen = kill(process, moment, (lambda: rows_in(target)) if this.case.grows else frozenset)
    assert process.exitcode in (-signal.SIGKILL, 0)

    check(target)
    left = contents(target)
    if isinstance(left, frozenset) and isinstance(this.before, frozenset) and this.case.grows:
        assert left >= this.before | seen
    else:
        assert left in (this.before, this.after), "one or the other as a whole"
    for source, content in this.sources.items():
        assert (folder / source).read_bytes() == content

    run(this.arguments(folder), tmp_path / "log")
    check(target)
    if isinstance(left, frozenset) and this.case.grows:
        assert rows_in(target) >= left
    else:
        assert contents(target) == this.after
