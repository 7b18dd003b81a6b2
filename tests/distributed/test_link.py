"""The link between ranks: here of one rank alone, with a clock that ticks; of two in ``test_cli_scale``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from support.clock.ticking import TickingClock
from support.ranks.alone import group_of_one

from mucudnn.distributed.link import all_reduce_times_s, joined, launched_rank
from mucudnn.words.errors import UnavailableError


@pytest.fixture
def one_rank() -> Iterator[None]:
    with group_of_one():
        yield


def test_each_size_has_the_time_of_one_all_reduce(one_rank: None) -> None:
    assert all_reduce_times_s(TickingClock(), sizes=(4, 64), rounds=3) == {4: 1.0, 64: 1.0}


def test_a_group_that_is_there_is_used_and_left_alone(one_rank: None) -> None:
    with joined("cpu"):
        assert dist.is_initialized()
    assert dist.is_initialized()


def test_the_rank_is_the_one_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert launched_rank() == 3
    for rank in ("", "first"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(UnavailableError, match="start it with torchrun"):
            launched_rank()
