"""The benchmark of data-parallel training, on two real ranks of a small net with known times."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from support.ranks.data_parallel import PARTING, ROUNDS, SETTING, SMALL_CAP, measured
from support.ranks.group import Ranks

from mucudnn.bench.results.writing import Row
from mucudnn.bench.suites.data_parallel import Communication
from mucudnn.bench.suites.scaling.steps import Convolutions

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
        assert [step.contestant for step in steps] == [Convolutions.TORCH, Convolutions.MUCUDNN] * (len(steps) // 2)
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
