"""Communication of PyTorch: after which steps all ranks have the same parameters. Four real ranks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import closing

import pytest
import torch
import torch.distributed as dist
from support.ranks.alone import group_of_one
from support.ranks.data_parallel import PERIOD, digests
from support.ranks.group import Ranks

from mucudnn.bench.suites.data_parallel import Communication
from mucudnn.bench.suites.data_parallel.wire import Wire, levels

Digests = Mapping[str, Sequence[Sequence[str]]]  # communication -> step -> rank
AVERAGING = [one for one in Communication if one.averages_parameters]


@pytest.fixture(scope="module")
def of_four() -> Digests:
    with closing(Ranks(4)) as ranks:
        return {communication: ranks.run(digests, communication)[0] for communication in AVERAGING}


def test_ranks_are_equal_where_equality_is_looked_for(of_four: Digests) -> None:
    """In the first steps gradients are averaged; then ranks part, until parameters are averaged."""
    for communication in AVERAGING:
        wire, different = Wire(communication, PERIOD), [len({*ranks}) > 1 for ranks in of_four[communication]]
        first = wire.first_steps
        assert not any(different[:first])
        assert different[first : first + wire.steps_to_equality] == [True] * (PERIOD - 1) + [False]


def test_groups_of_ranks_are_equal_in_between(of_four: Digests) -> None:
    middle = Wire(Communication.HIERARCHICAL_SGD, PERIOD).first_steps + PERIOD // 2 - 1
    first, second, third, fourth = of_four[Communication.HIERARCHICAL_SGD][middle]
    assert (first, third) == (second, fourth)
    assert first != third
    assert len({*of_four[Communication.POST_LOCAL_SGD][middle]}) == 4


def test_groups_are_hosts_or_the_smallest_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for period, ranks, on_host, expected in (
        (4, 2, None, {4: 2}),
        (4, 3, None, {4: 3}),
        (4, 4, None, {2: 2, 4: 4}),
        (8, 9, None, {4: 3, 8: 9}),
        (5, 4, None, {5: 4}),
        (4, 8, 4, {2: 4, 4: 8}),
        (4, 8, 8, {2: 2, 4: 8}),
        (4, 8, 1, {2: 2, 4: 8}),
    ):
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if on_host is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(on_host))
        assert levels(period, ranks) == OrderedDict(expected)


@pytest.mark.parametrize("communication", [Communication.FP16, Communication.POWERSGD])
def test_bytes_are_those_that_a_step_gives_to_collectives(
    communication: Communication, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small filter, which PowerSGD sends whole, a large one and biases."""
    given: list[int] = []

    def all_reduce(tensor: torch.Tensor, *args: object, **rest: object) -> object:
        given.append(tensor.numel() * tensor.itemsize)
        return reduce(tensor, *args, **rest)

    reduce, wire = dist.all_reduce, Wire(communication, PERIOD)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    with group_of_one():
        layers = torch.nn.Conv2d(1, 2, 1), torch.nn.Conv2d(2, 16, 5)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
        wire.connect(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(wire.first_steps + 1):
            given.clear()
            model(torch.randn(2, 1, 8, 8)).sum().backward()
        assert sum(given) == wire.bytes_of_step(model)
        del model
