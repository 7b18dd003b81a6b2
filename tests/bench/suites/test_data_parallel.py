"""The benchmark of data-parallel training, on two real ranks of a small net with known times."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.clock.machine import Slow, TickingClock
from support.ranks.group import Ranks, group_of_one
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mucudnn.bench.results.variants import Communication, Variant
from mucudnn.bench.results.writing import Row
from mucudnn.bench.sources.trainee import mean_square
from mucudnn.bench.suites import data_parallel
from mucudnn.bench.suites.data_parallel import RanksSetting, Wire, compare_ranks, digest, levels
from mucudnn.core.config import Config
from mucudnn.core.problem import MemoryFormat
from mucudnn.distributed.ranks import gathered
from mucudnn.measuring import whole_runs

SETTING = RanksSetting("tiny", 2, 2, "cpu", "float32", MemoryFormat.CONTIGUOUS, Communication.ALLREDUCE, 2)
SMALL_CAP = 1e-6  # a byte
ROUNDS = 2
PARTING = "parting"  # steps of ranks that do not stay equal


def parting(model: nn.Module) -> bool:
    """Change a parameter of rank 1 a little, and compare."""
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(model.parameters()).view(-1)[0] += 1e-6
    return compare_ranks(model)


def net(clock: TickingClock) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), Slow(clock)),
        *(nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 10)),
    )


def measured(rank: int, database: Path) -> dict[str, list[Row]]:
    """Steps of a small net by each communication, with known times: a message takes ten seconds where fp16 is sent."""
    clock = TickingClock()
    send = data_parallel.fp16_compress_hook

    def fp16_compress_hook(state, bucket):  # type: ignore[no-untyped-def]  # torch would look at annotations
        clock.seconds += 10
        return send(state, bucket)

    sent = (one for one in Communication if one is not Communication.BF16)
    with patch.object(whole_runs, "prover", lambda: None):  # each rank would start one
        with patch.object(data_parallel, "fp16_compress_hook", fp16_compress_hook):
            found = {communication.value: steps(communication, clock, database) for communication in sent}
        with patch.object(data_parallel, "compare_ranks", parting):
            return {**found, PARTING: steps(Communication.ALLREDUCE, clock, database)}


def steps(communication: Communication, clock: TickingClock, database: Path) -> list[Row]:
    torch.manual_seed(0)
    return data_parallel.measure_data_parallel(
        replace(
            SETTING,
            communication=communication,
            bucket_caps=(None, SMALL_CAP) if communication is Communication.FP16 else (None,),
        ),
        net(clock),
        (3, 8, 8),
        mean_square,
        Config(algorithms=("gemm",), time_limit="10ms", operations=("forward",), database=database, confirm=False),
        rounds=ROUNDS,
        clock=clock,
    )


# Ranks that train together by each communication.


PERIOD = 4
STEPS = 2 * PERIOD + 1


def digests(rank: int, communication: Communication) -> list[list[str]]:
    """Train on data of this rank; return the digests of all ranks after each step."""
    torch.manual_seed(rank)  # parameters too: torch sends those of rank 0 to all
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)))
    x = torch.randn(8, 16)
    optimizer = Wire(communication, PERIOD).connect(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        found.append(gathered(digest(model)))
    return found


SLOWEST_S = 200 + 1  # of a step of rank 1, and for the clock to be read
GRADIENTS = 4 * (4 * 3 * 9 + 4 + 4 + 4 + 4 * 4 * 9 + 4 + 160 + 10)  # bytes of all of them
BUCKETS = 8  # with the smallest cap: a bucket for each parameter

Found = Mapping[str, list[Row]]


@pytest.fixture(scope="module")
def found(ranks: Mapping[int, Ranks], tmp_path_factory: pytest.TempPathFactory) -> Found:
    steps: Found = ranks[SETTING.ranks].run(measured, tmp_path_factory.mktemp("steps") / "measurements.sqlite")[0]
    return steps


def equality(step: Row) -> tuple[int, int]:
    """Return how often ranks were compared, and how often they were equal."""
    return step.more["compared"], step.more["equal"]


def test_every_communication_is_measured_and_ranks_are_compared_after_each_sample(found: Found) -> None:
    """And once after the first steps. Ranks that part by a millionth of one parameter are never equal."""
    assert [*found] == [*(one for one in Communication if one is not Communication.BF16), PARTING]
    for name, steps in found.items():
        assert [step.contestant for step in steps] == [Variant.TORCH, Variant.MUCUDNN] * (len(steps) // 2)
        assert {equality(step) for step in steps} == {(ROUNDS + 1, 0 if name == PARTING else ROUNDS + 1)}


def test_a_step_takes_as_long_as_on_the_slowest_rank(found: Found) -> None:
    """A sample of several steps counts as one."""
    for communication in (Communication.ALLREDUCE, Communication.POWERSGD):
        for step in found[communication]:
            assert {*step.samples_s, step.more["alone_s"]} == {SLOWEST_S}
    for step in found[Communication.POST_LOCAL_SGD]:
        assert step.samples_s == pytest.approx([SLOWEST_S - 1 + 1 / SETTING.period] * ROUNDS)


def test_buckets_have_all_gradients_and_communication_is_what_they_add_to_a_step(found: Found) -> None:
    """Ten seconds for each message."""
    for step in found[Communication.FP16]:
        assert step.more["alone_s"] == SLOWEST_S
        assert step.more["exposed_s"] == 10 * len(step.more["bucket_bytes"])
        assert sum(step.more["bucket_bytes"]) == GRADIENTS
        assert step.subject["bucket_cap_mb"] in (None, SMALL_CAP)
    assert [len(step.more["bucket_bytes"]) for step in found[Communication.FP16]] == [1, 1, BUCKETS, BUCKETS]


def test_steps_are_split(found: Found) -> None:
    """The real clock times convolutions, which take less than the seconds of the other clock."""
    for step in (step for steps in found.values() for step in steps):
        forward_s, backward_s = step.more["forward_convolutions_s"], step.more["backward_convolutions_s"]
        assert 0 < forward_s < 1
        assert 0 < backward_s < 1
        assert forward_s + backward_s + step.more["rest_s"] == pytest.approx(SLOWEST_S)


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
