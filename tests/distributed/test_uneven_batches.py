"""Batches dealt out unevenly: all samples once, and gradients of the whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import train_unevenly
from support.ranks.group import Ranks
from torch.nn.functional import cross_entropy

from mucudnn.distributed import UnevenBatchSampler, gradient_weight
from mucudnn.words.errors import InvalidInputError

SHARES = st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(sum)


def samplers(samples: int, shares: list[int], **others: bool | int) -> list[UnevenBatchSampler]:
    return [UnevenBatchSampler(range(samples), shares, rank, **others) for rank in range(len(shares))]  # type: ignore[arg-type]


@given(shares=SHARES, samples=st.integers(0, 40), drop_last=st.booleans(), shuffle=st.booleans())
def test_every_sample_is_dealt_to_one_rank(shares: list[int], samples: int, drop_last: bool, shuffle: bool) -> None:
    dealt = samplers(samples, shares, drop_last=drop_last, shuffle=shuffle)
    batches = [list(sampler) for sampler in dealt]
    flat = [*chain.from_iterable(chain.from_iterable(batches))]
    wanted = samples - samples % sum(shares) if drop_last else samples
    assert len({*flat}) == len(flat) == wanted
    assert [len(sampler) for sampler in dealt] == [len(of) for of in batches]
    for share, of in zip(shares, batches, strict=True):
        assert all(len(batch) == share for batch in of[: samples // sum(shares)])
        assert all(0 < len(batch) <= share for batch in of)


@given(shares=SHARES, samples=st.integers(1, 40))
def test_every_rank_with_a_share_has_a_sample_of_the_last_batch_as_far_as_they_go(
    shares: list[int], samples: int
) -> None:
    left = samples % sum(shares) or sum(shares)
    counts = [len(list(sampler)[-1]) if list(sampler) else 0 for sampler in samplers(left, shares)]
    assert sum(count > 0 for count in counts) == min(left, sum(share > 0 for share in shares))
    if left >= len(shares):  # in proportion, but for whole samples and the one that each has
        wanted = [left * share / sum(shares) for share in shares]
        assert all(count < want + 1 or count == 1 for count, want in zip(counts, wanted, strict=True))


@given(shares=SHARES, samples=st.integers(1, 40))
def test_the_weights_of_a_batch_make_the_average_over_the_ranks_a_mean_over_the_batch(
    shares: list[int], samples: int
) -> None:
    dealt = samplers(samples, shares)
    for number in range(-(-samples // sum(shares))):
        weights = [sampler.weight(number) for sampler in dealt]
        assert sum(weights) / len(weights) == pytest.approx(1)


def test_an_epoch_has_the_same_order_on_all_ranks_and_the_next_another() -> None:
    first, second = samplers(8, [3, 1])
    epochs = []
    for epoch in (0, 1, 0):
        first.set_epoch(epoch)
        second.set_epoch(epoch)
        epochs.append([*chain.from_iterable(chain.from_iterable(zip(first, second, strict=True)))])
    assert sorted(epochs[0]) == [*range(8)]
    assert epochs[0] == epochs[2] != epochs[1]
    (whole,) = samplers(8, [4], seed=0)
    assert [*chain.from_iterable(whole)] == epochs[0]
    (other,) = samplers(8, [4], seed=7)
    assert [*other] != [*whole]


def test_gradients_of_simulated_ranks_average_to_that_of_the_whole_batch() -> None:
    data = train_unevenly.data()
    images, labels = data.tensors
    model = train_unevenly.small_model()

    def gradients(chosen: list[int], weight: float) -> list[torch.Tensor]:
        loss = cross_entropy(model(images[chosen]), labels[chosen]) * weight
        return [*torch.autograd.grad(loss, [*model.parameters()])]

    dealt = samplers(len(data), [4, 1, 2], shuffle=False)
    for number, whole in enumerate([[*range(7)], [7, 8]]):
        expected = gradients(whole, 1.0)
        each = [list(sampler) for sampler in dealt]
        parts = [
            gradients(batches[number], sampler.weight(number))
            for sampler, batches in zip(dealt, each, strict=True)
            if number < len(batches)
        ]
        for wanted, *given_ in zip(expected, *parts, strict=True):
            assert float((sum(given_) / len(dealt) - wanted).norm() / wanted.norm()) < 1e-14


def test_ranks_train_as_one_process_does_even_where_one_has_no_sample_of_the_last_batch(
    ranks: Mapping[int, Ranks],
) -> None:
    assert max(ranks[2].run(train_unevenly.difference)) < 1e-12


def test_weights_and_shares_that_cannot_be_are_refused() -> None:
    assert gradient_weight(0, 5, 3) == 0
    assert gradient_weight(5, 5, 1) == 1
    for numbers in ((1, 0, 1), (2, 1, 1), (-1, 1, 1), (1, 1, 0), (1.5, 2, 1)):
        with pytest.raises(InvalidInputError):
            gradient_weight(*numbers)  # type: ignore[arg-type]
    for shares, rank, words in (
        ((0, 0), 0, "at least one above 0"),
        ((), 0, "at least one above 0"),
        ((1, -1), 0, "one of shares"),
        ((1, 2), 2, "rank is 2"),
        ((1, 2), None, "no process group"),
    ):
        with pytest.raises(InvalidInputError, match=words):
            UnevenBatchSampler(range(4), shares, rank)
    with pytest.raises(InvalidInputError, match="number is 1"):
        UnevenBatchSampler(range(4), (2, 2), 0).weight(1)
