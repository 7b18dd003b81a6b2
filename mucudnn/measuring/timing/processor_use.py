"""Reads the system's counters of processor time, of all processes and of this one, and the container's limits.

A counter that does not exist or cannot be read is unknown, and no error.
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
    """Processor seconds used up to a moment; only differences of two such objects mean something. None: unknown.

    busy_s: of the cores that this process may use, by any process, and a hypervisor's. own_s: used by this process.
    throttled_s: in which a limit of the container stopped this process. cores: number that this process may use.
    threads: number that compute one operation. stolen_s: the part of ``busy_s`` that a hypervisor gave to other
    machines.
    """

    now_s: float = 0.0
    busy_s: float | None = None
    own_s: float = 0.0
    throttled_s: float | None = None
    cores: int = 0
    threads: int = 0
    stolen_s: float | None = None


class Processors:
    """The cores that this process may use, and the limits of the containers around this process.

    proc, cgroups: folders in which Linux shows these limits.
    """

    def __init__(self, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> None:
        self._groups = [*_groups(proc, cgroups)]

    def use(self) -> ProcessorUse:
        """Read all counters of processor time now, which takes a fifth of a millisecond."""
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
        """Return the clock rate now of the fastest core, which is a busy one; None if the system does not tell.

        In a virtual machine this often is the nominal rate, whatever the real one is.
        """
        with suppress(*_UNREADABLE):
            clock_hz: float = max(core.current for core in psutil.cpu_freq(percpu=True)) * _HZ_PER_MHZ
            return clock_hz or None
        return None

    def allowed_cores(self) -> float:
        """Return how many cores this process may keep busy: those that it may run on, or fewer if a limit is lower."""
        quotas = [quota for quota in map(_quota, self._groups) if quota is not None]
        return min((float(len(_affinity())), *quotas))


def _affinity() -> frozenset[int]:
    """Return the numbers of the cores that this process may run on; all cores if the system does not tell."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _busy_and_stolen_s(cores: frozenset[int]) -> tuple[float | None, float | None]:
    """Return the busy seconds of these cores together, and the stolen ones (given to other virtual machines)."""
    with suppress(*_UNREADABLE):
        every = psutil.cpu_times(percpu=True)
        if len(every) != len(cores):  # where some cores are off, the last numbers are missing
            every = [every[core] for core in cores]
        busy_s = sum(sum(times[:_COUNTED]) - times.idle - getattr(times, "iowait", 0.0) for times in every)
        stolen_s = sum(times.steal for times in every) if hasattr(every[0], "steal") else None
        return busy_s, stolen_s
    return None, None


def _throttled_s(group: Path) -> float | None:
    """Return the seconds for which a limit stopped a cgroup (a container's processes); None if not counted."""
    with suppress(ValueError):
        words = dict(line.split() for line in _text(group / "cpu.stat").splitlines())
        return int(words["throttled_usec"]) / _US_PER_S if "throttled_usec" in words else None
    return None


def _quota(group: Path) -> float | None:
    """Return the number of cores that a cgroup (a container's processes) may keep busy; None if there is no limit."""
    with suppress(ValueError, ZeroDivisionError):  # "max" is no number: there is no limit
        quota, period = _text(group / "cpu.max").split()
        return int(quota) / int(period)
    return None


def _groups(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Yield the folders of the group of this process and of those around it (version 2 of cgroups).

    In a container the path in ``/proc`` may be one of the host: then its folder does not exist, but a folder around it
    does, at last the container's own.
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
