"""The rate of matrix products: measured once, and only where it bounds anything."""

from __future__ import annotations

from math import inf, isfinite

import pytest

from mucudnn.bench.timing.peak_rate import peak_flops_per_s, sustained_flops_per_s


@pytest.mark.parametrize(("device", "dtype"), [("cuda", "float32"), ("cpu", "bfloat16"), ("cpu", "float16")])
def test_where_it_bounds_nothing_it_is_infinite(device: str, dtype: str) -> None:
    assert peak_flops_per_s(device, dtype) == sustained_flops_per_s(device, dtype) == inf


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_it_is_measured_once(dtype: str) -> None:
    rate = peak_flops_per_s("cpu", dtype)
    assert isfinite(rate)
    assert rate == peak_flops_per_s("cpu", dtype)
