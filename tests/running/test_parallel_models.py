"""Tuned convolutions in torch's data-parallel wrappers: replicas and wrapped models compute the same, tuned."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from support.problems.nets import two_convolutions
from torch import Tensor, nn
from torch.nn.parallel import DataParallel

import mucudnn
from mucudnn.running import operators
from mucudnn.tuning import choose as choosing
from mucudnn.words.config import Config

CONFIG = Config(algorithms=("gemm",), time_limit="500ms")


@pytest.fixture(autouse=True)
def whatever_fits_is_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "is_gain", lambda run: True)


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


def replica_of(model: nn.Sequential) -> nn.Module:
    """As ``replicate`` makes it: modules that share all but their parameters."""
    replica = nn.Sequential(*(module._replicate_for_data_parallel() for module in model))
    for module, original in zip(replica, model, strict=True):
        for name, parameter in original.named_parameters(recurse=False):
            module.register_parameter(name, parameter)
    return replica


@pytest.mark.parametrize(
    "make",
    [
        lambda model: replica_of(mucudnn.optimize(model, images(), CONFIG)),
        lambda model: pickle.loads(pickle.dumps(DataParallel(mucudnn.optimize(model, images(), CONFIG)))),
        lambda model: pickle.loads(pickle.dumps(mucudnn.optimize(DataParallel(model), images(), CONFIG))),
    ],
    ids=["replica", "optimized first", "wrapped first"],
)
def test_data_parallel(make: Callable[[nn.Module], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    torchs = two_convolutions(r=3)
    assert_tuned_and_right(make(copy.deepcopy(torchs)), torchs, monkeypatch)
