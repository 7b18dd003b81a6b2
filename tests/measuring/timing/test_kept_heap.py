"""The heap is kept while calls are timed, unless the user has decided on it."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from threading import Thread

import pytest

from mucudnn.measuring.timing import kept_heap as module
from mucudnn.measuring.timing.kept_heap import kept_heap

KEPT = """
import ctypes
from mucudnn.measuring.timing.kept_heap import kept_heap

class Heap(ctypes.Structure):
    _fields_ = [(str(i), ctypes.c_size_t) for i in range(9)] + [("free_at_its_end", ctypes.c_size_t)]

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes, libc.mallinfo2.restype = ctypes.c_void_p, [ctypes.c_void_p], Heap

def kept_bytes():
    for block in [libc.malloc(2**24) for _ in range(20)]:
        libc.free(block)
    return libc.mallinfo2().free_at_its_end

with kept_heap():
    inside = kept_bytes()
print(inside, kept_bytes())
"""

needs_glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="only glibc's heap is kept")


@needs_glibc
def test_what_is_freed_stays_in_the_heap_meanwhile() -> None:
    program = [sys.executable, "-c", KEPT]
    inside, after = map(int, subprocess.run(program, check=True, capture_output=True, text=True).stdout.split())
    assert inside >= 20 * 2**24
    assert after <= 64 * 2**20


def test_the_heap_is_kept_until_the_last_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(module, "_mallopt", lambda: lambda name, value: told.append((name, value)))
    with kept_heap():
        other = Thread(target=_enter)
        other.start()
        other.join()
        assert {value for name, value in told if name == -1} == {2**31 - 1}
    assert told[-1] == (-1, 64 * 2**20)


def _enter() -> None:
    with kept_heap():
        pass


@pytest.mark.parametrize(
    ("name", "value"), [("MALLOC_TRIM_THRESHOLD_", "0"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=65536")]
)
def test_what_the_user_has_set_stays(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert module._mallopt() is None
