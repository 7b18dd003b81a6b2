"""``Config(deterministic=True)``: engines, and torch's own convolution while it is measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from support.clock.machine import FORWARD, FakeAlgorithm, FakeClock, fake_machine, linear, made_ready
from support.command_line import fail
from support.cudnn.backend import RANDOM, FakeBackend

from mucudnn.core.config import Config
from mucudnn.core.errors import UnavailableError
from mucudnn.core.problem import ConvProblem
from mucudnn.core.records import Environment
from mucudnn.core.torch_settings import TorchSettings
from mucudnn.kernels.cudnn.algorithms import CudnnEngines
from mucudnn.measuring.operands import Operands
from mucudnn.measuring.whole_runs import Machine
from mucudnn.tuning.tuner import tune


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    yield
    torch.backends.cudnn.deterministic = False


class Watched:
    """A machine that notes torch's setting whenever it is asked for itself, or torch's own convolution is run."""

    def __init__(self) -> None:
        self.seen: list[bool] = []
        self.clock = clock = FakeClock()
        self.machine = fake_machine(clock, [FakeAlgorithm(name, clock, linear(1.0)) for name in ("native", "other")])
        ours = made_ready(lambda *_, **__: clock.advance(20.0))
        self.machine = replace(self.machine, whole_run=ours, run_torch=self._run_torch)

    def _run_torch(self, problem: ConvProblem, operands: Operands) -> None:
        self.clock.advance(10.0)
        self._note()

    def current(self, *_: object) -> Machine:
        self._note()
        return self.machine

    def _note(self) -> None:
        self.seen.append(TorchSettings.current().deterministic)


@pytest.mark.parametrize("asked", [False, True])
def test_torchs_own_is_measured_and_named_as_the_config_asks(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()
    monkeypatch.setattr(Machine, "current", watched.current)
    tune([FORWARD], 2, Config(deterministic=asked))
    assert len(watched.seen) > 1
    assert set(watched.seen) == {asked}
    assert not torch.backends.cudnn.deterministic


@pytest.mark.parametrize("set_in_torch", [False, True])
def test_engines_that_are_not_deterministic_are_barred_however_that_is_asked_for(set_in_torch: bool) -> None:
    torch.backends.cudnn.deterministic = set_in_torch
    watched = Watched()
    backend = FakeBackend(started=lambda plan: watched.clock.advance(1.0))
    machine = replace(watched.machine, sources=[CudnnEngines(backend)])
    tuning = tune([FORWARD], 2, Config(deterministic=not set_in_torch), machine=machine)
    algorithms = {m.micro_config.algorithm for m in tuning.problems[0].measurements}
    assert "cudnn:7" in algorithms
    assert RANDOM.name not in algorithms
    assert RANDOM not in {plan.config for plan in backend.executed}


def test_the_command_shows_the_environment_that_was_measured_in(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def now(device: str) -> Environment:
        seen.append(str(TorchSettings.current()))
        raise UnavailableError("enough")

    monkeypatch.setattr("mucudnn.running.devices.current_environment", now)
    for setting in ("1", "0"):
        monkeypatch.setenv("MUCUDNN_DETERMINISTIC", setting)
        assert "enough" in fail("scale", "alexnet")
    assert seen == ["tf32 deterministic", "tf32"]
