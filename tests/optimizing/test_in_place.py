"""Recorded convolutions: which, how often, of which module, nothing twice, nothing that stays. No time is judged."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mucudnn
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Configuration, MicroConfig
from mucudnn.optimizing.steps import InPlaceTimes, StepCall
from mucudnn.running import dispatcher, operators
from mucudnn.running.choices import Choices

FORWARD, DATA, FILTER = Operation
N = 2
FIRST = ConvProblem(FORWARD, 3, 8, 8, 4, 3, 3, padding=(1, 1))
SECOND = ConvProblem(FORWARD, 4, 8, 8, 4, 3, 3, padding=(1, 1))


class Twice(nn.Module):
    """Runs its second convolution two times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.second(self.first(x)).relu())  # type: ignore[no-any-return]


def tune(model: nn.Module, algorithm: str = "gemm", size: int = N) -> nn.Module:
    """Have the convolutions run one algorithm in every operation."""
    parts = (MicroConfig(algorithm, size),) * (N // size)
    every = [problem.with_operation(operation) for problem in (FIRST, SECOND) for operation in Operation]
    choices = Choices.of({problem: {N: Configuration(parts, 1.0, 0)} for problem in every})
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.__class__ = mucudnn.Conv2d
            module.choices = choices  # type: ignore[assignment]
    return model


def counted(model: nn.Module, step: object = None) -> dict[tuple[ConvProblem | None, int, str, bool], int]:
    """Step once: (problem, batch size, operations, whether in the backward pass) -> calls."""
    times = InPlaceTimes("cpu")
    with times.recording():
        model(torch.randn(N, 3, 8, 8)).sum().backward()
    return {key(place): spent.calls for place, spent in times.take().items()}


def key(place: StepCall) -> tuple[ConvProblem | None, int, str, bool]:
    return place.problem, place.batch_size, " ".join(place.operations), place.in_backward


def test_torchs_own_calls_are_counted_by_module_with_both_gradients_in_one() -> None:
    assert counted(Twice()) == {
        (FIRST, N, "forward", False): 1,
        (SECOND, N, "forward", False): 2,
        (SECOND, N, "backward_data backward_filter", True): 2,
        (FIRST, N, "backward_filter", True): 1,
    }


OURS = {
    (FIRST, N, "forward", False): 1,
    (SECOND, N, "forward", False): 2,
    (SECOND, N, "backward_data", True): 2,
    (SECOND, N, "backward_filter", True): 2,
    (FIRST, N, "backward_filter", True): 1,
}


@pytest.mark.parametrize(
    ("algorithm", "size"), [("gemm", N), ("implicit-gemm", N), ("native", 1), ("native-other-format", N)]
)
def test_our_calls_are_counted_once_though_they_may_call_torch(algorithm: str, size: int) -> None:
    assert counted(tune(Twice(), algorithm, size)) == OURS


def test_seconds_are_summed_and_are_those_of_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(readings)))
    for model in (Twice(), tune(Twice())):
        times = InPlaceTimes("cpu")
        with times.recording():
            model(torch.randn(N, 3, 8, 8)).sum().backward()
        spent = {key(place): one for place, one in times.take().items()}
        assert spent[SECOND, N, "forward", False].time_s == 2.0  # a second from one reading to the next
        assert not times.take()
    assert spent[SECOND, N, "backward_data", True].time_s == 2.0
    assert spent[SECOND, N, "backward_filter", True].time_s == 4.0  # with the gradient of the bias


def test_other_convolutions_are_recorded_as_well() -> None:
    model = nn.ModuleDict(
        {
            "row": nn.Conv1d(3, 4, 3, stride=2, padding=1),
            "up": nn.ConvTranspose2d(3, 4, 2, stride=2),
            "volume": nn.Conv3d(3, 4, 3),
        }
    )
    times = InPlaceTimes("cpu")
    with times.recording():
        model["row"](torch.randn(N, 3, 8)).sum().backward()
        model["up"](torch.randn(N, 3, 8, 8, requires_grad=True)).sum().backward()
        model["volume"](torch.randn(N, 3, 8, 8, 8))
        F.conv2d(torch.randn(N, 3, 8, 8), torch.randn(4, 3, 3, 3), padding=1)
    row = ConvProblem(FORWARD, 3, 1, 8, 4, 1, 3, stride=(1, 2), padding=(0, 1))
    up = ConvProblem(FORWARD, 4, 16, 16, 3, 2, 2, stride=(2, 2))  # the convolution of which it is the gradient
    assert {key(place) for place in times.take()} == {
        (row, N, "forward", False),
        (row, N, "backward_filter", True),
        (up, N, "backward_data", False),
        (up, N, "forward backward_filter", True),
        (ConvProblem(FORWARD, 3, 8, 8, 4, 3, 3, d=8, t=3), N, "forward", False),
        (FIRST, N, "forward", False),
    }


def test_what_is_recomputed_in_the_backward_pass_counts_there() -> None:
    model, times = Twice(), InPlaceTimes("cpu")
    with times.recording():
        x = torch.randn(N, 3, 8, 8, requires_grad=True)
        checkpoint(lambda x: model.second(model.first(x)), x, use_reentrant=False).sum().backward()
    calls = {key(place): spent.calls for place, spent in times.take().items()}
    assert calls[FIRST, N, "forward", False] == calls[FIRST, N, "forward", True] == 1


def test_results_are_those_without_recording_and_errors_leave_nothing_behind() -> None:
    model, x = tune(Twice()), torch.randn(N, 3, 8, 8)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    times = InPlaceTimes("cpu")
    with pytest.raises(RuntimeError, match="expected input"), times.recording():
        nn.Conv2d(3, 4, 3)(torch.randn(1, 2, 8, 8))
    assert not times.take()
    with times.recording():  # and it goes on
        found = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert times.take()
    assert operators.observer is None
    assert not dispatcher._wrappers
