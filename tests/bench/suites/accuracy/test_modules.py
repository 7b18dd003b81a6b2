"""Operator metrics of modules, against their definitions, and that each of them notices what it is for."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.command_line import fail, invoke
from torch import Tensor, nn

from mucudnn.bench.folders.reading import ResultFolder, read_folder
from mucudnn.bench.pages.measured import measured
from mucudnn.bench.pages.report import report_of
from mucudnn.bench.suites.accuracy.layers import MetricsOptions
from mucudnn.bench.suites.accuracy.metrics import ELEMENTS, PASSED, SUMS, gradcheck_elements
from mucudnn.bench.suites.accuracy.modules import WHOLE, benchmark_module, called_module
from mucudnn.measuring.timing.timer import WallClock
from mucudnn.measuring.whole_runs import Machine
from mucudnn.words.errors import InvalidInputError

FEW = MetricsOptions(rounds=2, runs=2)
MODEL = """
from torch import nn

def make():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 5))
"""


class Scaled(torch.autograd.Function):
    """Twice x, with a gradient that is wrong by a share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        ctx.share = share
        return 2 * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return 2 * (1 + ctx.share) * dy, None


class Own(nn.Module):
    def __init__(self, share: float = 0.0) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        return {"y": Scaled.apply(x, self.share) * scale, "which": x.argmax(1)}  # type: ignore[no-untyped-call]


class Around(nn.Module):
    """Calls what it has with a name, as models do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.unused = nn.Linear(6, 6), inner, nn.ReLU()

    def forward(self, x: Tensor) -> Any:
        return self.inner(self.first(x), scale=3.0)


def measure(path: Path, model: nn.Module, name: str, x: Tensor, choices: MetricsOptions = FEW) -> ResultFolder:
    machine = replace(Machine.current(), clock=WallClock())
    benchmark_module("a source", name, called_module(model, name, (x,)), choices, path, machine=machine)
    return read_folder(path)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


def test_a_linear_layer_has_the_errors_of_the_definition(tmp_path: Path) -> None:
    linear, x = nn.Linear(7, 5), torch.randn(3, 7)
    rows = measured(measure(tmp_path / "out", linear, WHOLE, x)).set_index("operation")
    assert list(rows.index) == ["forward", "backward_data", "backward_filter"]
    exact = x.double() @ linear.weight.detach().double().T + linear.bias.detach().double()
    error = (linear(x).detach().double() - exact).numpy()
    assert rows.loc["forward", "error_l1"] == pytest.approx(np.abs(error).sum())
    assert rows.loc["forward", "relative_error"] == pytest.approx(np.linalg.norm(error) / np.linalg.norm(exact))
    assert (rows["relative_error"] < 1e-6).all()
    assert (rows["distinct_results"] == 1).all()
    assert (rows["time_s"] > 0).all()
    backward = rows.loc[["backward_data", "backward_filter"]]
    assert set(backward["gradcheck"]) == {PASSED}
    assert (backward["gradient_error"] < 1e-5).all()


def test_a_wrong_gradient_is_told_and_a_module_without_parameters_has_two_operations(tmp_path: Path) -> None:
    x = torch.randn(3, 6)
    for share, name, operations in ((0.0, "inner", 2), (0.05, "inner", 2), (0.05, WHOLE, 3)):
        folder = measure(tmp_path / f"{name}{share}", Around(Own(share)), name, x)
        rows = measured(folder).set_index("operation")
        assert list(rows.index) == ["forward", "backward_data", "backward_filter"][:operations]
        assert (rows["gradcheck"].iloc[-1] == PASSED) is (share == 0)
        assert rows["gradient_error"].iloc[-1] == pytest.approx(share, abs=1e-4)


class Passing(nn.Module):
    """A convolution behind what is right forward, and off by a share backward."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share, self.first, self.last = share, nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.last(Scaled.apply(self.first(x), self.share)))  # type: ignore[no-untyped-call]


def test_gradcheck_finds_one_percent_in_a_module_of_many_elements_which_its_fast_mode_passes(tmp_path: Path) -> None:
    x = torch.randn(3, 16, 8, 8)
    texts = {}
    for share in (0.0, 0.01):
        rows = measured(measure(tmp_path / str(share), Passing(share), WHOLE, x)).set_index("operation")
        texts[share] = list(rows.loc[["backward_data", "backward_filter"], "gradcheck"])
    against = f"each against {SUMS} random sums of the {2 * 8 * 8 * 8} outputs"
    parameters = sum(parameter.numel() for parameter in Passing(0.0).parameters())
    assert texts[0.0] == [f"{PASSED}: {ELEMENTS} of {of} elements, drawn, {against}" for of in (2048, parameters)]
    assert all(text.startswith("failed: Jacobian mismatch") for text in texts[0.01])


@pytest.mark.parametrize("sizes", [(7, 5), (0, 64), (3, 1000, 0, 1), (1,) * 100])
def test_gradcheck_is_of_all_elements_of_few_and_draws_from_every_tensor_of_many(sizes: tuple[int, ...]) -> None:
    tensors = [torch.randn(size, dtype=torch.float64) for size in sizes]
    looked_at: set[tuple[int, int]] = set()

    def compute(given: Sequence[Tensor]) -> Tensor:
        for index, (one, before) in enumerate(zip(given, tensors, strict=True)):
            looked_at.update((index, int(place)) for place in (one != before).nonzero())
        return torch.cat([one.square() for one in given])

    assert gradcheck_elements(compute, tensors).startswith(PASSED)
    every = {(index, place) for index, size in enumerate(sizes) for place in range(size)}
    if len(every) <= ELEMENTS:
        assert looked_at == every
    else:
        assert looked_at < every
        filled = sum(size > 0 for size in sizes)
        assert len({index for index, _ in looked_at}) == min(filled, ELEMENTS)


def test_the_model_and_the_input_stay_as_they_are(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout()), torch.randn(3, 3, 6, 6)
    before, given = {name: value.clone() for name, value in model.state_dict().items()}, x.clone()
    folder = measure(tmp_path / "out", model, WHOLE, x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(x, given)
    assert not x.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    maps = dict(zip(folder.rows["operation"], folder.rows["error_map"], strict=True))
    assert np.shape(maps["forward"]) == (4, 4)
    assert np.shape(maps["backward_data"]) == (6, 6)
    assert report_of(folder).tables
    lines = (tmp_path / "out" / "rows.jsonl").read_bytes()
    measure(tmp_path / "out", model, WHOLE, x)
    assert (tmp_path / "out" / "rows.jsonl").read_bytes() == lines


def test_a_module_that_fails_in_backward_has_a_row_with_the_reason(tmp_path: Path) -> None:
    class Stuck(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 2).detach()

    rows = measured(measure(tmp_path / "out", Stuck(), WHOLE, torch.randn(2, 3))).set_index("operation")
    assert rows.loc["forward", "relative_error"] == 0
    assert "does not require grad" in rows.loc["backward_data", "failure"]


def test_modules_that_are_not_there_or_not_called() -> None:
    for name, expected in (
        ("iner", r"the model has no module 'iner'; did you mean inner\?"),
        ("unused", "unused is not called with a floating tensor"),
    ):
        with pytest.raises(InvalidInputError, match=expected):
            called_module(Around(Own()), name, (torch.randn(2, 6),))


def test_without_float64_nothing_is_compared(tmp_path: Path) -> None:
    class Single(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ torch.ones(3, 3)

    with pytest.raises(InvalidInputError, match="does not run in float64, which is the reference: RuntimeErr"):
        measure(tmp_path / "out", Single(), WHOLE, torch.randn(2, 3))
    assert not (tmp_path / "out").exists()


@pytest.fixture
def own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "some_modules.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    yield "some_modules.py:make"
    sys.modules.pop("some_modules", None)


def test_the_command_measures_a_module_of_a_model(own_model: str, tmp_path: Path) -> None:
    asked = ("bench", "metrics", own_model, "--input", "3x6x6", "--batch", "3", "--threads", "1", "--rounds", "1")
    result = invoke(*asked, "--module", "2", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    for expected in (
        "module",
        "backward_filter",
        "passed",
        "the gradients of all parameters",
        "in float64 on two samples",
    ):
        assert expected in result.output
    rows = read_folder(tmp_path / "out").rows
    assert set(rows["layer"]) == {"2"}
    assert set(rows["batch_size"]) == {3}
    assert "--module excludes --layer" in fail(*asked, "--module", "2", "--algorithms", "gemm")
