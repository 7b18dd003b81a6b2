"""Models within a memory budget on a GPU, by PyTorch's operators; also on the CPU, to find mistakes in the tests."""

from __future__ import annotations

import copy

import pytest
import torch
from support.cuda.either_device import captured, wait_for_all
from torch import Tensor, nn

import mucudnn
from mucudnn.bench.sources.networks.large_images import EDSR, DnCNN, SegmentingUNet
from mucudnn.core.config import Config
from mucudnn.core.errors import InfeasibleError
from mucudnn.graph.model import BandedModel
from mucudnn.kernels.memory import peak_allocated_bytes

pytestmark = pytest.mark.filterwarnings("default")  # what a driver or library warns of is no failure of a model
ALGORITHMS = ("implicit-gemm", "pointwise", "winograd-4x4")  # on the CPU; on a GPU all convolutions are torch's
MODELS = {
    "dncnn": (DnCNN(5, 24), (1, 1, 96, 80)),
    "edsr": (EDSR(2, 16), (2, 3, 40, 44)),
    "unet": (SegmentingUNet(), (1, 3, 32, 40)),
    "norms": (
        nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 8, 5, padding=4, dilation=2)
        ),
        (2, 3, 61, 47),
    ),
}


@pytest.fixture(autouse=True)
def no_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def banded(model: nn.Module, x: Tensor, budget: int | str) -> nn.Module:
    """In bands even where the model itself is faster."""
    config = Config(memory_budget=budget, confirm=False, algorithms=ALGORITHMS, time_limit="200ms")
    return mucudnn.optimize(model, x, config, progress=False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_the_smallest_budget_is_kept(name: str) -> None:
    """In the bytes that torch's allocator is asked for, and with the model's values; also in a CUDA graph."""
    device = "cuda"  # on the CPU: tests/graph/test_memory_budget.py
    model, shape = copy.deepcopy(MODELS[name][0]).to(device).eval(), MODELS[name][1]
    x = torch.randn(shape, device=device)
    expected = copy.deepcopy(model).double()(x.double()).detach()
    with pytest.raises(InfeasibleError) as caught:
        banded(model, x, 1000)
    budget = caught.value.smallest_feasible_bytes
    fitted = banded(model, x, budget)
    assert isinstance(fitted, BandedModel)
    found: list[Tensor] = []
    with torch.no_grad():
        fitted(x)
        mucudnn.release_workspaces()
        peak = peak_allocated_bytes(lambda: found.append(fitted(x)), device, in_blocks=False)
        assert torch.linalg.vector_norm(found[0] - expected) < 1e-5 * torch.linalg.vector_norm(expected)
        assert peak - found[0].nbytes <= budget
        y = torch.empty_like(found[0])

        def work() -> None:
            y.copy_(fitted(x))

        replay = captured(work, device)
        x.normal_()
        replay()
        wait_for_all(device)
        expected = copy.deepcopy(model).double()(x.double())
        assert torch.linalg.vector_norm(y - expected) < 1e-5 * torch.linalg.vector_norm(expected)
