"""``optimize`` with real algorithms, measured for a moment: memory, warnings, modules. No time is looked at."""

from __future__ import annotations

import copy
import os
import signal
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support.problems.tuned_by_hand import results
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import mucudnn
from mucudnn.core import errors
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import MicroConfig
from mucudnn.measuring.quiet import Quiet

KIB = 1024


def three_convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1))


def test_a_budget_is_divided_over_the_whole_model(database: Path) -> None:
    torchs = three_convolutions()
    x = torch.randn(2, 3, 12, 12)
    config = mucudnn.Config(workspace_budget=300 * KIB, time_limit="20ms", database=database)
    ours = mucudnn.optimize(copy.deepcopy(torchs), x, config)
    tuned = [tuned for _, tuned in mucudnn.report(ours).layers]
    assert len(tuned) == 8  # three operations of three layers, but dx of the first
    assert sum(one.configuration.workspace_bytes for one in tuned) <= 300 * KIB
    assert all(one.limit_bytes == one.configuration.workspace_bytes for one in tuned)
    with pytest.raises(mucudnn.InfeasibleError, match="2, forward 8x12x12 -> 8") as caught:
        mucudnn.optimize(model := copy.deepcopy(torchs), x, replace(config, workspace_budget=0, algorithms=("gemm",)))
    assert caught.value.smallest_feasible_bytes is not None
    assert type(model[0]) is nn.Conv2d  # type: ignore[index]
    for model in (torchs, ours):
        model(x).square().sum().backward()
    for a, b in zip(torchs.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_process_that_is_forked_afterwards_computes_with_threads(database: Path) -> None:
    torch.set_num_threads(2)
    model, x = nn.Conv2d(3, 16, 3), torch.randn(4, 3, 48, 48)
    before = threading.enumerate()
    mucudnn.optimize(model, x, mucudnn.Config(time_limit="20ms", database=database, operations="forward"))
    assert threading.enumerate() == before
    if not (child := os.fork()):
        signal.alarm(20)  # ends a process that hangs
        model(x)
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)


def test_warnings_that_are_errors_come_when_the_model_is_tuned(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = Quiet.end

    def doubting(quiet: Quiet) -> None:
        problem = ConvProblem(Operation.FORWARD, c=3, h=8, w=8, k=4, r=3, s=3)
        quiet.disturbed.add((problem, MicroConfig("native", 1)))
        end(quiet)

    monkeypatch.setattr(Quiet, "end", doubting)
    monkeypatch.setattr(errors, "_said", set())
    model = three_convolutions()
    with pytest.warns(RuntimeWarning, match="other programs were running") as caught:
        mucudnn.optimize(three_convolutions(), torch.zeros(1, 3, 8, 8), mucudnn.Config(time_limit="1ms"))
    assert caught[0].filename == __file__, "the line of the caller"
    monkeypatch.setattr(errors, "_said", set())
    # As errors in every environment: make test-pythons only shows warnings
    with warnings.catch_warnings(action="error"), pytest.raises(RuntimeWarning, match="other programs were running"):
        mucudnn.optimize(model, torch.randn(2, 3, 12, 12), mucudnn.Config(time_limit="20ms", database=database))
    assert len(mucudnn.report(model).layers) == 8


def test_a_sample_without_images_is_refused(database: Path) -> None:
    for options in ({}, {"fuse": True}, {"memory_budget": "1MiB"}):
        model = three_convolutions().eval()
        with pytest.raises(mucudnn.InvalidInputError, match="sample_input has 0 images"):
            mucudnn.optimize(model, torch.zeros(0, 3, 12, 12), mucudnn.Config(database=database, **options))
        assert type(cast(nn.Sequential, model)[0]) is nn.Conv2d


def test_buffers_of_parametrizations_are_not_disturbed(database: Path) -> None:
    model = spectral_norm(nn.Conv2d(3, 8, 3))
    before = {name: one.clone() for name, one in model.named_buffers()}
    assert before
    mucudnn.optimize(model, torch.randn(2, 3, 8, 8), mucudnn.Config(database=database, time_limit="10ms"))
    mucudnn.report(model).details()
    assert all(torch.equal(one, before[name]) for name, one in model.named_buffers())


def test_an_error_leaves_the_model_as_it_was(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(BaseException):
        pass

    def ended(model: nn.Module, x: Tensor, *rest: Any, **named: Any) -> None:
        assert isinstance(model[0], mucudnn.Conv2d)  # type: ignore[index]
        model(x)
        raise Ended

    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), torch.randn(2, 3, 8, 8)
    model.register_buffer("mask", torch.eye(2).to_sparse())
    before = {name: vars(module).copy() for name, module in model.named_modules()}
    state = copy.deepcopy(model[1].state_dict())
    config = mucudnn.Config(database=database, time_limit="10ms", confirm=False)
    mucudnn.optimize(copy.deepcopy(model), x, config)
    monkeypatch.setattr("mucudnn.optimizing.optimize.confirm_model", ended)
    with pytest.raises(Ended):
        mucudnn.optimize(model, x, config)
    assert type(model[0]) is nn.Conv2d
    assert {name: vars(module) for name, module in model.named_modules()} == before
    torch.testing.assert_close(model[1].state_dict(), state, rtol=0, atol=0)


# Modules beside nn.Conv2d

FORWARD, BACKWARD_DATA, BACKWARD_FILTER = Operation


class Scaled(nn.Conv2d):
    """Its forward is torch's."""


class Shifted(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.along = nn.Conv1d(3, 4, 5, padding=2)
        self.scaled, self.shifted = Scaled(4, 4, 3, padding=1), Shifted(4, 4, 1)
        self.normed = weight_norm(nn.Conv2d(4, 4, 1))
        self.up = nn.ConvTranspose2d(4, 4, 4, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        image = self.along(x).unflatten(2, (6, 6))
        return self.up(self.normed(self.shifted(self.scaled(image))))  # type: ignore[no-any-return]


def config(folder: Path, **options: Any) -> mucudnn.Config:
    return mucudnn.Config(time_limit="10ms", algorithms="gemm", database=folder / "m.sqlite", **options)


def operations_of(module: Any) -> list[Operation]:
    return [tuned.problem.operation for tuned in module.tuned]


def test_every_kind_is_tuned_swapped_and_reported(tmp_path: Path) -> None:
    torchs, x = Net(), torch.randn(2, 3, 36)
    ours = mucudnn.optimize(copy.deepcopy(torchs), x, config(tmp_path))
    assert type(ours.along) is mucudnn.Conv1d
    assert type(ours.up) is mucudnn.ConvTranspose2d
    assert isinstance(ours.scaled, Scaled)
    assert isinstance(ours.scaled, mucudnn.Conv2d)
    assert isinstance(ours.normed, mucudnn.Conv2d)
    assert isinstance(ours.shifted, Shifted)
    assert operations_of(ours.shifted) == list(Operation)
    assert operations_of(ours.along) == [FORWARD, BACKWARD_FILTER]  # nobody asks for the gradient of the input
    assert operations_of(ours.up) == [BACKWARD_DATA, FORWARD, BACKWARD_FILTER]  # of its y, dx and dw
    torch.testing.assert_close(results(ours, x), results(torchs, x), rtol=1e-3, atol=1e-4)
    report = mucudnn.report(ours)
    assert "shifted" in {name for name, _ in report.layers}
    assert report.transposed == ("up",)
    (row,) = [line for line in str(report).splitlines() if line.startswith("up, transposed")]
    assert "up: backward_data 4x12x12 -> 4, 4x4, stride 2x2" in report.details()
    assert len(row.split("  ")) >= 5


def test_a_generator_in_inference(tmp_path: Path) -> None:
    model = nn.Sequential(nn.ConvTranspose2d(8, 4, 4, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3)).eval()
    x = torch.randn(1, 8, 6, 6)
    ours = mucudnn.optimize(copy.deepcopy(model), x, config(tmp_path, operations=(Operation.FORWARD,)))
    with torch.inference_mode():
        torch.testing.assert_close(ours(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_cache_budget_without_a_graph_has_no_effect_and_it_is_said(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="cache_budget keeps filters in models that run as graphs"):
        mucudnn.optimize(nn.Conv2d(2, 2, 3).eval(), torch.randn(1, 2, 4, 4), config(tmp_path, cache_budget="1MiB"))
    with pytest.warns(UserWarning, match="cache_budget keeps filters in models that run as graphs"):
        mucudnn.tune([], 1, config(tmp_path, cache_budget="1MiB"))
    try:
        with pytest.warns(UserWarning, match="cache_budget keeps filters in models that run as graphs"):
            mucudnn.enable(config(tmp_path, cache_budget="1MiB"))
    finally:
        mucudnn.disable()
