"""``Config(batch_invariant=True)``: a sample has the same bits alone, in any batch and at every place in it."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mucudnn
from mucudnn.core.config import Config
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.kernels.registry import algorithm
from mucudnn.measuring.same_bits import has_same_bits
from mucudnn.running.modules import TunedModule
from mucudnn.running.norms import TunedNorm

MOST = 9


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {"database": tmp_path / "db.sqlite", "batch_invariant": True, "time_limit": "50ms"}


class Network(nn.Module):
    """A network with a convolution of each kind, a norm, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.GroupNorm(2, 8), nn.SiLU()),
            *(nn.ConvTranspose2d(8, 6, 2, stride=2), nn.Conv2d(6, 12, 1), nn.AdaptiveAvgPool2d(1)),
        )
        self.last = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.features(x)
        return {"features": features, "scores": self.last(features.flatten(1))}


def bits_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x)
    return list(y.values()) if isinstance(y, dict) else [y]


def assert_invariant(model: nn.Module, x: Tensor) -> None:
    """Compare batches of all sizes, at both ends of the samples, with the samples by themselves."""
    alone = [torch.cat(parts) for parts in zip(*(bits_of(model, x[i : i + 1]) for i in range(len(x))), strict=True)]
    for n in range(1, len(x) + 1):
        for first in {0, len(x) - n}:
            for value, expected in zip(bits_of(model, x[first : first + n]), alone, strict=True):
                assert torch.equal(value, expected[first : first + n]), (n, first)


@torch.no_grad()
def test_graphs(settings: dict[str, Any]) -> None:
    model, x = Network().eval(), torch.randn(MOST, 3, 12, 12)
    graph = mucudnn.optimize(model, x[:4], Config(fuse=True, **settings))
    for one in graph, copy.deepcopy(graph), pickle.loads(pickle.dumps(graph)):
        assert_invariant(one, x)
    for value, expected in zip(bits_of(graph, x), bits_of(model, x), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    assert "each sample has the same bits in any batch" in str(mucudnn.report(graph))


@torch.no_grad()
def test_graphs_within_a_memory_budget(settings: dict[str, Any]) -> None:
    x = torch.randn(MOST, 3, 12, 12)
    graph = mucudnn.optimize(Network().eval(), x[:4], Config(memory_budget="1MiB", **settings))
    assert_invariant(graph, x)


def test_modules_and_gradients(settings: dict[str, Any]) -> None:
    x = torch.randn(MOST, 3, 12, 12)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 12, 1)
    features = nn.Sequential(*layers, nn.ConvTranspose2d(12, 6, 2, stride=2)).eval()
    features = mucudnn.optimize(features, x[:4].clone().requires_grad_(), Config(**settings))
    with torch.no_grad():
        assert_invariant(features, x)

    def gradient(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        features(x).square().sum().backward()
        assert x.grad is not None
        return x.grad

    alone = torch.cat([gradient(x[i : i + 1]) for i in range(MOST)])
    for n in range(1, MOST + 1):
        assert torch.equal(gradient(x[:n]), alone[:n])
    tuned = [one for module in features.modules() if isinstance(module, TunedModule) for one in module.tuned]
    for one in tuned:
        is_sum = one.problem.operation is Operation.BACKWARD_FILTER
        assert (one.unrestricted_s is None) == is_sum
        assert is_sum or len(one.configuration.algorithms) == 1
    assert "each sample has the same bits in any batch, for" in " ".join(str(mucudnn.report(features)).split())


def test_norms_are_no_groups_since_their_sums_depend_on_the_batch(settings: dict[str, Any]) -> None:
    model, x = Network().features[:6], torch.randn(2, 3, 96, 96)
    model = mucudnn.optimize(model, x, Config(**settings))
    assert not any(isinstance(module, TunedNorm) for module in model.modules())


def test_what_depends_on_the_batch_is_told_apart() -> None:
    problem = ConvProblem(Operation.FORWARD, c=512, h=1, w=1, k=100, r=1, s=1, memory_format=MemoryFormat.CHANNELS_LAST)
    assert has_same_bits(algorithm("native"), problem, 3)

    class Uneven:
        """It adds the number of samples in the micro-batch to the first of them."""

        def __getattr__(self, name: str) -> Any:
            return getattr(algorithm("native"), name)

        def step(self, problem: Any, x: Tensor, w: Tensor, y: Tensor, *buffers: Any) -> None:
            algorithm("native").step(problem, x, w, y, *buffers)
            y[0] += len(y)

    assert not has_same_bits(Uneven(), problem, 3)  # type: ignore[arg-type]


def test_settings_that_exclude_it(settings: dict[str, Any]) -> None:
    assert Config(**settings).deterministic
    with pytest.raises(InvalidInputError, match="leave workspace_budget and workspace_limit='headroom' out"):
        Config(workspace_budget="1MiB", **settings)
    with pytest.raises(InvalidInputError, match="leave workspace_budget and workspace_limit='headroom' out"):
        Config(workspace_limit="headroom", **settings)
    with pytest.raises(InvalidInputError, match="batch_invariant and the memory budget of a training step exclude"):
        mucudnn.optimize(Network(), torch.randn(2, 3, 12, 12), Config(memory_budget="1MiB", **settings))
    with pytest.raises(InvalidInputError, match="batch_invariant is a setting of optimize"):
        mucudnn.enable(Config(**settings))
