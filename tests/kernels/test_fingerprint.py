"""The fingerprint of a filter's bytes: equal for equal bytes on any number of threads, different for any change."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mucudnn.kernels.compiled import library
from mucudnn.kernels.compiled.library import BUILDS, build_name, loaded_build
from mucudnn.running.filter_cache import fingerprint

pytestmark = pytest.mark.skipif(loaded_build().library is None, reason="nothing is compiled")
CHUNK_BYTES = 4096
MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15
SIZES = (0, 1, 7, 64, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 100, 100 * CHUNK_BYTES)


def mix(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


def defined(data: bytes) -> int:
    """The definition in whole numbers: NH over chunks of 4 KiB, and the sum of the mixed chunks."""
    keys = [mix((i + 1) * GAMMA & MASK) for i in range(CHUNK_BYTES // 8)]
    total = 0
    for number, start in enumerate(range(0, len(data), CHUNK_BYTES)):
        chunk = data[start : start + CHUNK_BYTES].ljust(CHUNK_BYTES, b"\0")
        words = [int.from_bytes(chunk[8 * i : 8 * i + 8], "little") + key & MASK for i, key in enumerate(keys)]
        nh = sum(a * b for a, b in zip(words[::2], words[1::2], strict=True)) % 2**128
        total += mix(nh & MASK ^ mix((nh >> 64) + (number + 1) * GAMMA & MASK))
    return mix((total ^ mix(len(data) + GAMMA & MASK)) & MASK)


def random_bytes(size: int) -> Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8)


def runnable_builds() -> list[str]:
    """Empty where nothing is compiled."""
    runnable = BUILDS[BUILDS.index(build_name()) :] if build_name() in BUILDS else ()
    return [name for name in runnable if library._path(name)]


@pytest.mark.parametrize("build", runnable_builds())
@pytest.mark.parametrize("size", SIZES)
def test_every_build_and_thread_count_computes_the_definition(build: str, size: int) -> None:
    path = library._path(build)
    compute = library._declared(ctypes.CDLL(str(path))).mucudnn_fingerprint
    data = random_bytes(size)
    expected = defined(data.numpy().tobytes())
    assert {compute(data.data_ptr(), size, threads) & MASK for threads in (1, 2, 3, 7)} == {expected}


def test_any_single_bit_counts() -> None:
    data = random_bytes(2 * CHUNK_BYTES + 40)
    found = {fingerprint(data)}
    bits = torch.randperm(8 * len(data))[:4000].tolist()
    for bit in bits:
        changed = data.clone()
        changed[bit // 8] ^= 1 << bit % 8
        found.add(fingerprint(changed))
    assert len(found) == len(bits) + 1


def swapped(values: Tensor, i: int, j: int) -> Tensor:
    changed = values.clone()
    changed[i], changed[j] = values[j], values[i]
    return changed


def with_sum_kept(values: Tensor, i: int, j: int) -> Tensor:
    """The whole number behind one element is raised, and that behind another lowered."""
    changed = values.clone()
    changed.view(torch.int32)[i] += 1
    changed.view(torch.int32)[j] -= 1
    return changed


def sign_bits_flipped(values: Tensor, i: int, j: int) -> Tensor:
    changed = values.clone()
    changed[[i, j]] *= -1
    return changed


@pytest.mark.parametrize("change", [swapped, with_sum_kept, sign_bits_flipped])
def test_changes_at_two_places_do_not_cancel(change: Callable[[Tensor, int, int], Tensor]) -> None:
    """Neighbours, one pair of words, the same place of other pairs and of other chunks, powers of two apart."""
    values = torch.randn(3 * CHUNK_BYTES // 4)
    places = {(0, 1 << k) for k in range(12)} | {(2, 3), (1, 2), (100, 101), (100, 102), (1023, 1024), (7, 3000)}
    for i, j in torch.randint(len(values), (1000, 2)).sort().values.tolist():
        places |= {(i, j)} if i < j else set()
    found = {fingerprint(change(values, i, j)) for i, j in places}
    assert len(found | {fingerprint(values)}) == len(places) + 1


def test_the_number_of_zeros_counts() -> None:
    assert len({fingerprint(torch.zeros(size, dtype=torch.uint8)) for size in range(5000)}) == 5000
