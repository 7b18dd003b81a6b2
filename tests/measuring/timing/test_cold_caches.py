"""The clock of cold caches: what it counts, and when it empties them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from mucudnn.measuring.timing import cold_caches
from mucudnn.measuring.timing.cold_caches import ColdClock, last_level_bytes


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    monkeypatch.setattr(cold_caches, "empty_caches", lambda: log.append("empty"))
    return log


@pytest.mark.parametrize(
    ("calls", "calls_per_pass", "expected"),
    [(1, 1, "ec"), (3, 1, "ececec"), (5, 2, "eccecc" + "ec"), (2, 8, "ecc")],
)
def test_caches_are_emptied_before_each_pass(log: list[str], calls: int, calls_per_pass: int, expected: str) -> None:
    seconds = ColdClock().time(lambda: log.append("call"), calls, calls_per_pass)
    assert "".join(event[0] for event in log) == expected
    assert seconds > 0


def test_emptying_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def take(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(cold_caches.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(cold_caches, "empty_caches", lambda: take(100.0))
    assert ColdClock().time(lambda: take(1.0), 3) == 3.0


def test_more_than_the_last_level_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_caches, "_MOST_BYTES", 64 * 2**20)  # conftest.py has made it small
    monkeypatch.setattr(cold_caches, "_memory", cache(cold_caches._memory.__wrapped__))
    cold_caches.empty_caches()
    written = cold_caches._memory()
    assert written.numel() * 4 >= min(64 * 2**20, last_level_bytes())
    assert written.min() > 0


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [(["32K", "1024K", "36608K"], 36608 * 1024), (["48K", "2M"], 2 * 2**20), (["", "unknown"], 0), ([], 0)],
)
def test_the_last_level_is_the_largest(tmp_path: Path, sizes: list[str], expected: int) -> None:
    for number, size in enumerate(sizes):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(size + "\n")
    assert last_level_bytes(tmp_path) == expected
