"""``FlopCounterMode`` counts an optimized model as it counts torch's."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from support.problems.nets import conv_net
from support.problems.tuned_by_hand import ran, tune_by_hand
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mucudnn.core.problem import Operation


def counted(model: nn.Module, x_shape: tuple[int, ...]) -> dict[str, int]:
    """Of a training step: what each module has of it, all operators together."""
    x = torch.randn(x_shape, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(model(x).square().sum())
    return {name: sum(by_operator.values()) for name, by_operator in counter.get_flop_counts().items()}


NETS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Conv2d(3, 8, 3, padding=1),
    "grouped and strided": lambda: nn.Conv2d(4, 8, (3, 2), stride=(2, 1), padding=1, dilation=(1, 2), groups=2),
    "depthwise": lambda: nn.Conv2d(6, 6, 5, groups=6),
    "same": lambda: nn.Conv2d(3, 8, 2, padding="same", padding_mode="reflect"),
    "network": conv_net,
    "transposed": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 2, 3, stride=2)),
}


@pytest.mark.parametrize("name", NETS)
def test_a_training_step_has_as_many_as_torchs(name: str) -> None:
    torchs = NETS[name]()
    ours = copy.deepcopy(torchs)
    x_shape = (2, next(m for m in ours.modules() if isinstance(m, nn.Conv2d)).in_channels, 11, 10)
    tune_by_hand(ours, torch.randn(x_shape))
    assert counted(ours, x_shape) == counted(torchs, x_shape)
    assert ran(ours) == set(Operation)
