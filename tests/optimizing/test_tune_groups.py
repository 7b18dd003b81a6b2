"""Norms of models that train: timed once as groups, run where these are faster, confirmed in steps, and reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import mucudnn
from mucudnn.core.config import Config
from mucudnn.core.problem import Operation
from mucudnn.core.records import Comparison, Configuration, MicroConfig
from mucudnn.core.team import Team
from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.measuring.timings import Timings
from mucudnn.optimizing import confirm as confirm_module
from mucudnn.optimizing import groups as groups_module
from mucudnn.optimizing.steps import ModelSteps, StepTimes
from mucudnn.running.choices import Choices
from mucudnn.running.modules import make_tunable
from mucudnn.running.norms import TunedNorm, make_groups
from mucudnn.running.problems import problem_of_call

pytestmark = pytest.mark.skipif(loaded_build().library is None, reason="nothing is compiled")

X = torch.randn(4, 3, 8, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.first, self.second, self.unused = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(self.conv(x)))
        return torch.relu_(self.second(y) + y)


def compared(speedup: float) -> Comparison:
    return Comparison.of([speedup] * 5, [1.0] * 5)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(database=tmp_path / "m.sqlite", algorithms="native", time_limit="10ms", confirm=False)


@pytest.fixture
def speedups() -> Iterator[dict[str, float]]:
    """Speedups of kinds of groups, in place of measured ones; 2 for others."""
    told: dict[str, float] = {}

    def tell(self: Timings, what: str, *_: object) -> dict[int, Comparison]:
        return {0: compared(told.get("addition" if "has_addition=True" in what else "no addition", 2.0))}

    with mock.patch.object(Timings, "compared", tell):
        yield told


def test_norms_in_training_run_as_groups_and_the_report_says_what_they_gain(
    config: Config, speedups: dict[str, float]
) -> None:
    net = mucudnn.optimize(Net(), X, config)
    report = mucudnn.report(net)
    assert {name: str(group.call) for name, group in report.groups} == {
        "first": "batch norm + ReLU",
        "second": "batch norm + addition + ReLU",
    }
    assert dict(report.ungrouped).keys() == {"unused"}
    assert "group batch norm + ReLU, 1 calls, forward and backward: PyTorch 2 s, mucudnn 1 s, speedup 2.00" in str(
        report
    )
    assert "first: group batch norm + ReLU, x (4, 8, 8, 8), 1 calls: PyTorch 2 s" in report.details()


def test_norms_that_are_not_faster_as_groups_are_torchs(config: Config, speedups: dict[str, float]) -> None:
    speedups["addition"] = 0.9
    net = mucudnn.optimize(Net(), X, config)
    assert net.first.choices is not None
    assert net.second.choices is None
    assert dict(mucudnn.report(net).ungrouped)["second"] == "nothing is faster"


def test_only_models_in_training_and_only_unless_config_says_no_get_groups(config: Config) -> None:
    for model, settings in ((Net().eval(), config), (Net(), replace(config, fuse=False))):
        mucudnn.optimize(model, X, settings)
        assert not any(isinstance(part, TunedNorm) for part in model.modules())
        assert not mucudnn.report(model).groups


def test_each_kind_is_timed_once_and_stored(config: Config) -> None:
    timed: list[str] = []
    steps = groups_module._steps

    def noted(call: groups_module.GroupCall) -> object:
        timed.append(str(call))
        by_torch, as_group = steps(call)
        return (lambda: timed.append("step") or by_torch()), as_group  # type: ignore[func-returns-value]

    with mock.patch.object(groups_module, "_steps", noted):
        mucudnn.optimize(nn.Sequential(Net(), nn.Conv2d(8, 3, 1), Net()), X, config)
        assert timed.count("batch norm + ReLU") == timed.count("batch norm + addition + ReLU") == 1
        assert "step" in timed
        timed.clear()
        mucudnn.optimize(Net(), X, config)
    assert "step" not in timed


@pytest.mark.parametrize("is_faster_kept", [False, True])
def test_groups_that_slow_the_step_keep_their_results_or_are_taken_out(
    config: Config, speedups: dict[str, float], is_faster_kept: bool
) -> None:
    def slow(self: ModelSteps, *, ours: bool, recorded: bool, groups: bool = True) -> StepTimes:
        choices = [norm.choices for norm in self.norms.values() if norm.choices is not None]
        is_kept = not any(of_norm.computes_again for of_norm in choices)
        step_s = 0.05 if is_faster_kept and is_kept else 0.2
        return StepTimes(step_s if ours and groups and choices else 0.1)

    def rounds(steps: ModelSteps, kinds: Sequence[object], *_: object) -> object:
        return [tuple(kind() for kind in kinds)] * 5  # type: ignore[operator]

    with (
        mock.patch.object(ModelSteps, "run", slow),
        mock.patch.object(confirm_module, "steps_in_turns", rounds),
        mock.patch.object(ModelSteps, "peak_bytes", lambda self, *, ours: 10 if ours else 20),
    ):
        net = mucudnn.optimize(Net(), X, replace(config, confirm=True))
    if is_faster_kept:
        assert not net.first.choices.computes_again
        return
    assert net.first.choices is net.second.choices is None
    report = mucudnn.report(net)
    assert report.confirmation is not None
    assert "norms as groups 0.50x ± 0.00, slower, so that norms are PyTorch's own; peak 20 B -> 10 B" in str(
        report.confirmation
    )
    assert dict(report.ungrouped)["first"] == "steps were slower, 0.50 ± 0.00"


@pytest.mark.parametrize("faster", [Operation.FORWARD, Operation.BACKWARD_FILTER])
def test_a_convolution_normalizes_in_the_operations_that_are_faster(config: Config, faster: Operation) -> None:
    model = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))
    x, convolution = torch.randn(3, 8, 6, 5), cast(Any, model[2])
    make_tunable(convolution)
    [norm] = make_groups(model, lambda module: module(x))
    problem = problem_of_call(x, convolution.weight, (1, 1), (0, 0), (1, 1), 1)
    assert problem is not None
    parts = Configuration((MicroConfig("pointwise", 3),), 1.0, 10**6)
    vars(convolution)["choices"] = Choices.of({problem.with_operation(one): {3: parts} for one in Operation})
    compared_texts = []

    def tell(self: Timings, what: str, baseline: Callable[[], object], runs: Any, *_: object) -> dict[int, Comparison]:
        compared_texts.append(what)
        torch.testing.assert_close(runs[0](), baseline())
        return {0: compared(2.0 if f"operation=<Operation.{faster.name}" in what else 0.5)}

    assert norm.choices is not None
    with mock.patch.object(Timings, "compared", tell):
        groups_module._let_normalize([norm.choices], config, Team(), lambda *_: None)
    assert len(set(compared_texts)) == 2
    assert convolution.normalizes == convolution.choices.normalizes == {faster}
    assert norm.choices.defers_activations is (faster is Operation.FORWARD)
