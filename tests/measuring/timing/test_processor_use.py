"""What is read of the processors: from made-up files, from none, and from those of this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from mucudnn.measuring.timing import processor_use
from mucudnn.measuring.timing.processor_use import Processors

STAT = """cpu  600 30 300 9000 100 10 20 30 0 0
cpu0 100 10 100 3000 50 5 10 15 40 0
cpu1 200 10 100 3000 50 5 10 15 0 0
cpu2 300 10 100 3000 0 0 0 0 0 0
intr 12345 0 0
ctxt 99
"""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor_use, "_affinity", lambda: frozenset({0, 1}))


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "stat").write_text(STAT)
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
    assert use.busy_s == pytest.approx((100 + 10 + 100 + 5 + 10 + 15 + 200 + 10 + 100 + 5 + 10 + 15) * TICK_S)
    assert use.cores == 2
    assert use.threads == torch.get_num_threads()
    assert use.throttled_s is None


def test_stolen_is_what_a_hypervisor_took_of_the_allowed_cores(tmp_path: Path, proc: Path) -> None:
    assert Processors(proc, tmp_path).use().stolen_s == pytest.approx((15 + 15) * TICK_S)


def test_an_old_kernel_that_counts_nothing_stolen_makes_that_unknown(tmp_path: Path, proc: Path) -> None:
    (proc / "stat").write_text("cpu0 1 2 3 4 5 6 7\ncpu1 1 2 3 4 5 6 7\n")
    use = Processors(proc, tmp_path).use()
    assert (use.busy_s, use.stolen_s) == (pytest.approx(2 * (1 + 2 + 3 + 6 + 7) * TICK_S), None)


CPUINFO = """processor\t: 0
cpu MHz\t\t: 1200.5

processor\t: 1
cpu MHz\t\t: 2400.25

processor\t: 2
cpu MHz\t\t: 5000.0
"""


def test_the_clock_is_that_of_the_fastest_allowed_core(tmp_path: Path, proc: Path) -> None:
    cores = tmp_path / "cores"
    (proc / "cpuinfo").write_text(CPUINFO)
    assert Processors(proc, tmp_path, cores).clock_hz() == 2400.25e6
    for core, khz in enumerate(("3100000\n", "2900000\n", "5000000\n")):
        (cores / f"cpu{core}" / "cpufreq").mkdir(parents=True)
        (cores / f"cpu{core}" / "cpufreq" / "scaling_cur_freq").write_text(khz)
    assert Processors(proc, tmp_path, cores).clock_hz() == 3100000e3


@pytest.mark.parametrize("text", ["", "processor\t: x\n", "processor: 0\ncpu MHz: fast\n", "cpu MHz: 100\n", "\0"])
def test_a_cpuinfo_that_tells_no_clock_makes_it_unknown(tmp_path: Path, proc: Path, text: str) -> None:
    (proc / "cpuinfo").write_text(text)
    assert Processors(proc, tmp_path, tmp_path / "no cores").clock_hz() is None


@pytest.mark.parametrize(
    "text", ["", "cpu  1 2 3 4\n", "cpu0 1 2 3 4 5 6 7 8\n", "cpu0 a b\ncpu1 c d\n", "\0\0", STAT.replace("cpu1", "x")]
)
def test_a_stat_that_tells_nothing_makes_it_unknown(tmp_path: Path, proc: Path, text: str) -> None:
    (proc / "stat").write_text(text)
    assert Processors(proc, tmp_path).use().busy_s is None


def test_without_files_all_is_unknown_and_nothing_fails(tmp_path: Path) -> None:
    processors = Processors(tmp_path / "no proc", tmp_path / "no cgroups", tmp_path / "no cores")
    use = processors.use()
    assert (use.busy_s, use.stolen_s, use.throttled_s, use.cores) == (None, None, None, 2)
    assert processors.clock_hz() is None
    assert use.own_s > 0
    assert processors.allowed_cores() == 2.0


def test_folders_in_place_of_files_are_no_error(tmp_path: Path) -> None:
    for name in ("proc/stat", "proc/self/cgroup", "cgroups/cpu.max", "cgroups/cpu.stat"):
        (tmp_path / name).mkdir(parents=True)
    processors = Processors(tmp_path / "proc", tmp_path / "cgroups")
    assert processors.use().busy_s is None
    assert processors.allowed_cores() == 2.0


@pytest.mark.parametrize(
    ("maximum", "expected"),
    [
        *(("max 100000", 2.0), ("150000 100000", 1.5), ("50000 100000", 0.5), ("400000 100000", 2.0)),
        *(("", 2.0), ("x y", 2.0), ("1000 0", 2.0)),
    ],
)
def test_the_quota_of_a_group(tmp_path: Path, proc: Path, maximum: str, expected: float) -> None:
    assert group(tmp_path, proc, "0::/box", "box", cpu_max=maximum).allowed_cores() == expected


def test_the_least_quota_of_the_groups_around_counts(tmp_path: Path, proc: Path) -> None:
    group(tmp_path, proc, "0::/a/b", "a", cpu_max="50000 100000")
    group(tmp_path, proc, "0::/a/b", ".", cpu_max="max 100000")
    assert group(tmp_path, proc, "0::/a/b", "a/b", cpu_max="100000 100000").allowed_cores() == 0.5


def test_a_container_that_is_told_an_outer_path_has_its_own_group_at_the_root(tmp_path: Path, proc: Path) -> None:
    processors = group(tmp_path, proc, "0::/../../outside", ".", cpu_max="50000 100000", cpu_stat="throttled_usec 7")
    assert processors.allowed_cores() == 0.5


@pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize(("quota", "expected"), [("-1", 2.0), ("25000", 0.25), ("nonsense", 2.0)])
def test_the_quota_of_version_1(tmp_path: Path, proc: Path, folder: str, quota: str, expected: float) -> None:
    files = {
        "cpu_cfs_quota_us": quota,
        "cpu_cfs_period_us": "100000",
        "cpu_stat": "nr_throttled 3\nthrottled_time 5000",
    }
    processors = group(tmp_path, proc, "4:memory:/elsewhere\n1:cpu,cpuacct:/box", f"{folder}/box", **files)
    assert processors.allowed_cores() == expected
    assert processors.use().throttled_s == pytest.approx(5e-6)


def test_throttled_time_is_that_of_the_group_that_had_most(tmp_path: Path, proc: Path) -> None:
    group(tmp_path, proc, "0::/a/b", "a", cpu_stat="usage_usec 5\nnr_throttled 1\nthrottled_usec 2500000\n")
    processors = group(tmp_path, proc, "0::/a/b", "a/b", cpu_stat="usage_usec 5\nthrottled_usec 500000\n")
    assert processors.use().throttled_s == pytest.approx(2.5)


@pytest.mark.parametrize("text", ["", "throttled_usec many\n", "three words here\n", "usage_usec 3\n"])
def test_a_group_that_does_not_count_is_unknown(tmp_path: Path, proc: Path, text: str) -> None:
    assert group(tmp_path, proc, "0::/box", "box", cpu_stat=text).use().throttled_s is None


def test_own_time_goes_on_with_work() -> None:
    processors = Processors()
    before = processors.use()
    while processors.use().own_s <= before.own_s:
        sum(range(1000))
    assert processors.use().now_s > before.now_s
