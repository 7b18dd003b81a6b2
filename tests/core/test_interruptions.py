"""What a signal handler of the program raises ends any work of ours, as Ctrl-C does."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from support.clock.machine import FakeClock
from support.made_up_workshop import MadeUpWorkshop, enabled
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

import mucudnn
from mucudnn.core.errors import tolerated
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Configuration, MicroConfig
from mucudnn.measuring.clocks import StoppingRule
from mucudnn.measuring.proving.prover import Prover
from mucudnn.measuring.turns import Timer
from mucudnn.measuring.whole_runs import Machine
from mucudnn.tuning.training_step import trace_step


class EndedError(MemoryError, TimeoutError):
    """An error of types that are handled: a lack of memory, and ``OSError``."""


def end(*_: object) -> None:
    raise EndedError("out of memory")


class Handlers:
    def method(self, number: int, frame: FrameType | None) -> None:
        end()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        end()

    @staticmethod
    def resetting(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        end()


def interrupt(*_: object) -> Any:
    signal.raise_signal(signal.SIGUSR1)


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, end)
    yield
    signal.signal(signal.SIGUSR1, before)


HANDLERS = end, Handlers().method, Handlers(), Handlers.resetting, partial(end, "more"), lambda *_: end()


@pytest.mark.parametrize("handler_of_program", HANDLERS)
def test_handlers_of_every_kind_are_told_from_other_code(handler_of_program: Callable[..., None]) -> None:
    signal.signal(signal.SIGUSR1, handler_of_program)
    with pytest.raises(EndedError), tolerated(OSError):
        interrupt()
    with tolerated(OSError):  # without a signal
        end()


def test_a_cause_counts_and_what_was_handled_before_does_not() -> None:
    def fail() -> None:
        try:
            interrupt()
        except EndedError as error:
            raise RuntimeError("torch.export failed") from error

    with pytest.raises(EndedError), tolerated(RuntimeError):
        fail()
    try:
        interrupt()
    except EndedError:
        with tolerated(ValueError):
            int("another")


# Where errors of these types are handled


class Interrupting(nn.Module):
    """Interrupted in forward passes on fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, FakeTensor):
            interrupt()
        return self.conv(x)  # type: ignore[no-any-return]


def enable(patch: pytest.MonkeyPatch) -> None:
    with enabled(MadeUpWorkshop(while_tuning=interrupt)) as session:
        try:
            F.conv2d(torch.zeros(1, 3, 5, 5), torch.zeros(4, 3, 3, 3))
        finally:
            assert not session.is_deciding
            assert not session.failures


def capture(patch: pytest.MonkeyPatch) -> None:
    mucudnn.optimize(Interrupting().eval(), torch.zeros(1, 3, 5, 5), mucudnn.Config(fuse=True))


def trace(patch: pytest.MonkeyPatch) -> None:
    trace_step(Interrupting(), torch.zeros(1, 3, 5, 5))


def time(patch: pytest.MonkeyPatch) -> None:
    Timer(interrupt, FakeClock(), StoppingRule()).sample()


def compare(patch: pytest.MonkeyPatch) -> None:
    machine = replace(Machine.current("cpu"), run_torch=interrupt)
    problem = ConvProblem(Operation.FORWARD, c=1, h=3, w=3, k=1, r=1, s=1)
    native = Configuration((MicroConfig("native", 1),), 1.0, 0)
    machine.compare(problem, 1, [native], keeps_workspace=False)


def start(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Prover, "_begin", interrupt)
    Prover().start()


def wait(patch: pytest.MonkeyPatch) -> None:
    calls = iter((interrupt,))
    patch.setattr(Prover, "_begin", lambda _: next(calls)())
    Prover()._ask([])


@pytest.mark.parametrize("work", [enable, capture, trace, time, compare, start, wait])
def test_work_ends(work: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EndedError):
        work(monkeypatch)
