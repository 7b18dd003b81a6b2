"""Reports of models: what a screen shows, what is not tuned and why, all details, data frames and HTML."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from html import unescape
from typing import Any, cast

import pytest
import torch
from support.snapshots import assert_as_stored
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

import mucudnn
from mucudnn.core.answers import TunedProblem
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.core.records import Comparison, Configuration, MicroConfig
from mucudnn.core.tables import WIDTH
from mucudnn.optimizing.confirm import Confirmation, PutBack
from mucudnn.optimizing.report import Report
from mucudnn.running.choices import Choices

CHANNELS_LAST = MemoryFormat.CHANNELS_LAST
PROBLEM = ConvProblem(Operation.FORWARD, 3, 8, 8, 4, 3, 3)
TORCHS = Configuration((MicroConfig("native", 8),), 0.002, 0)
DIVIDED = Configuration((MicroConfig("winograd-4x4", 2),) * 4, 0.001, 2**20)
MIXED = Configuration(
    (MicroConfig("cudnn:67 k2=5", 3), MicroConfig("cudnn:67 k2=5", 3), MicroConfig("gemm", 2)), 1.0, 8
)


def tuned(
    configuration: Configuration, operation: Operation = Operation.FORWARD, baseline_s: float | None = 0.002
) -> TunedProblem:
    time_s = 0.002 if configuration.is_baseline else 0.001
    return TunedProblem(
        PROBLEM.with_operation(operation), 8, configuration, baseline_s, time_s, 1e-7, "it was <told> to"
    )


def make_tuned(module: nn.Module, *chosen: TunedProblem, device_type: str = "cpu") -> None:
    module.__class__ = mucudnn.Conv2d
    ours = cast(mucudnn.Conv2d, module)
    ours.tuned = chosen
    configurations: Mapping[ConvProblem, Any] = {one.problem: {8: one.configuration} for one in chosen}
    if not all(one.configuration.is_baseline for one in chosen):
        ours.choices = Choices.of(configurations, device_type)


class Special(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


class Own(_ConvNd):
    """A convolution that derives from none of torch's modules."""

    def __init__(self) -> None:
        super().__init__(2, 4, (3,), (1,), (0,), (1,), False, (0,), 1, True, "zeros")

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.conv1d(input, self.weight, self.bias)


class Net(nn.Module):
    """One module of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.spare = (nn.Conv2d(3, 4, 3) for _ in range(3))
        self.special, self.own = Special(3, 4, 3), Own()
        self.lazy, self.parametrized = nn.LazyConv2d(4, 3), nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3))


@pytest.fixture
def net() -> Net:
    model = Net()
    every = (Operation.FORWARD, Operation.BACKWARD_DATA, Operation.BACKWARD_FILTER)
    make_tuned(model.first, *(tuned(c, o) for c, o in zip((DIVIDED, TORCHS, MIXED), every, strict=True)))
    make_tuned(model.second, tuned(TORCHS))
    return model


def lines(model: nn.Module) -> list[str]:
    return str(mucudnn.report(model)).splitlines()


def everything_told(net: Net) -> Report:
    """Have the report say all that it can of choices, confirmations and busy machines."""
    smaller = TunedProblem(PROBLEM, 4, Configuration((MicroConfig("gemm", 4),), 1.0, 0), None, 0.001, 0.0, "few")
    net.second.tuned = (*net.second.tuned, replace(smaller, load=0.5))  # type: ignore[assignment, misc]
    step, convolutions = Comparison(0.613, 0.487, 0.03), Comparison(0.466, 0.289, 0.02)
    slower = PutBack("second", PROBLEM, 8, "slower in the step, 0.93 ± 0.02")
    found = Confirmation(step, step, convolutions, (slower,), kept=(replace(slower, module="first"),))
    net.first.confirmation, net.second.confirmation = found, replace(found, step=Comparison(2, 1, 0))  # type: ignore[assignment]
    report = mucudnn.report(net)
    assert report.confirmations == (net.first.confirmation, net.second.confirmation)
    assert report.confirmation == net.second.confirmation
    return report


def test_pytorchs_own_workspace_which_the_limit_does_not_hold_is_told_apart() -> None:
    for own_bytes, said in ((72 * 2**20, ", 72 MiB where PyTorch's own runs"), (0, "")):
        layers = [("a", tuned(DIVIDED)), ("b", tuned(replace(TORCHS, workspace_bytes=own_bytes)))]
        assert str(Report(tuple(layers))).splitlines()[-1].endswith(f"workspace at most 1 MiB a call{said}")


def test_what_a_report_says(net: Net) -> None:
    before = mucudnn.report(net)
    assert before.confirmation is None
    report = everything_told(net)
    assert max(map(len, str(report).splitlines())) <= WIDTH
    assert_as_stored("report", str(before), "----", str(report), "----", report.details())


@pytest.mark.parametrize(
    ("move", "reason"),
    [
        (lambda model: model.double(), "tuned for float32, and now float64"),
        (lambda model: model.to("meta"), "tuned for cpu, and now on meta"),
    ],
)
def test_what_was_moved_since_is_said(net: Net, move: Any, reason: str) -> None:
    del net.lazy
    assert ("first", reason) in mucudnn.report(move(net)).untuned


def test_many_layers_with_long_names_fit_the_screen() -> None:
    model = nn.ModuleDict({f"a_very_long_name_of_a_block_{i}" * 3: nn.Conv2d(3, 4, 3) for i in range(30)})
    chosen = Configuration((MicroConfig("winograd-4x4", 2),) * 4, 1.0, 8)
    for i, module in enumerate(model.values()):
        if i < 20:
            make_tuned(module, *(tuned(chosen, operation) for operation in Operation))
    assert max(map(len, lines(model))) <= WIDTH
    assert sum("winograd-4x4 2×4 2.00×" in line for line in lines(model)) == 20
    assert "_19  " in lines(model)[20]  # its end tells it apart
    assert "and 6 more: not reached by the sample input" in " ".join(" ".join(lines(model)).split())


def test_the_frame_has_a_row_for_each_operation(net: Net) -> None:
    frame = mucudnn.report(net).to_frame()
    assert list(frame["layer"]) == ["first"] * 3 + ["second"]
    assert list(frame["workspace_bytes"]) == [2**20, 0, 8, 0]
    assert list(frame["speedup"]) == [2.0, 1.0, 2.0, 1.0]
    assert set(frame["reason"]) == {"it was <told> to"}
    assert mucudnn.report(nn.Linear(2, 2)).to_frame().empty


def test_notebooks_get_the_same_table_escaped() -> None:
    model = nn.ModuleDict({"<script>": nn.Conv2d(3, 4, 3), "b & c": Special(3, 4, 3)})
    make_tuned(model["<script>"], tuned(DIVIDED))
    report = mucudnn.report(model)
    html = report._repr_html_()
    assert "<script>" not in html
    shown = re.sub("<[^>]*>", " ", html).split()
    assert Counter(unescape(" ".join(shown)).split()) == Counter(str(report).split())


def test_convolutions_of_other_classes_are_left_alone_and_told() -> None:
    model = nn.Sequential(Own())
    assert mucudnn.optimize(model, torch.zeros(1, 2, 4)) is model
    assert type(model[0]) is Own
    assert "PyTorch's own in 0: Own is not tuned, only Conv2d, Conv1d, Conv3d, ConvTranspose2d" in str(
        mucudnn.report(model)
    )
