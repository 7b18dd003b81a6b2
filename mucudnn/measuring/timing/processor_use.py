"""Reads what the system counts of the processors: time of all and of this process, and a container's limits.

What is not there, or cannot be read, is unknown, and no error.
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
_COUNTED = 8  # user to steal: what guests use is part of the first two
_US_PER_S, _HZ_PER_MHZ = 1e6, 1e6
# What psutil raises where a system or a container hides what it reads, and we on an empty answer.
_UNREADABLE = (OSError, NotImplementedError, ValueError, TypeError, LookupError)


@dataclass(frozen=True, slots=True)
class ProcessorUse:
    """Seconds that were used up to a moment, of which differences count. None: unknown.

    busy_s: of the cores that this process may use, by anybody, a hypervisor included. own_s: by this process.
    throttled_s: in which the limit of its container stopped it. cores: that it may use. threads: of one operation.
    stolen_s: of those of ``busy_s``, the ones that a hypervisor gave to others.
    """

    now_s: float = 0.0
    busy_s: float | None = None
    own_s: float = 0.0
    throttled_s: float | None = None
    cores: int = 0
    threads: int = 0
    stolen_s: float | None = None


class Processors:
    """The cores that this process may use, and the limits of the containers that it is in.

    proc, cgroups: where Linux tells of those limits.
    """

    def __init__(self, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> None:
        self._groups = [*_groups(proc, cgroups)]

    def use(self) -> ProcessorUse:
        """Read all counters now, in a fifth of a millisecond."""
        import torch  # here: it is slow to load

        cores = _affinity()
        own = resource.getrusage(resource.RUSAGE_SELF)
        busy_s, stolen_s = _busy_and_stolen_s(cores)
        return ProcessorUse(
            now_s=time.perf_counter(),
            busy_s=busy_s,
            own_s=own.ru_utime + own.ru_stime,
            throttled_s=max((t for group in self._groups if (t := _throttled_s(group)) is not None), default=None),
            cores=len(cores),
            threads=torch.get_num_threads(),
            stolen_s=stolen_s,
        )

    def clock_hz(self) -> float | None:
        """Return the clock now of the fastest core, which is one that has work; None: nobody tells.

        In a virtual machine it often is the nominal one, whatever the real one does.
        """
        with suppress(*_UNREADABLE):
            clock_hz: float = max(core.current for core in psutil.cpu_freq(percpu=True)) * _HZ_PER_MHZ
            return clock_hz or None
        return None

    def allowed_cores(self) -> float:
        """Return how many cores may be kept busy: those that this process may run on, or fewer by a limit."""
        quotas = [quota for quota in map(_quota, self._groups) if quota is not None]
        return min((float(len(_affinity())), *quotas))


def _affinity() -> frozenset[int]:
    """Return the numbers of the cores that this process may run on; not every system tells."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _busy_and_stolen_s(cores: frozenset[int]) -> tuple[float | None, float | None]:
    """Return the sums over these cores; None where the system does not tell, or does not count what is stolen."""
    with suppress(*_UNREADABLE):
        every = psutil.cpu_times(percpu=True)
        if len(every) != len(cores):  # where some cores are off, the last numbers are missing
            every = [every[core] for core in cores]
        busy_s = sum(sum(times[:_COUNTED]) - times.idle - getattr(times, "iowait", 0.0) for times in every)
        stolen_s = sum(times.steal for times in every) if hasattr(every[0], "steal") else None
        return busy_s, stolen_s
    return None, None


def _throttled_s(group: Path) -> float | None:
    """Return the seconds for which a group was stopped; None where it does not count them."""
    with suppress(ValueError):
        words = dict(line.split() for line in _text(group / "cpu.stat").splitlines())
        return int(words["throttled_usec"]) / _US_PER_S if "throttled_usec" in words else None
    return None


def _quota(group: Path) -> float | None:
    """Return the cores that a group may keep busy; None: as many as there are, or nobody knows."""
    with suppress(ValueError, ZeroDivisionError):  # "max" is no number: there is no limit
        quota, period = _text(group / "cpu.max").split()
        return int(quota) / int(period)
    return None


def _groups(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Yield the folders of the group of this process and of those around it (version 2 of cgroups).

    In a container the path that the process is told may be one of outside: then its folder is not there, and those
    around it, at last the container's own, are.
    """
    for line in _text(proc / "self" / "cgroup").splitlines():
        if line.startswith("0::"):
            folder = Path(line.removeprefix("0::").lstrip("/"))
            yield from (place for part in (folder, *folder.parents) if (place := cgroups / part).is_dir())


def _text(path: Path) -> str:
    """Read a file; an empty text where there is none, or it cannot be read."""
    with suppress(OSError):
        return path.read_text(errors="replace")
    return ""
