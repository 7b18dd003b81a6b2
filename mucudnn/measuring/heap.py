"""The heap of the C library, from which torch takes the tensors of the CPU: kept from call to call, or given back.

glibc maps large blocks anew for each tensor, and returns the end of its heap to the system when much of it is free. The
next tensor then lies in fresh pages, each of which the kernel zeroes at its first access (a page fault). In a training
step of MobileNetV2 that takes a third of the time. See docs/memory.md.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from typing import NamedTuple, TypeVar

from mucudnn.core.errors import warn
from mucudnn.core.records import Comparison
from mucudnn.core.values import format_bytes

T = TypeVar("T")

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4  # parameters of mallopt, from malloc.h
# Kept: nothing is mapped, nothing is returned, and the heap grows by 64 MiB at a time.
_KEPT = {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1, _TOP_PAD: 64 * 2**20}
# Otherwise: the values that glibc's dynamic thresholds reach in programs with large tensors, and its defaults.
_GROWN = {_MMAP_MAX: 65536, _MMAP_THRESHOLD: 32 * 2**20, _TRIM_THRESHOLD: 64 * 2**20, _TOP_PAD: 128 * 2**10}
_SET_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
_RESET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")

LEAST_GAIN = 0.03  # share of a step that a kept heap must save
FAULT_S = 5e-6  # upper bound on the time that one page fault costs

_lock = Lock()
_measuring = 0  # number of ``kept_heap`` blocks that are active
_is_kept = False  # for the user


@cache
def why_fixed() -> str | None:
    """Return the reason why the heap of this process cannot be kept, or None.

    >>> from unittest import mock
    >>> with mock.patch.dict(os.environ, MALLOC_TRIM_THRESHOLD_="1000000"):
    ...     why_fixed.__wrapped__()
    'MALLOC_TRIM_THRESHOLD_ is set'
    """
    for name in _SET_BY_USER:
        if name in os.environ:
            return f"{name} is set"
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return "GLIBC_TUNABLES sets glibc.malloc"
    try:
        glibc, in_use = (ctypes.cast(ctypes.CDLL(name).malloc, ctypes.c_void_p).value for name in ("libc.so.6", None))
    except (OSError, AttributeError):
        return "the C library is not glibc"
    if glibc != in_use:
        return "another allocator takes the place of glibc's, such as jemalloc or tcmalloc by LD_PRELOAD"
    return None


def keep_heap(*, kept: bool) -> None:
    """Let glibc keep free memory for the next tensor from now on, or return it to the system as it comes.

    Does nothing if ``why_fixed()`` gives a reason.
    """
    global _is_kept
    with _lock:
        _is_kept = kept
        _set_thresholds()


def is_heap_kept() -> bool:
    """Return whether the heap is kept, by ``keep_heap``."""
    return _is_kept


def unkept_in_words(wanted: bool | None) -> str:
    """Return how the heap differs from a kept one while candidates are timed; empty if it does not, as usual.

    wanted: ``Config.keep_heap``.
    """
    return why_fixed() or ("the heap is not kept" if wanted is False and not _is_kept else "")


def settle_heap(wanted: bool | None) -> None:
    """Keep the heap or not, as the user decides; None leaves it as it is. Warn if it cannot be kept."""
    if wanted is None:
        return
    if wanted and (why := why_fixed()):
        warn(f"keep_heap is True, but the heap cannot be kept: {why}")
    if wanted != _is_kept:
        keep_heap(kept=wanted)


@contextmanager
def kept_heap() -> Iterator[None]:
    """Keep the heap inside the context, so that no call that is timed there gets fresh pages."""
    global _measuring
    with _lock:
        _measuring += 1
        _set_thresholds()
    try:
        yield
    finally:
        with _lock:
            _measuring -= 1
            _set_thresholds()


def trim_heap() -> None:
    """Return the heap's free memory to the system, unless the user keeps the heap or the C library is not glibc."""
    with _lock:
        _set_thresholds()


def _set_thresholds() -> None:
    if why_fixed() is not None:
        return
    libc = ctypes.CDLL("libc.so.6")
    is_kept = bool(_is_kept or _measuring)
    for parameter, value in (_KEPT if is_kept else _GROWN).items():
        libc.mallopt(parameter, value)
    if not is_kept:
        libc.malloc_trim(0)


class Usage(NamedTuple):
    """What this process has used: processor seconds of its own code and of the kernel, and page faults."""

    own_s: float
    kernel_s: float
    faults: int

    @classmethod
    def now(cls) -> Usage:
        """Return what was used since the process began."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return cls(usage.ru_utime, usage.ru_stime, usage.ru_minflt)

    def since(self, before: Usage) -> Usage:
        """Return what was used after ``before``."""
        return Usage(self.own_s - before.own_s, self.kernel_s - before.kernel_s, self.faults - before.faults)

    @property
    def processor_s(self) -> float:
        return self.own_s + self.kernel_s

    @property
    def kernel_share(self) -> float:
        """The kernel's share of the processor time, from 0 to 1."""
        return self.kernel_s / self.processor_s if self.processor_s > 0 else 0.0


def with_resident_bytes(call: Callable[[], T]) -> tuple[T, int, int]:
    """Call a function; return its result, the resident bytes before, and the most meanwhile. 0 if they are unknown."""
    try:
        _RESET.write_text("5")
    except OSError:  # not Linux, or a sandbox
        return call(), 0, 0
    before = _status_bytes("VmRSS")
    return call(), before, _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    lines = _STATUS.read_text().splitlines() if _STATUS.exists() else []
    return next((int(line.split()[1]) * 2**10 for line in lines if line.startswith(f"{field}:")), 0)


@dataclass(frozen=True, slots=True)
class HeapComparison:
    """Comparison of a model's own step without and with a kept heap. Prints as one line.

    step: the baseline is the heap as it comes.
    faults: page faults in a step, without and with.
    resident_bytes: peak of the resident memory in a step, without and with; 0 if unknown.
    is_kept: whether the heap is kept since.
    """

    step: Comparison
    faults: tuple[int, int]
    resident_bytes: tuple[int, int]
    is_kept: bool = False

    def __str__(self) -> str:
        words = "the heap is kept" if self.is_kept else "the heap is not kept"
        before, after = (f"{1e3 * seconds:.0f}" for seconds in (self.step.baseline_s, self.step.time_s))
        resident = "; resident at most " + " -> ".join(map(format_bytes, self.resident_bytes))
        return (
            f"{words}: step {before} -> {after} ms, {self.step.speedup:.2f}x ± {self.step.noise:.2f}; page faults "
            f"{self.faults[0]:,} -> {self.faults[1]:,}{resident if all(self.resident_bytes) else ''}"
        )


class HeapTrial:
    """Trial of a kept heap in a program whose steps are unknown, by the kernel's share of the processor time.

    Call ``look`` now and then. The program runs for a while with the heap as it comes, then with a kept heap. It stays
    kept if the kernel's share falls by ``LEAST_GAIN``.

    verdict: the result in words; None as long as there is none.
    """

    LOOK_S = 2.0  # least processor seconds of a phase: as it comes, then kept without counting, then kept

    def __init__(self) -> None:
        self.verdict = "kept already" if _is_kept else None if (why := why_fixed()) is None else f"not kept: {why}"
        self._before: tuple[float, float] | None = None
        self._is_warm = False
        self.begin()

    def begin(self) -> None:
        """Begin the current phase again, after something that is not the program's own, such as tuning."""
        self._begun = Usage.now()

    def look(self) -> bool:
        """Look at the program's usage of the processor; return whether to look again later."""
        if self.verdict is not None:
            return False
        used = Usage.now().since(self._begun)
        if used.processor_s < self.LOOK_S:
            return True
        share, per_s = used.kernel_share, used.faults / used.processor_s
        # The first phase ends with a kept heap, or with the verdict that there is nothing to gain.
        if self._before is None:
            if share < LEAST_GAIN:
                self.verdict = f"not kept: the kernel takes {share:.0%} of the processor time"
                return False
            self._before = share, per_s
            keep_heap(kept=True)
        # The second phase, in which the heap grows, does not count.
        elif not self._is_warm:
            self._is_warm = True
        # The third phase shows what the kept heap saves.
        else:
            share_before, per_s_before = self._before
            is_worth = share_before - share >= LEAST_GAIN
            if not is_worth:
                keep_heap(kept=False)
            self.verdict = (
                f"{'kept' if is_worth else 'not kept'}: the kernel's share of the processor time "
                f"{share_before:.0%} -> {share:.0%}, page faults a second {per_s_before:,.0f} -> {per_s:,.0f}"
            )
            return False
        self.begin()
        return True
