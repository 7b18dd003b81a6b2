"""Uneven shares of batches: samples for each rank, and loss weights that yield the gradient of the whole batch.

DistributedDataParallel averages the ranks' gradients as if all had the same number of samples. So a rank whose loss is
the mean over its own samples must multiply it by its share of the batch times the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from mucudnn.words.errors import InvalidInputError
from mucudnn.words.values import flag, whole


def gradient_weight(samples: int, batch: int, ranks: int) -> float:
    """Return the factor for a rank's mean loss with which the ranks' average gradient is that of the whole batch.

    samples: samples of this rank, out of ``batch``. A rank without samples has the weight 0.

    Raises ``InvalidInputError`` for numbers that are not integers, or out of range.

    >>> gradient_weight(samples=6, batch=8, ranks=2)
    1.5
    """
    ranks, batch = whole(ranks, "ranks", 1), whole(batch, "batch", 1)
    return whole(samples, "samples", 0, batch) * ranks / batch


class UnevenBatchSampler(Sampler[list[int]]):
    """Sampler that divides every batch by the ranks' shares; use it as the ``batch_sampler`` of a ``DataLoader``.

    All ranks derive the same order from ``seed`` and the epoch, so that every sample is used exactly once. A smaller
    last batch is divided in proportion, with at least one sample for each rank with a share while samples last. A rank
    without a sample has one batch less: then use ``torch.distributed.algorithms.Join`` with DistributedDataParallel's
    default settings, or drop the last batch.

    data: the data set, or anything else with a length. shares: samples of each rank in a batch, as ``mucudnn share``
    prints them, at least one above 0. rank: the rank to sample for; None for this process's rank in the default process
    group. shuffle: whether each epoch has another order; call ``set_epoch`` before each epoch.

    Raises ``InvalidInputError`` for invalid shares, or if there is not one share per rank of the group.

    >>> sampler = UnevenBatchSampler(range(10), shares=(3, 1), rank=0, shuffle=False)
    >>> list(sampler), [sampler.weight(number) for number in range(3)]
    ([[0, 1, 2], [4, 5, 6], [8]], [1.5, 1.5, 1.0])
    """

    def __init__(
        self,
        data: Sized,
        shares: Sequence[int],
        rank: int | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.samples = len(data)
        self.shares = tuple(whole(share, "one of shares") for share in shares)
        self.rank = _rank(rank, self.shares)
        self.shuffle = flag(shuffle, "shuffle")
        self.seed = whole(seed, "seed")
        self.drop_last = flag(drop_last, "drop_last")
        self.epoch = 0

    @property
    def batch_size(self) -> int:
        """Number of samples of a whole batch, summed over all ranks."""
        return sum(self.shares)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch, which determines the order of samples; it must be the same on all ranks.

        Raises ``InvalidInputError`` for a negative number.
        """
        self.epoch = whole(epoch, "epoch")

    def weight(self, number: int) -> float:
        """Return the ``gradient_weight`` of this rank in batch ``number`` of the epoch, from 0 on.

        Raises ``InvalidInputError`` if the epoch has no such batch.
        """
        dealt = self._dealt(whole(number, "number", 0, self._batches - 1))
        return gradient_weight(dealt[self.rank], sum(dealt), len(dealt))

    def __len__(self) -> int:
        """Return the number of batches of this rank in an epoch."""
        if not self._batches:
            return 0
        last = self._dealt(self._batches - 1)[self.rank]
        return (self._batches - 1) * (self.shares[self.rank] > 0) + (last > 0)

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        for number in range(self._batches):
            dealt = self._dealt(number)
            first = number * self.batch_size + sum(dealt[: self.rank])
            if dealt[self.rank]:
                yield order[first : first + dealt[self.rank]]

    @property
    def _batches(self) -> int:
        """Number of batches in an epoch, including those without a sample for this rank."""
        whole_ones, left = divmod(self.samples, self.batch_size)
        return whole_ones + (left > 0 and not self.drop_last)

    def _order(self) -> list[int]:
        if not self.shuffle:
            return [*range(self.samples)]
        generator = torch.Generator().manual_seed((self.seed + self.epoch) % 2**63)
        return torch.randperm(self.samples, generator=generator).tolist()

    def _dealt(self, number: int) -> tuple[int, ...]:
        left = self.samples - number * self.batch_size
        return self.shares if left >= self.batch_size else _in_proportion(self.shares, left)


def _in_proportion(shares: Sequence[int], samples: int) -> tuple[int, ...]:
    """Divide a smaller batch in proportion to the ranks' shares; return the number of samples of each rank.

    Every rank with a share gets one sample while samples last; each further one goes to the rank most below its share.
    """
    batch = sum(shares)
    dealt = [0] * len(shares)
    for rank in sorted(range(len(shares)), key=lambda rank: -shares[rank])[:samples]:
        dealt[rank] = min(1, shares[rank])
    for _ in range(samples - sum(dealt)):
        lacking = [
            share * samples / batch - has if has < share else -batch for share, has in zip(shares, dealt, strict=True)
        ]
        dealt[lacking.index(max(lacking))] += 1
    return tuple(dealt)


def _rank(rank: int | None, shares: Sequence[int]) -> int:
    if not sum(shares):
        raise InvalidInputError(f"shares are {shares}; give the samples of each rank, at least one above 0")
    in_group = dist.is_available() and dist.is_initialized()
    if rank is not None:
        return whole(rank, "rank", 0, len(shares) - 1)
    if not in_group:
        raise InvalidInputError("there is no process group to take the rank from; give rank=")
    if dist.get_world_size() != len(shares):
        raise InvalidInputError(f"shares are {shares}, for {len(shares)} ranks; the group has {dist.get_world_size()}")
    return dist.get_rank()
