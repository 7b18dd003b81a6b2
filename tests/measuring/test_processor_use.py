"""What is read of the processors: of made-up ones, from made-up files, from none, and of this machine."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import psutil
import pytest
import torch

from mucudnn.measuring import load
from mucudnn.measuring.load import Processors

Times = namedtuple("Times", "user nice system idle iowait irq softirq steal guest guest_nice")
THREE_CORES = [
    Times(1.0, 0.1, 1.0, 30.0, 0.5, 0.05, 0.1, 0.15, 0.4, 0.0),
    Times(2.0, 0.1, 1.0, 30.0, 0.5, 0.05, 0.1, 0.15, 0.0, 0.0),
    Times(3.0, 0.1, 1.0, 30.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
]


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_affinity", lambda: frozenset({0, 1}))


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: THREE_CORES)
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    return folder


def group(tmp_path: Path, proc: Path, line: str, folder: str, **files: str) -> Processors:
    """The processors of a process whose group has these files; keys: names with underscores for dots."""
    place = tmp_path / "cgroups" / folder
    place.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (place / name.replace("cpu_", "cpu.", 1)).write_text(text)
    (proc / "self" / "cgroup").write_text(line + "\n")
    return Processors(proc, tmp_path / "cgroups")


def test_busy_is_what_the_allowed_cores_did_by_anybody(tmp_path: Path, proc: Path) -> None:
    """Neither idle, nor waiting for a disk; guests are counted once; the time that a hypervisor took is gone, too."""
    use = Processors(proc, tmp_path).use()
    assert use.busy_s == pytest.approx((1.0 + 0.1 + 1.0 + 0.05 + 0.1 + 0.15) + (2.0 + 0.1 + 1.0 + 0.05 + 0.1 + 0.15))
    assert use.cores == 2
    assert use.threads == torch.get_num_threads()
    assert use.throttled_s is None


def test_all_online_cores_count_by_any_numbers_and_others_that_are_missing_are_unknown(
    tmp_path: Path, proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "_affinity", lambda: frozenset({0, 2, 4}))
    assert Processors(proc, tmp_path).use().busy_s == pytest.approx(9.9)
    monkeypatch.setattr(load, "_affinity", lambda: frozenset({2, 4}))
    assert Processors(proc, tmp_path).use().busy_s is None


@pytest.mark.parametrize("error", [FileNotFoundError, NotImplementedError, ValueError, TypeError, IndexError])
def test_what_cannot_be_read_is_unknown_and_nothing_fails(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(percpu: bool) -> None:
        raise error

    monkeypatch.setattr(psutil, "cpu_times", fail)
    processors = Processors(tmp_path / "no proc", tmp_path / "no cgroups")
    use = processors.use()
    assert (use.busy_s, use.throttled_s, use.cores) == (None, None, 2)
    assert use.own_s > 0
    assert processors.allowed_cores() == 2.0


@pytest.mark.parametrize(
    ("maximum", "expected"),
    [
        *(("max 100000", 2.0), ("150000 100000", 1.5), ("50000 100000", 0.5), ("400000 100000", 2.0)),
        *(("", 2.0), ("x y", 2.0), ("1000 0", 2.0)),
    ],
)
def test_the_quota_of_a_group(tmp_path: Path, proc: Path, maximum: str, expected: float) -> None:
    processors = group(tmp_path, proc, "0::/box", "box", cpu_max=maximum)
    assert processors.allowed_cores() == expected
    assert min(processors.quota(), 2.0) == expected


def test_the_least_quota_of_the_groups_around_counts(tmp_path: Path, proc: Path) -> None:
    group(tmp_path, proc, "0::/a/b", "a", cpu_max="50000 100000")
    group(tmp_path, proc, "0::/a/b", ".", cpu_max="max 100000")
    assert group(tmp_path, proc, "0::/a/b", "a/b", cpu_max="100000 100000").allowed_cores() == 0.5


def test_throttled_time_is_that_of_the_group_that_had_most(tmp_path: Path, proc: Path) -> None:
    group(tmp_path, proc, "0::/a/b", "a", cpu_stat="usage_usec 5\nnr_throttled 1\nthrottled_usec 2500000\n")
    processors = group(tmp_path, proc, "0::/a/b", "a/b", cpu_stat="usage_usec 5\nthrottled_usec 500000\n")
    assert processors.use().throttled_s == pytest.approx(2.5)


def test_own_time_goes_on_with_work() -> None:
    processors = Processors()
    before = processors.use()
    while processors.use().own_s <= before.own_s:
        sum(range(1000))
    assert processors.use().now_s > before.now_s
