"""A process group that exists, and buckets of DistributedDataParallel, on one rank alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from support.ranks.alone import group_of_one
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mucudnn.distributed import joined
from mucudnn.solver.all_reduce import DDP_CAP_BYTES, DDP_FIRST_CAP_BYTES, ddp_ends


@pytest.fixture
def one_rank() -> Iterator[None]:
    with group_of_one():
        yield


def test_a_group_that_is_there_is_used_and_left_alone(one_rank: None) -> None:
    with joined("cpu"):
        assert dist.is_initialized()
    assert dist.is_initialized()


# Buckets that DistributedDataParallel really makes, once it has seen a step.


WIDTHS = (200, 100, 300, 200, 150, 200, 4000)


@pytest.mark.parametrize("cap_mb", [None, 0.1, 0.25, 1, 100])
def test_they_are_those_of_the_model(cap_mb: float | None, one_rank: None) -> None:
    model = nn.Sequential(*(nn.Linear(n, k, bias=False) for n, k in pairwise(WIDTHS)))
    trained = DistributedDataParallel(model, bucket_cap_mb=cap_mb)  # type: ignore[arg-type]
    for _ in range(3):  # it tells them then
        trained(torch.ones(2, WIDTHS[0])).sum().backward()
    sizes = [4 * n * k for n, k in pairwise(WIDTHS)][::-1]  # as gradients become ready
    cap, first = (DDP_CAP_BYTES, DDP_FIRST_CAP_BYTES) if cap_mb is None else (int(cap_mb * 2**20), None)
    expected = [sum(sizes[i:j]) for i, j in pairwise([0, *ddp_ends(sizes, cap, first)])]
    made = str(trained._get_ddp_logging_data()["rebuilt_bucket_sizes"])
    assert [int(size) for size in made.split(",")] == expected
