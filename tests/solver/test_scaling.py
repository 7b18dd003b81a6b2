"""Buckets of gradients and all-reduces: against brute force, torch and a simulation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from mucudnn.solver.all_reduce import (
    AllReduce,
    Gradient,
    Link,
    MessageCost,
    all_reduce_s,
    best_cap,
    ddp_default,
    ddp_ends,
    rounds_and_volume,
)

SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=9)


@st.composite
def gradients_of_a_step(draw: st.DrawFn) -> list[Gradient]:
    sizes = draw(SIZES)
    gaps = draw(st.lists(st.integers(0, 40), min_size=len(sizes), max_size=len(sizes)))
    return [Gradient(size, float(ready)) for size, ready in zip(sizes, accumulate(gaps), strict=True)]


def by_message(latency: int, concave: bool) -> MessageCost:
    return lambda size: latency + (size**0.5 if concave else float(size))


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
def test_the_best_cap_is_the_best_of_all_caps(gradients: list[Gradient], latency: int, concave: bool) -> None:
    cost = by_message(latency, concave)
    best = best_cap(gradients, cost)
    sizes = [gradient.size_bytes for gradient in gradients]
    every = {cap: simulated_s(gradients, ddp_ends(sizes, cap), cost) for cap in range(1, sum(sizes) + 2)}
    assert best.end_s == pytest.approx(min(every.values()))
    assert best.cap_bytes is not None
    assert every[best.cap_bytes] == pytest.approx(best.end_s)
    assert best.ends == ddp_ends(sizes, best.cap_bytes)


@settings(max_examples=60)
@given(sizes=SIZES, cap=st.integers(1, 300), first=st.none() | st.integers(1, 100))
def test_buckets_are_filled_as_torch_fills_them(sizes: list[int], cap: int, first: int | None) -> None:
    tensors = [torch.empty(size, dtype=torch.float32) for size in sizes]
    limits = [4 * cap] if first is None else [4 * first, 4 * cap]
    buckets, _ = dist._compute_bucket_assignment_by_size(tensors, limits)
    ends = ddp_ends([4 * size for size in sizes], 4 * cap, None if first is None else 4 * first)
    assert [*accumulate(map(len, buckets))] == [*ends]


def test_the_default_sends_a_small_bucket_first() -> None:
    sizes = [2**19] * 4 + [2**24] * 4
    gradients = [Gradient(size, float(number)) for number, size in enumerate(sizes)]
    assert ddp_default(gradients, lambda _: 0.0).ends == (2, 6, 8)


# Costs of all-reduces against a simulation that runs each algorithm message by message, on numbers.


LINK = Link(latency_s=5e-6, bytes_per_s=25e9)
RANKS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 16, 17, 31, 32)


@dataclass(frozen=True)
class Message:
    """Elements first..last of what the sender has; the receiver adds them to its own, or keeps them instead."""

    sender: int
    receiver: int
    first: int
    last: int
    is_added: bool


Round = list[Message]


def ring(p: int, n: int) -> Iterator[Round]:
    ends = [n * i // p for i in range(p + 1)]
    for phase, is_added in enumerate((True, False)):
        for step in range(p - 1):
            chunks = [(rank + phase - step) % p for rank in range(p)]
            yield [Message(r, (r + 1) % p, ends[c], ends[c + 1], is_added) for r, c in enumerate(chunks)]


def tree(p: int, n: int) -> Iterator[Round]:
    distances = [2**i for i in range((p - 1).bit_length())]
    pairs = [[(r, r + d) for r in range(0, p, 2 * d) if r + d < p] for d in distances]
    for level in pairs:
        yield [Message(child, parent, 0, n, True) for parent, child in level]
    for level in reversed(pairs):
        yield [Message(parent, child, 0, n, False) for parent, child in level]


def butterfly(p: int, n: int) -> Iterator[Round]:
    for i in range(p.bit_length() - 1):
        yield [Message(rank, rank ^ 2**i, 0, n, True) for rank in range(p)]


def rabenseifner(p: int, n: int) -> Iterator[Round]:
    own = [[(0, n)] for _ in range(p)]  # of each rank what it is responsible for, and was before
    distances = [p >> i for i in range(1, p.bit_length())]
    for distance in distances:
        messages = []
        for rank in range(p):
            first, last = own[rank][-1]
            halves = [(first, (first + last) // 2), ((first + last) // 2, last)]
            upper = bool(rank & distance)
            messages.append(Message(rank, rank ^ distance, *halves[not upper], True))
            own[rank].append(halves[upper])
        yield messages
    for distance in reversed(distances):
        yield [Message(rank, rank ^ distance, *own[rank].pop(), False) for rank in range(p)]


SCHEDULES = {
    AllReduce.RING: ring,
    AllReduce.TREE: tree,
    AllReduce.BUTTERFLY: butterfly,
    AllReduce.RABENSEIFNER: rabenseifner,
}
FOLDED = (AllReduce.BUTTERFLY, AllReduce.RABENSEIFNER)


def schedule(algorithm: AllReduce, p: int, n: int) -> Iterator[Round]:
    """Ranks beyond a power of two send all they have to a partner before, and get the sum back after."""
    power = 2 ** (p.bit_length() - 1) if algorithm in FOLDED else p
    if power < p:
        yield [Message(rank, rank - power, 0, n, True) for rank in range(power, p)]
    yield from SCHEDULES[algorithm](power, n)
    if power < p:
        yield [Message(rank - power, rank, 0, n, False) for rank in range(power, p)]


def simulate(algorithm: AllReduce, p: int, data: np.ndarray) -> tuple[np.ndarray, int, Fraction]:
    """Return what each rank ends with, how many rounds there were, and the elements that passed in sequence."""
    n = data.shape[1]
    count, passed = 0, Fraction(0)
    for messages in schedule(algorithm, p, n):
        for side in ("sender", "receiver"):
            busy = [getattr(message, side) for message in messages]
            assert len({*busy}) == len(busy), "a rank sends one message and receives one in a round"
        sent = [data[m.sender, m.first : m.last].copy() for m in messages]
        for message, values in zip(messages, sent, strict=True):
            old = data[message.receiver, message.first : message.last]
            old[:] = old + values if message.is_added else values
        count += 1
        passed += max(m.last - m.first for m in messages)
    return data, count, passed


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("algorithm", AllReduce)
def test_every_rank_ends_with_the_sum_in_as_many_rounds_and_bytes_as_the_model_says(
    algorithm: AllReduce, p: int
) -> None:
    n = 32 * p  # whole chunks and halves
    data = np.random.default_rng(p).integers(-999, 999, (p, n))
    expected = data.sum(axis=0)
    ended, count, passed = simulate(algorithm, p, data.copy())
    assert (ended == expected).all()
    assert (count, float(passed / n)) == pytest.approx(rounds_and_volume(algorithm, p), rel=1e-14)
    assert all_reduce_s(algorithm, p, 8 * n, LINK) == pytest.approx(count * 5e-6 + 8 * float(passed) / 25e9)
    free = Link(latency_s=0, bytes_per_s=25e9)
    assert all_reduce_s(algorithm, p, 8 * n, free) == pytest.approx(8 * float(passed) / 25e9)
