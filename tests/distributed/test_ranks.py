"""Work that is dealt over ranks, what ranks must have in common before they tune, and groups of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

import numpy
import pytest
import torch
import torch.distributed as dist
from support.ranks.group import group_of_one
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mucudnn.core.errors import SharingError
from mucudnn.distributed.ranks import Fingerprint, deal, joined, kinds, require_alike
from mucudnn.solver.all_reduce import DDP_CAP_BYTES, DDP_FIRST_CAP_BYTES, ddp_ends


def longest(costs: list[float], ranks_of: list[int], ranks: int) -> float:
    """When the last rank is done."""
    return max(sum(c for c, of in zip(costs, ranks_of, strict=True) if of == rank) for rank in range(ranks))


def test_no_rank_is_later_than_graham_allows() -> None:
    for seed, ranks in product(range(20), (1, 2, 3)):
        generator = numpy.random.default_rng(seed)
        costs = generator.pareto(1.0, size=int(generator.integers(1, 8))).tolist()
        best = min(longest(costs, [*dealt], ranks) for dealt in product(range(ranks), repeat=len(costs)))
        assert longest(costs, deal(costs, ranks), ranks) <= (4 / 3 - 1 / (3 * ranks)) * best * (1 + 1e-12), seed


def test_the_longest_goes_first_and_equal_loads_go_to_the_fewest_pieces() -> None:
    assert deal([1.0, 2.0, 3.0], 2) == [1, 1, 0]
    assert sorted(deal([0.0] * 6, 3)) == [0, 0, 1, 1, 2, 2]
    assert sorted(deal([1.0, 1.0], 5)) == [0, 1]
    assert deal([], 2) == []
    assert deal([0.1] * 10, 3) == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0], "whatever the rounding"


ONE = Fingerprint("cpu, a device", "host:file", {"torch": "2.13"}, {"threads": "2"}, ("conv1", "conv2"))
OTHER_KIND = replace(ONE, kind="cuda, another", in_kind={"threads": "1", "library": "cuDNN"}, convolutions=("conv1",))


def differences(fingerprints: list[Fingerprint]) -> list[str]:
    try:
        require_alike(fingerprints, "do this")
    except SharingError as error:
        return str(error).removeprefix("ranks that tune together must be alike: ").partition(". Start")[0].split("; ")
    return []


def test_kinds_need_the_same_in_themselves_and_settings_everywhere() -> None:
    assert differences([ONE, replace(ONE, place="elsewhere"), ONE]) == []
    require_alike([ONE], "")
    assert differences([ONE, OTHER_KIND, ONE]) == []
    assert kinds([ONE, OTHER_KIND, ONE]) == {ONE.kind: [0, 2], OTHER_KIND.kind: [1]}
    other = replace(OTHER_KIND, everywhere={"torch": "2.14"})
    assert differences([ONE, other]) == ["torch is 2.13 on rank 0, 2.14 on rank 1"]
    few_first = [ONE, ONE, replace(ONE, in_kind={"threads": "4"}), ONE]
    assert differences(few_first) == ["threads is 4 on rank 2, 2 on ranks 0, 1, 3"]


def test_every_difference_is_named() -> None:
    other = replace(ONE, everywhere={"torch": "2.14"}, in_kind={"threads": "4"})
    with pytest.raises(SharingError, match=r"torch is 2.13 on rank 0, 2.14 on rank 1; threads is .*; do this"):
        require_alike([ONE, other], "do this")


def test_convolutions_are_named_that_one_rank_has_alone() -> None:
    for convolutions, expected in (
        (("conv1", "conv3"), "the convolutions differ: 'conv2' on rank 0 only, 'conv3' on rank 2 only"),
        ((*ONE.convolutions, *"abcdefgh"), "the convolutions differ: 'a', 'b', 'c' and 5 more on rank 2 only"),
        (("conv2", "conv1"), "the convolutions come in another order on rank 2 than on rank 0"),
    ):
        assert differences([ONE, ONE, replace(ONE, convolutions=convolutions)]) == [expected]
    explained = replace(ONE, in_kind={"threads": "1"}, convolutions=())
    assert differences([ONE, explained]) == ["threads is 2 on rank 0, 1 on rank 1"]


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
