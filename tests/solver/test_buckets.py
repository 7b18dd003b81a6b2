"""Buckets of gradients: the best against all there are, and DistributedDataParallel's against torch's own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, combinations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from mucudnn.solver.buckets import (
    DDP_CAP_BYTES,
    DDP_FIRST_CAP_BYTES,
    Gradient,
    MessageCost,
    best_cap,
    best_merging,
    ddp_default,
    ddp_ends,
    sent_s,
)
from mucudnn.words.errors import InvalidInputError

SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=9)


@st.composite
def gradients_of_a_step(draw: st.DrawFn) -> list[Gradient]:
    sizes = draw(SIZES)
    gaps = draw(st.lists(st.integers(0, 40), min_size=len(sizes), max_size=len(sizes)))
    return [Gradient(size, float(ready)) for size, ready in zip(sizes, accumulate(gaps), strict=True)]


def by_message(latency: int, concave: bool) -> MessageCost:
    return lambda size: latency + (size**0.5 if concave else float(size))


def all_merges(count: int) -> Iterator[tuple[int, ...]]:
    for cuts in range(count):
        for inner in combinations(range(1, count), cuts):
            yield (*inner, count)


def simulated_s(gradients: list[Gradient], ends: tuple[int, ...], cost: MessageCost) -> float:
    """One channel: each message waits for its last gradient and for the message before."""
    free_s, first = 0.0, 0
    for end in ends:
        bucket = gradients[first:end]
        free_s = max(free_s, *(gradient.ready_s for gradient in bucket)) + cost(sum(g.size_bytes for g in bucket))
        first = end
    return free_s


@settings(max_examples=60)
@given(gradients=gradients_of_a_step(), latency=st.integers(0, 50), concave=st.booleans())
def test_the_best_merging_is_the_best_of_all(gradients: list[Gradient], latency: int, concave: bool) -> None:
    cost = by_message(latency, concave)
    best = best_merging(gradients, cost)
    every = {ends: simulated_s(gradients, ends, cost) for ends in all_merges(len(gradients))}
    assert best.end_s == pytest.approx(min(every.values()))
    assert every[best.ends] == pytest.approx(best.end_s)
    assert sent_s(gradients, best.ends, cost) == pytest.approx(best.end_s)


@settings(max_examples=60)
@given(gradients=gradients_of_a_step(), latency=st.integers(0, 50), concave=st.booleans())
def test_the_best_cap_is_the_best_of_all_caps(gradients: list[Gradient], latency: int, concave: bool) -> None:
    cost = by_message(latency, concave)
    best = best_cap(gradients, cost)
    sizes = [gradient.size_bytes for gradient in gradients]
    every = {cap: simulated_s(gradients, ddp_ends(sizes, cap), cost) for cap in range(1, sum(sizes) + 2)}
    assert best.end_s == pytest.approx(min(every.values()))
    assert best.cap_bytes is not None
    assert every[best.cap_bytes] == pytest.approx(best.end_s)
    assert best.ends == ddp_ends(sizes, best.cap_bytes)
    assert best.end_s >= best_merging(gradients, cost).end_s * (1 - 1e-12)


@settings(max_examples=60)
@given(sizes=SIZES, cap=st.integers(1, 300), first=st.none() | st.integers(1, 100))
def test_buckets_are_filled_as_torch_fills_them(sizes: list[int], cap: int, first: int | None) -> None:
    tensors = [torch.empty(size, dtype=torch.float32) for size in sizes]
    limits = [4 * cap] if first is None else [4 * first, 4 * cap]
    buckets, _ = dist._compute_bucket_assignment_by_size(tensors, limits)
    ends = ddp_ends([4 * size for size in sizes], 4 * cap, None if first is None else 4 * first)
    assert [*accumulate(map(len, buckets))] == [*ends]


def test_the_default_is_that_of_torch() -> None:
    from torch.nn.parallel import distributed

    assert distributed._DEFAULT_BUCKET_CAP_MB * 2**20 == DDP_CAP_BYTES
    assert dist._DEFAULT_FIRST_BUCKET_BYTES == DDP_FIRST_CAP_BYTES


def test_the_default_sends_a_small_bucket_first() -> None:
    sizes = [2**19] * 4 + [2**24] * 4
    gradients = [Gradient(size, float(number)) for number, size in enumerate(sizes)]
    assert ddp_default(gradients, lambda _: 0.0).ends == (2, 6, 8)


def test_latency_merges_and_bandwidth_divides() -> None:
    gradients = [Gradient(10, float(number)) for number in range(5)]
    assert best_merging(gradients, lambda _: 100.0).ends == (5,)
    assert best_cap(gradients, lambda _: 100.0).ends == (5,)
    assert best_merging(gradients, lambda size: size / 10).end_s == 5
    assert best_cap(gradients, lambda size: size / 10).ends == (1, 2, 3, 4, 5)


def test_without_gradients_nothing_is_sent() -> None:
    for of in (best_merging, best_cap, ddp_default):
        assert (of([], lambda _: 1.0).ends, of([], lambda _: 1.0).end_s) == ((), 0.0)


@pytest.mark.parametrize("gradients", [[Gradient(0, 0.0)], [Gradient(1, 2.0), Gradient(1, 1.0)], [Gradient(1, -1.0)]])
def test_gradients_out_of_order_are_refused(gradients: list[Gradient]) -> None:
    for of in (best_merging, best_cap, ddp_default):
        with pytest.raises(InvalidInputError, match="gradient"):
            of(gradients, lambda _: 1.0)
