"""Tuned convolutions in torch's data-parallel wrappers: replicas and wrapped models compute the same, tuned."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
from support.problems.nets import two_convolutions
from support.ranks.alone import group_of_one
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

import mucudnn
from mucudnn.running import operators
from mucudnn.tuning import choose as choosing
from mucudnn.words.config import Config

CONFIG = Config(algorithms=("gemm",), time_limit="500ms")


@pytest.fixture(autouse=True)
def whatever_fits_is_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "is_gain", lambda run: True)


@pytest.fixture
def process_group() -> Iterator[None]:
    with group_of_one():
        yield


def images() -> Tensor:
    return torch.randn(2, 3, 8, 8)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """y, and the gradients of all parameters."""
    model.zero_grad(set_to_none=True)
    y: Tensor = model(x)
    y.square().sum().backward()
    return [y, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def assert_tuned_and_right(model: nn.Module, torchs: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    x, runs = images(), []
    lookup = operators.executable_of
    monkeypatch.setattr(operators, "executable_of", lambda *given: runs.append(lookup(*given)) or runs[-1])
    for ours, reference in zip(gradients(model, x), gradients(torchs, x), strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-4)
    assert len(runs) == 5  # three operations of two layers, but dx of the first
    assert None not in runs


def test_replicas_are_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``replicate`` makes them: modules that share all but their parameters."""
    torchs = two_convolutions(r=3)
    ours = mucudnn.optimize(copy.deepcopy(torchs), images(), CONFIG)
    replica = nn.Sequential(*(module._replicate_for_data_parallel() for module in ours))
    for module, original in zip(replica, ours, strict=True):
        for name, parameter in original.named_parameters(recurse=False):
            module.register_parameter(name, parameter)
    assert_tuned_and_right(replica, torchs, monkeypatch)


@pytest.mark.parametrize("optimized_first", [True, False])
def test_data_parallel(optimized_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torchs = two_convolutions(r=3)
    ours: nn.Module = copy.deepcopy(torchs)
    if optimized_first:
        ours = DataParallel(mucudnn.optimize(ours, images(), CONFIG))
    else:
        ours = mucudnn.optimize(DataParallel(ours), images(), CONFIG)
    assert_tuned_and_right(pickle.loads(pickle.dumps(ours)), torchs, monkeypatch)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("limit", ["64MiB", "headroom"])
@pytest.mark.parametrize("optimized_first", [True, False])
def test_distributed_data_parallel(optimized_first: bool, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(workspace_limit=limit, algorithms=("gemm",), time_limit="500ms")
    torchs = two_convolutions(r=3)
    ours: nn.Module = copy.deepcopy(torchs)
    if optimized_first:
        ours = DistributedDataParallel(mucudnn.optimize(ours, images(), config))
    else:
        ours = mucudnn.optimize(DistributedDataParallel(ours), images(), config)
    if limit == "64MiB":
        assert_tuned_and_right(ours, torchs, monkeypatch)
    x = images()
    for _ in range(2):
        for mine, reference in zip(gradients(ours, x), gradients(torchs, x), strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-4)
    assert {module.choices is None for module in ours.modules() if isinstance(module, mucudnn.Conv2d)} == {False}
