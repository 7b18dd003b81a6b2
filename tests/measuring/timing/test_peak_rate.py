"""The rate of matrix products: measured a few times, and only where it bounds anything."""

from __future__ import annotations

from collections import defaultdict
from math import inf

import pytest

from mucudnn.measuring.timing import peak_rate
from mucudnn.measuring.timing.peak_rate import peak_flops_per_s, sustained_flops_per_s


@pytest.mark.parametrize(("device", "dtype"), [("cuda", "float32"), ("cpu", "bfloat16"), ("cpu", "float16")])
def test_where_it_bounds_nothing_it_is_infinite(device: str, dtype: str) -> None:
    assert peak_flops_per_s(device, dtype) == sustained_flops_per_s(device, dtype) == inf


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_best_of_the_first_looks_counts(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one meets a busy moment; after ten of them nobody looks any more."""
    looks = iter([1e9, 3e9, *[2e9] * 8])
    monkeypatch.setattr(peak_rate, "_seen_flops_per_s", defaultdict(list))
    monkeypatch.setattr(peak_rate, "_flops_per_s", lambda dtype, least_s: next(looks))
    assert [peak_flops_per_s("cpu", dtype) for _ in range(12)] == [1e9, *[3e9] * 11]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_it_is_measured(dtype: str) -> None:
    assert 0 < peak_flops_per_s("cpu", dtype) < inf
