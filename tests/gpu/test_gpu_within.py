"""Training within bytes on a GPU; also on the CPU, to find mistakes in the tests."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import cast

import pytest
import torch
from support.cuda.either_device import new_stream
from torch import Tensor, nn

import mucudnn
from mucudnn.core.config import Config
from mucudnn.optimizing.keeping import keep
from mucudnn.optimizing.trace import MeasuredStep
from mucudnn.running.keeping import KeepingModule
from mucudnn.tuning.model_state import OwnStep

pytestmark = pytest.mark.filterwarnings("default")  # what a driver or library warns of is no failure of a model


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def conv(c: int, k: int) -> nn.Conv2d:
    return nn.Conv2d(c, k, 3, padding=1)


def for_batches() -> tuple[nn.Module, tuple[int, ...]]:
    blocks = (Residual(conv(16, 16), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2), conv(16, 16)) for _ in range(3))
    return nn.Sequential(conv(3, 16), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)), (8, 3, 40, 40)


def for_one_image() -> tuple[nn.Module, tuple[int, ...]]:
    return nn.Sequential(conv(3, 32), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU(), conv(32, 8)), (1, 3, 128, 96)


def within(model: nn.Module, x: Tensor, budget_bytes: int) -> nn.Module:
    # PyTorch's convolutions alone: what is found fastest in each tuning would change the least budget.
    config = Config(memory_budget=budget_bytes, confirm=False, algorithms="native", policy="undivided")
    return mucudnn.optimize(copy.deepcopy(model), x, config, progress=False)


def peak_bytes(model: nn.Module, step: OwnStep, device: str) -> int:
    return max(MeasuredStep(model, step, device).peaks())


@pytest.mark.parametrize("made", [for_batches, for_one_image])
def test_steps_stay_within_the_least_budget_and_others(
    made: Callable[[], tuple[nn.Module, tuple[int, ...]]], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    model, shape = made()
    model, x = model.to(device), torch.randn(shape, device=device)
    step = OwnStep(x)
    step(model)  # libraries allocate what they keep
    all_bytes = peak_bytes(model, step, device)
    with pytest.raises(mucudnn.InfeasibleError) as refused:
        within(model, x, 1000)
    least_bytes = refused.value.smallest_feasible_bytes
    assert least_bytes is not None
    assert least_bytes < all_bytes
    for budget_bytes in (least_bytes, (least_bytes + all_bytes) // 2):
        kept = within(model, x, budget_bytes)
        assert peak_bytes(kept, step, device) <= budget_bytes
        gradients = []
        for is_kept in (True, False):
            if not is_kept:
                keep(cast(KeepingModule, kept), None)
            torch.manual_seed(1)  # for dropout
            with new_stream(device):
                kept.zero_grad()
                kept(x).square().sum().backward()
            gradients.append([parameter.grad for parameter in kept.parameters()])
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)
