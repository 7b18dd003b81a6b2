"""Cold caches, the kept heap, and the rate of matrix products."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from mucudnn.measuring import clocks
from mucudnn.measuring.clocks import ColdClock, last_level_bytes, peak_flops_per_s


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    monkeypatch.setattr(ColdClock, "empty_caches", lambda self: log.append("empty"))
    return log


@pytest.mark.parametrize(
    ("calls", "calls_per_pass", "expected"), [(1, 1, "ec"), (3, 1, "ececec"), (5, 2, "eccecc" + "ec"), (2, 8, "ecc")]
)
def test_caches_are_emptied_before_each_pass(log: list[str], calls: int, calls_per_pass: int, expected: str) -> None:
    seconds = ColdClock().time(lambda: log.append("call"), calls, calls_per_pass)
    assert "".join(event[0] for event in log) == expected
    assert seconds > 0


def test_emptying_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def take(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(clocks.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(ColdClock, "empty_caches", lambda self: take(100.0))
    assert ColdClock().time(lambda: take(1.0), 3) == 3.0


def test_more_than_the_last_level_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "_MOST_BYTES", 64 * 2**20)  # conftest.py has made it small
    clock = ColdClock()
    clock.empty_caches()
    written = clock._written
    assert written.numel() * 4 >= min(64 * 2**20, last_level_bytes())
    assert written.min() > 0
    clock.rest()
    clock.empty_caches()
    assert clock._written is not written


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [(["32K", "1024K", "36608K"], 36608 * 1024), (["48K", "2M"], 2 * 2**20), (["", "unknown"], 0), ([], 0)],
)
def test_the_last_level_is_the_largest(tmp_path: Path, sizes: list[str], expected: int) -> None:
    for number, size in enumerate(sizes):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(size + "\n")
    assert last_level_bytes(tmp_path) == expected


# The rate of matrix products: measured a few times, and only where it bounds anything.


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_best_of_the_first_looks_counts(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one meets a busy moment; after ten of them nobody looks any more."""
    looks = iter([1e9, 3e9, *[2e9] * 8])
    monkeypatch.setattr(clocks, "_seen_flops_per_s", defaultdict(list))
    monkeypatch.setattr(clocks, "_flops_per_s", lambda dtype, least_s: next(looks))
    assert [peak_flops_per_s("cpu", dtype) for _ in range(12)] == [1e9, *[3e9] * 11]
