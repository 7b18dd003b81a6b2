"""The load that other processes put on the machine during a measurement, as far as the system reports it.

It is found from counters of processor time, of all processes and of this one, and from the CPU limits of the container.
A counter that is missing or unreadable is None, not an error.
"""

from __future__ import annotations

import os
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path

import psutil

from mucudnn.core.errors import tolerated
from mucudnn.core.records import BUSY

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_COUNTED = 8  # user to steal; guest time is already included in the first two
_US_PER_S = 1e6
# Errors of psutil if the system or a container hides its files, and ours on empty files.
_UNREADABLE = (OSError, NotImplementedError, ValueError, TypeError, LookupError)

# The kernel counts in ticks of 10 ms: over a shorter span, rounding is as large as the load to be detected.
_LEAST_SPAN_S = 0.5
_SHORTEST_SPAN_S = 0.2  # for the first measurement, without earlier readings; the load over a shorter span is unknown
_LONGEST_LOOK_BACK_S = 5.0  # older readings do not describe the current load
_READ_EVERY_S = 0.02
_REMEMBERED = 256
_PATIENCE_S = 0.5  # between two readings on a busy machine


@dataclass(frozen=True, slots=True)
class ProcessorUse:
    """Processor seconds used so far; only differences between two such objects are meaningful. Unknown values are None.

    busy_s: time used by all processes, and by the hypervisor, on the cores that this process may use.
    own_s: time used by this process.
    throttled_s: time for which a container limit stopped this process.
    cores: number of cores that this process may use.
    threads: torch's threads.
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
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return ProcessorUse(
            now_s=time.perf_counter(),
            busy_s=_busy_s(cores),
            own_s=usage.ru_utime + usage.ru_stime,
            throttled_s=max((t for group in self._groups if (t := _throttled_s(group)) is not None), default=None),
            cores=len(cores),
            threads=torch.get_num_threads(),
        )

    def allowed_cores(self) -> float:
        """Return how many cores this process may keep busy: the cores that it may run on, or a lower quota."""
        return min(float(len(_affinity())), self.quota())

    def quota(self) -> float:
        """Return how many cores the limits of containers let this process keep busy; infinity without a limit."""
        return min((quota for quota in map(_quota, self._groups) if quota is not None), default=inf)


def _affinity() -> frozenset[int]:
    """Return the numbers of the cores that this process may run on; all cores if the system does not report them."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _busy_s(cores: frozenset[int]) -> float | None:
    """Return the busy seconds of these cores together, those that a hypervisor gave to other machines included."""
    with tolerated(*_UNREADABLE):
        by_core = psutil.cpu_times(percpu=True)
        if len(by_core) != len(cores):  # if some cores are offline, the last numbers are missing
            by_core = [by_core[core] for core in cores]
        return float(sum(sum(times[:_COUNTED]) - times.idle - getattr(times, "iowait", 0.0) for times in by_core))
    return None


def _throttled_s(group: Path) -> float | None:
    """Return the seconds for which a limit stopped a cgroup (a container's processes); None if not counted."""
    with tolerated(ValueError):
        words = dict(line.split() for line in _text(group / "cpu.stat").splitlines())
        return int(words["throttled_usec"]) / _US_PER_S if "throttled_usec" in words else None
    return None


def _quota(group: Path) -> float | None:
    """Return the number of cores that a cgroup (a container's processes) may keep busy; None if there is no limit."""
    with tolerated(ValueError, ZeroDivisionError):  # "max" means no limit
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
    with tolerated(OSError):
        return path.read_text(errors="replace")
    return ""


@dataclass(frozen=True, slots=True)
class Load:
    """Shares of the machine that were unavailable to this process over a span of time. Unknown values are None.

    others_share: core seconds per second that other processes took from the cores that this process needs, at most 1.
    It is not divided by the number of cores, since one slowed thread keeps all others waiting.
    throttled_share: share of the time in which a container's quota stopped the work.
    """

    others_share: float | None = None
    throttled_share: float | None = None

    @property
    def share(self) -> float | None:
        """The larger share of the machine's speed lost for a single reason, from 0 to 1; None if unknown."""
        return max((part for part in (self.others_share, self.throttled_share) if part is not None), default=None)

    @property
    def is_quiet(self) -> bool:
        """Whether no disturbance is known."""
        return self.share is None or self.share <= BUSY

    def __str__(self) -> str:
        """Return text such as ``others take 45 % of a core``."""
        parts = []
        if self.others_share is not None and self.others_share > BUSY:
            parts.append(f"others take {self.others_share:.0%} of a core")
        if self.throttled_share is not None and self.throttled_share > BUSY:
            parts.append(f"a quota stops it {self.throttled_share:.0%} of the time")
        return ", ".join(parts) or ("unknown" if self.share is None else "quiet")


class Watch:
    """Observer of the machine's load: call ``mark`` before a measurement, and ``since`` with that mark after it.

    use: reads the counters of processor time.
    cores: returns how many cores may be kept busy.
    """

    def __init__(
        self,
        use: Callable[[], ProcessorUse] = ProcessorUse,
        cores: Callable[[], float] | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._use, self._cores, self._clock, self._sleep = use, cores, clock, sleep
        self._seen = deque([use()], _REMEMBERED)

    def mark(self) -> ProcessorUse:
        """Begin a span of time, and return its start for ``since``. This reads a few small files at most."""
        return self._look()

    def forget(self) -> None:
        """Discard all readings so far, so that the next load covers only the time from now on."""
        self._seen.clear()
        self._seen.append(self._use())

    def since(self, mark: ProcessorUse) -> Load:
        """Return the machine's load since ``mark``, or over a longer span if that one is too short to measure."""
        now = self._look()
        if now.now_s - mark.now_s >= _LEAST_SPAN_S:
            return self._between(mark, now)
        recent = [seen for seen in self._seen if now.now_s - seen.now_s <= _LONGEST_LOOK_BACK_S]
        early = [seen for seen in recent if now.now_s - seen.now_s >= _LEAST_SPAN_S]
        return self._between(early[-1] if early else recent[0], now)

    def current(self) -> Load:
        """Return the machine's load over the last half second."""
        return self.since(self._look())

    def wait(self, tell: Callable[[str], None], most_s: float) -> float:
        """Wait until the cores are free, at most ``most_s`` seconds; return the seconds waited.

        tell: called with the reason for waiting.
        """
        waited_s = 0.0
        while waited_s < most_s and not (load := self.current()).is_quiet:
            tell(f"waiting for a quiet machine: {load}")
            self.pause()
            waited_s += _PATIENCE_S
        return waited_s

    def pause(self) -> None:
        """Sleep long enough for a new reading of the load."""
        self._sleep(_PATIENCE_S)

    def shortage(self) -> str | None:
        """Return a warning, with the remedy, if there are more threads than cores; None otherwise."""
        return None if self._cores is None else too_many_threads(self._look().threads, self._cores())

    def _look(self) -> ProcessorUse:
        if self._clock() - self._seen[-1].now_s >= _READ_EVERY_S:
            self._seen.append(self._use())
        return self._seen[-1]

    def _between(self, first: ProcessorUse, last: ProcessorUse) -> Load:
        span_s, own_s = last.now_s - first.now_s, last.own_s - first.own_s
        if span_s < _SHORTEST_SPAN_S:
            return Load()
        idle_cores = max(0, last.cores - last.threads)  # which other processes may use freely
        return Load(
            _share(first.busy_s, last.busy_s, span_s, least=own_s / span_s + idle_cores),
            _share(first.throttled_s, last.throttled_s, span_s),
        )


def _share(first_s: float | None, last_s: float | None, span_s: float, least: float = 0.0) -> float | None:
    """Return a counter's increase as a share of a span, less ``least``, within 0 to 1; None if it is not counted."""
    return None if first_s is None or last_s is None else min(1.0, max(0.0, (last_s - first_s) / span_s - least))


def too_many_threads(threads: int, cores: float) -> str | None:
    """Return a warning, with the remedy, if torch uses more threads than the process has cores; None otherwise.

    >>> print(too_many_threads(8, 1.5))
    torch uses 8 threads, and this process may use 1.5 cores, so that threads wait for each other: call \
torch.set_num_threads(2) first, or set OMP_NUM_THREADS=2
    """
    useful = _useful_threads(cores)
    if threads <= useful:
        return None
    return (
        f"torch uses {threads} threads, and this process may use {cores:g} core{'' if cores == 1 else 's'}, so that "
        f"threads wait for each other: call torch.set_num_threads({useful}) first, or set OMP_NUM_THREADS={useful}"
    )


def _useful_threads(cores: float) -> int:
    return max(1, -(-int(cores * 100) // 100))  # a fraction of a core needs a whole thread


@cache
def most_threads() -> float:
    """Return the most threads that the limits of containers keep busy, as they were at the first call."""
    quota = Processors().quota()
    return quota if quota == inf else _useful_threads(quota)


def watch_of(device: str) -> Watch:
    """Return the observer of the CPU's load; for other devices and with ``MUCUDNN_WATCH=0`` it observes nothing."""
    return Watch() if device != "cpu" or os.environ.get("MUCUDNN_WATCH") == "0" else _watch_of_processors(os.getpid())


@cache
def _watch_of_processors(process: int) -> Watch:
    """Return the ``Watch`` that this process shares, so that later tunings reuse its readings."""
    processors = Processors()
    return Watch(processors.use, processors.allowed_cores)
