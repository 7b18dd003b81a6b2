"""Steps split into convolutions and the rest, and the ways in which mucudnn gets into a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.clock.machine import TickingClock
from support.training_steps import CONFIG, FLOAT32, measured_variants
from torch import Tensor, nn

import mucudnn
from mucudnn.bench.suites.shared.apart import Entrant
from mucudnn.bench.suites.shared.step_costs import StepSplitter
from mucudnn.bench.suites.training import TrainingOptions
from mucudnn.running import dispatcher


class Slow(nn.Module):
    """Lets time pass, and is no convolution."""

    def __init__(self, clock: TickingClock) -> None:
        super().__init__()
        self.clock = clock

    def __deepcopy__(self, memo: object) -> Slow:
        return self

    def forward(self, x: Tensor) -> Tensor:
        self.clock.seconds += 100
        return x


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> TickingClock:
    """The one clock of steps and of convolutions: each of these takes a second, and reading it as much."""
    ticking = TickingClock()
    monkeypatch.setattr("mucudnn.optimizing.steps.time.perf_counter", ticking.now)
    return ticking


def test_a_step_is_split_into_convolutions_and_the_rest(clock: TickingClock) -> None:
    """Two convolutions, each a second forward, and backward; the others' time is the rest, with that of reading."""
    network = nn.Sequential(nn.Conv2d(3, 4, 3), Slow(clock), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(64, 10))
    torchs, ours = measured_variants(network, TrainingOptions(CONFIG, rounds=3, clock=clock), **FLOAT32)
    assert (torchs.more["forward_convolutions_s"], torchs.more["backward_convolutions_s"]) == (2, 2)
    assert torchs.more["rest_s"] == 100 + 5  # after each convolution until the next, and around all of them
    assert set(torchs.samples_s) == {101}  # nothing but the step, and the clock is read once
    assert ours.more["forward_convolutions_s"] == 2


def test_a_step_that_cannot_be_split_is_told_and_its_time_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: StepSplitter, steps: int) -> None:
        raise mucudnn.UnavailableError("torch's convolution is replaced by another package")

    monkeypatch.setattr(StepSplitter, "sample", refuse)
    for row in measured_variants(**FLOAT32):
        assert (len(row.samples_s), row.failure) == (2, None)
        assert "rest_s" not in row.more
        assert row.more["not_split"] == "not split: torch's convolution is replaced by another package"


def test_steps_that_are_timed_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the clock around every convolution would slow them."""
    recording, timed = [False], []
    ask, time = Entrant.ask, TickingClock.time

    def marked(self: Entrant[Any], steps: int) -> Any:
        recording[0] = True
        parts = ask(self, steps)
        recording[0] = False
        return parts

    def watched(self: TickingClock, function: Callable[[], object], *given: int) -> float:
        if not recording[0]:
            timed.append(bool(dispatcher._wrappers))
        return time(self, function, *given)

    monkeypatch.setattr(Entrant, "ask", marked)
    monkeypatch.setattr(TickingClock, "time", watched)
    measured_variants(**FLOAT32)
    assert timed
    assert not any(timed)


# How mucudnn gets into a step
