"""A batch shared out to devices of known times, and what is told of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.clock.machine import ENVIRONMENT
from support.problems.made_up_sweeps import layer, powers, tuning
from support.snapshots import assert_as_stored

from mucudnn.bench.scaling.shares import SharedBatch, in_words, share_out, shares_table
from mucudnn.bench.sources.table_tuning import TableTuning

BATCH = 16


def device(name: str, sample_ms: float) -> tuple[str, TableTuning]:
    made = tuning(layer(powers("native", BATCH, lambda n: sample_ms * n), BATCH, count=2))
    return f"{name}.jsonl", replace(made, environment=replace(ENVIRONMENT, device=name))


def shared(*rest_s: float) -> SharedBatch:
    """Devices of 1 and of 3 ms a sample, in each of two convolutions."""
    return share_out([device("slow", 3.0), device("fast", 1.0)], BATCH, rest_s or (0.0, 0.0))


def test_the_shares_and_what_they_gain() -> None:
    result = shared()
    assert result.best.samples == (4, 12)
    assert result.best.times_s == pytest.approx((24e-3, 24e-3))
    assert result.equal.samples == (8, 8)
    assert result.alone_s == pytest.approx((96e-3, 32e-3))
    assert result.speedup_over_equal == pytest.approx(2)
    assert result.speedup_over_fastest == pytest.approx(4 / 3)


def test_the_rest_of_a_step_is_added_for_each_sample() -> None:
    assert shared(0.0, 4e-3).best.samples == (8, 8)  # 6 ms a sample on either


def test_it_is_told_as_stored() -> None:
    assert_as_stored("share", shares_table(shared()), in_words(shared()), in_words(shared(1e-3, 1e-3)))
