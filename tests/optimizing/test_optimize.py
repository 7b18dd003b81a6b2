"""``optimize`` with real algorithms, measured for a moment: what it promises about memory. No time is looked at."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import mucudnn
from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.measuring.quiet import Quiet
from mucudnn.words import warning
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.results import MicroConfig

KIB = 1024


def three_convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1))


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "measurements.sqlite"


def test_a_budget_is_divided_over_the_whole_model(database: Path) -> None:
    torchs = three_convolutions()
    x = torch.randn(2, 3, 12, 12)
    config = mucudnn.Config(workspace_budget=300 * KIB, time_limit="20ms", database=database)
    ours = mucudnn.optimize(copy.deepcopy(torchs), x, config)
    tuned = [tuned for _, tuned in mucudnn.report(ours).layers]
    assert len(tuned) == 8  # three operations of three layers, but dx of the first
    assert sum(one.configuration.workspace_bytes for one in tuned) <= 300 * KIB
    assert all(one.limit_bytes == one.configuration.workspace_bytes for one in tuned)
    for model in (torchs, ours):
        model(x).square().sum().backward()
    for a, b in zip(torchs.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-4)


def test_too_small_a_budget_names_the_layers_and_leaves_the_model(database: Path) -> None:
    model = three_convolutions()
    config = mucudnn.Config(workspace_budget=0, algorithms=("gemm",), time_limit="20ms", database=database)
    with pytest.raises(mucudnn.InfeasibleError, match="2, forward 8x12x12 -> 8") as caught:
        mucudnn.optimize(model, torch.randn(2, 3, 12, 12), config)
    assert caught.value.smallest_feasible_bytes is not None
    assert type(model[0]) is nn.Conv2d


def test_warnings_that_are_errors_come_when_the_model_is_tuned(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = Quiet.end

    def doubting(quiet: Quiet) -> None:
        problem = ConvProblem(Operation.FORWARD, c=3, h=8, w=8, k=4, r=3, s=3)
        quiet._doubtful.add((problem, MicroConfig("native", 1)))
        end(quiet)

    monkeypatch.setattr(Quiet, "end", doubting)
    monkeypatch.setattr(warning, "_said", set())
    model = three_convolutions()
    with pytest.raises(RuntimeWarning, match="the machine was busy or slow"):
        mucudnn.optimize(model, torch.randn(2, 3, 12, 12), mucudnn.Config(time_limit="20ms", database=database))
    assert len(mucudnn.report(model).layers) == 8


def test_what_is_no_tensor_gets_torchs_error(database: Path) -> None:
    for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d):
        for given in ({"image": torch.zeros(1, 3, 8, 8)}, [1.0], None):
            with pytest.raises(Exception) as of_torch:  # noqa: PT011 (whatever torch raises)
                kind(3, 4, 3)(given)
            with pytest.raises(type(of_torch.value)) as raised:
                mucudnn.optimize(kind(3, 4, 3), given, mucudnn.Config(database=database))
            assert str(raised.value).splitlines()[0] == str(of_torch.value).splitlines()[0]


@pytest.mark.skipif(loaded_build().library is None, reason="nothing compiled: no filter is kept")
def test_filters_are_kept_within_the_cache_budget_and_reported(database: Path) -> None:
    x = torch.randn(1, 3, 12, 12)
    config = mucudnn.Config(cache_budget="1MiB", operations=(Operation.FORWARD,), time_limit="20ms", database=database)
    torchs = three_convolutions().eval()
    ours = mucudnn.optimize(copy.deepcopy(torchs), x, config)
    kept = mucudnn.report(ours).kept
    assert sum(one.prepared_bytes for _, one in kept) <= 1024 * KIB
    assert all(str(one) in mucudnn.report(ours).details() for _, one in kept)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(ours(x), torchs(x), rtol=1e-4, atol=1e-4)
            for model in (torchs, ours):
                model[0].weight.data.mul_(1.5)
