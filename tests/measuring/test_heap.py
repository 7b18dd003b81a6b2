"""The heap is kept while calls are timed, and for the user where that saves time, unless the user has set glibc."""

from __future__ import annotations

import mmap
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mucudnn.core.config import Config
from mucudnn.core.records import Environment
from mucudnn.measuring import heap
from mucudnn.measuring.heap import (
    HeapTrial,
    is_heap_kept,
    keep_heap,
    settle_heap,
    why_fixed,
    with_resident_bytes,
)
from mucudnn.running.devices import current_environment
from mucudnn.tuning.tuner import machine_and_database

_SETTINGS = ("LD_PRELOAD", "GLIBC_TUNABLES", *heap._SET_BY_USER)
needs_glibc = pytest.mark.skipif(why_fixed() is not None, reason="only glibc's heap can be kept")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _SETTINGS), reason="set")
def test_the_heap_of_a_plain_process_can_be_kept() -> None:
    assert why_fixed() is None


KEPT = """
import ctypes
from mucudnn.measuring.heap import Usage, keep_heap, kept_heap

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes, libc.memset.argtypes = (
    ctypes.c_void_p, [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
)

def pages_of_a_second_use():
    for _ in range(2):
        before = Usage.now().faults
        blocks = [libc.malloc(48 * 2**20) for _ in range(3)]
        for block in blocks:
            libc.memset(block, 1, 48 * 2**20)
        for block in blocks:
            libc.free(block)
    return Usage.now().faults - before

with kept_heap():
    inside = pages_of_a_second_use()
after = pages_of_a_second_use()
keep_heap(kept=True)
with kept_heap():
    pass
kept = pages_of_a_second_use()
keep_heap(kept=False)
print(inside, after, kept, pages_of_a_second_use())
"""


@pytest.fixture(autouse=True)
def not_kept() -> None:
    keep_heap(kept=False)


def faults(**variables: str) -> list[int]:
    program = [sys.executable, "-c", KEPT]
    done = subprocess.run(program, check=True, capture_output=True, text=True, env={**os.environ, **variables})
    return [int(number) for number in done.stdout.split()]


@needs_glibc
def test_freed_memory_stays_in_a_kept_heap() -> None:
    """144 MiB are 36,864 pages of 4 KiB; blocks of 48 MiB are mapped by glibc as it comes."""
    inside, after, kept, again = faults()
    assert max(inside, kept) < 100
    assert min(after, again) > 36_000


@needs_glibc
def test_what_the_user_has_set_stays() -> None:
    assert min(faults(MALLOC_MMAP_THRESHOLD_="1000000")) > 36_000


def test_a_heap_that_cannot_be_kept_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "why_fixed", lambda: "the C library is not glibc")
    settle_heap(None)
    settle_heap(False)
    with pytest.warns(UserWarning, match="cannot be kept: the C library is not glibc"):
        settle_heap(True)


def test_times_of_another_heap_have_rows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def environment(wanted: bool | None) -> Environment:
        with machine_and_database(Config(keep_heap=wanted)) as (machine, _):
            return machine.environment

    monkeypatch.setattr(heap, "why_fixed", lambda: None)
    usual = environment(None)
    assert usual == environment(True) == current_environment()  # rows of earlier versions count
    assert environment(False).library == f"{usual.library}, the heap is not kept"
    monkeypatch.setattr(heap, "_is_kept", True)  # ``tune`` leaves it so
    assert environment(False) == usual
    monkeypatch.setattr(heap, "why_fixed", lambda: "MALLOC_TOP_PAD_ is set")
    assert {environment(wanted).library for wanted in (None, True, False)} == {
        f"{usual.library}, MALLOC_TOP_PAD_ is set"
    }


def test_the_peak_of_resident_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the system refuses to observe it, as sandboxes do, it is 0."""

    def touch() -> int:
        with mmap.mmap(-1, 32 * 2**20) as pages:  # a tensor may lie in pages that the heap has already
            return pages.write(bytes(1) * len(pages))

    touched, before, peak = with_resident_bytes(touch)
    assert touched == 32 * 2**20
    assert before == peak == 0 or peak >= before + 24 * 2**20
    for name in ("_RESET", "_STATUS"):
        monkeypatch.setattr(heap, name, tmp_path / "missing" / name)
    assert with_resident_bytes(touch) == (32 * 2**20, 0, 0)


# In a program whose steps are unknown, the kernel's share of the processor time decides


class Program:
    """A program that takes a second of the processor between two looks, part of it in the kernel."""

    def __init__(self, shares: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.shares, self.used = shares, SimpleNamespace(ru_utime=5.0, ru_stime=1.0, ru_minflt=7)
        monkeypatch.setattr(heap.resource, "getrusage", lambda who: SimpleNamespace(**vars(self.used)))

    def runs(self) -> None:
        share = self.shares[is_heap_kept()]
        self.used.ru_stime += share
        self.used.ru_utime += 1 - share
        self.used.ru_minflt += round(100_000 * share)


@needs_glibc
def test_a_trial_keeps_the_heap_where_the_kernel_takes_less_then(monkeypatch: pytest.MonkeyPatch) -> None:
    of_kernel = "the kernel's share of the processor time"
    for shares, kept, verdict, looks in (  # sums of powers of two are exact
        ((1 / 4, 1 / 64), True, f"kept: {of_kernel} 25% -> 2%, page faults a second 25,000", 6),
        ((1 / 4, 15 / 64), False, f"not kept: {of_kernel} 25% -> 23%", 6),  # such as reading files
        ((1 / 64, 0.0), False, "not kept: the kernel takes 2% of the processor time", 2),
    ):
        program, done = Program(shares, monkeypatch), 1
        trial = HeapTrial()
        program.runs()
        while trial.look():
            program.runs()
            done += 1
        assert done == looks
        assert (trial.verdict or "").startswith(verdict)
        assert is_heap_kept() == kept
        assert HeapTrial().look() == (not kept)
        keep_heap(kept=False)
