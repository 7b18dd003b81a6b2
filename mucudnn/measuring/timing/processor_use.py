"""Counters of processor time, of all processes and of this one, and the CPU limits of the container.

A counter that is missing or unreadable is None, not an error.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_COUNTED = 8  # user to steal; guest time is already included in the first two
_US_PER_S = 1e6
# Errors of psutil if the system or a container hides its files, and ours on empty files.
_UNREADABLE = (OSError, NotImplementedError, ValueError, TypeError, LookupError)


@dataclass(frozen=True, slots=True)
class ProcessorUse:
    """Processor seconds used so far; only differences between two such objects are meaningful. Unknown values are None.

    busy_s: time used by all processes, and by the hypervisor, on the cores that this process may use. own_s: time used
    by this process. throttled_s: time for which a container limit stopped this process. cores: number of cores that
    this process may use. threads: torch's threads.
    """

    now_s: float = 0.0
    busy_s: float | None = None
    own_s: float = 0.0
    throttled_s: float | None = None
    cores: int = 0
    threads: int = 0


class Processors:
    """The cores that this process may use, and the limits of the containers that it runs in.

    proc, cgroups: folders in which Linux publishes these limits.
    """

    def __init__(self, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> None:
        self._groups = [*_groups(proc, cgroups)]

    def use(self) -> ProcessorUse:
        """Read all counters of processor time, which takes 0.2 ms."""
        import torch  # here: it is slow to import

        cores = _affinity()
        own = resource.getrusage(resource.RUSAGE_SELF)
        return ProcessorUse(
            now_s=time.perf_counter(),
            busy_s=_busy_s(cores),
            own_s=own.ru_utime + own.ru_stime,
            throttled_s=max((t for group in self._groups if (t := _throttled_s(group)) is not None), default=None),
            cores=len(cores),
            threads=torch.get_num_threads(),
        )

    def allowed_cores(self) -> float:
        """Return how many cores this process may keep busy: the cores that it may run on, or a lower quota."""
        quotas = [quota for quota in map(_quota, self._groups) if quota is not None]
        return min((float(len(_affinity())), *quotas))


def _affinity() -> frozenset[int]:
    """Return the numbers of the cores that this process may run on; all cores if the system does not report them."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _busy_s(cores: frozenset[int]) -> float | None:
    """Return the busy seconds of these cores together, those that a hypervisor gave to other machines included."""
    with suppress(*_UNREADABLE):
        every = psutil.cpu_times(percpu=True)
        if len(every) != len(cores):  # if some cores are offline, the last numbers are missing
            every = [every[core] for core in cores]
        return float(sum(sum(times[:_COUNTED]) - times.idle - getattr(times, "iowait", 0.0) for times in every))
    return None


def _throttled_s(group: Path) -> float | None:
    """Return the seconds for which a limit stopped a cgroup (a container's processes); None if not counted."""
    with suppress(ValueError):
        words = dict(line.split() for line in _text(group / "cpu.stat").splitlines())
        return int(words["throttled_usec"]) / _US_PER_S if "throttled_usec" in words else None
    return None


def _quota(group: Path) -> float | None:
    """Return the number of cores that a cgroup (a container's processes) may keep busy; None if there is no limit."""
    with suppress(ValueError, ZeroDivisionError):  # "max" means no limit
        quota, period = _text(group / "cpu.max").split()
        return int(quota) / int(period)
    return None


def _groups(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Yield the cgroup (version 2) folders of this process, from its own group up to the root.

    In a container the path in ``/proc`` may be the host's: then its folder does not exist, but one of its parents does,
    at least the root of the container's own groups.
    """
    for line in _text(proc / "self" / "cgroup").splitlines():
        if line.startswith("0::"):
            folder = Path(line.removeprefix("0::").lstrip("/"))
            yield from (place for part in (folder, *folder.parents) if (place := cgroups / part).is_dir())


def _text(path: Path) -> str:
    """Return the text of a file; an empty text if the file does not exist or cannot be read."""
    with suppress(OSError):
        return path.read_text(errors="replace")
    return ""
