"""Reads what Linux counts of the processors: time of all and of this process, and a container's limits.

Files that are not there, or cannot be read, make what they tell unknown, and are no error.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_IDLE = slice(3, 5)  # of a line of /proc/stat after the name: idle, and waiting for a disk
_COUNTED = 8  # user to steal: what guests use is part of the first two
_NS_PER_S, _US_PER_S = 1e9, 1e6


@dataclass(frozen=True, slots=True)
class ProcessorUse:
    """Seconds that were used up to a moment, of which differences count. None: unknown.

    busy_s: of the cores that this process may use, by anybody, a hypervisor included. own_s: by this process.
    throttled_s: in which the limit of its container stopped it. cores: that it may use. threads: of one operation.
    """

    now_s: float = 0.0
    busy_s: float | None = None
    own_s: float = 0.0
    throttled_s: float | None = None
    cores: int = 0
    threads: int = 0


class Processors:
    """The cores that this process may use, and the limits of the containers that it is in.

    proc, cgroups: where the system tells of them.
    """

    def __init__(self, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> None:
        self._proc = proc
        self._groups = [*_groups(proc, cgroups)]

    def use(self) -> ProcessorUse:
        """Read all counters now: two or three small files, in a fifth of a millisecond."""
        import torch  # here: it is slow to load

        cores = _affinity()
        own = resource.getrusage(resource.RUSAGE_SELF)
        return ProcessorUse(
            now_s=time.perf_counter(),
            busy_s=_busy_s(self._proc / "stat", cores),
            own_s=own.ru_utime + own.ru_stime,
            throttled_s=max((t for group in self._groups if (t := _throttled_s(group)) is not None), default=None),
            cores=len(cores),
            threads=torch.get_num_threads(),
        )

    def allowed_cores(self) -> float:
        """Return how many cores may be kept busy: those that this process may run on, or fewer by a limit."""
        quotas = [quota for quota in map(_quota, self._groups) if quota is not None]
        return min((float(len(_affinity())), *quotas))


def _affinity() -> frozenset[int]:
    """Return the numbers of the cores that this process may run on; not every system tells."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _busy_s(stat: Path, cores: frozenset[int]) -> float | None:
    """Return the sum over these cores; None where the file lacks one of them."""
    names = {f"cpu{core}" for core in cores}
    ticks = 0
    with suppress(ValueError):
        for line in _text(stat).splitlines():
            name, *fields = line.split() or [""]
            if name in names:
                counted = [int(field) for field in fields[:_COUNTED]]
                ticks += sum(counted) - sum(counted[_IDLE])
                names.discard(name)
        return None if names else ticks / os.sysconf("SC_CLK_TCK")
    return None


def _throttled_s(group: Path) -> float | None:
    """Return the seconds for which a group was stopped; None where it does not count them."""
    with suppress(ValueError):
        words = dict(line.split() for line in _text(group / "cpu.stat").splitlines())
        if "throttled_usec" in words:
            return int(words["throttled_usec"]) / _US_PER_S
        if "throttled_time" in words:  # of version 1
            return int(words["throttled_time"]) / _NS_PER_S
    return None


def _quota(group: Path) -> float | None:
    """Return the cores that a group may keep busy; None: as many as there are, or nobody knows."""
    with suppress(ValueError, ZeroDivisionError):
        if words := _text(group / "cpu.max").split():
            return None if words[0] == "max" else int(words[0]) / int(words[1])
        quota = int(_text(group / "cpu.cfs_quota_us"))  # of version 1: -1 is no limit
        return quota / int(_text(group / "cpu.cfs_period_us")) if quota > 0 else None
    return None


def _groups(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Yield the folders of the groups of this process and of those around them, of either version of cgroups.

    In a container the path that the process is told may be one of outside: then its folder is not there, and those
    around it, at last the container's own, are.
    """
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        names = controllers.split(",")
        if controllers == "":
            root = cgroups
        elif "cpu" in names:
            root = cgroups / controllers if (cgroups / controllers).is_dir() else cgroups / "cpu"
        else:
            continue
        folder = Path(path.lstrip("/"))
        yield from (place for part in (folder, *folder.parents) if (place := root / part).is_dir())


def _text(path: Path) -> str:
    """Read a file; an empty text where there is none, or it cannot be read."""
    with suppress(OSError):
        return path.read_text(errors="replace")
    return ""
