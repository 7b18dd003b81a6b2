"""Tracing a training step leaves the model as it was, and does not depend on what it was left with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.problems.nets import conv_net
from torch import Tensor, nn

from mucudnn.tuning.training_step import trace_step, training_step


class DataDependent(nn.Module):
    """What it computes depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout())
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.count = self.count + 1
        y = self.body(x)
        return y * 2 if y.sum().item() > 0 else y


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("model", [conv_net(), DataDependent()], ids=["fake", "real"])
def test_leaves_no_trace(model: nn.Module, training: bool) -> None:
    x = torch.randn(4, 3, 12, 12, requires_grad=True)
    model.train(training)
    training_step(model, (x.detach(),))
    model.train(training)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters() if p.grad is not None}
    assert gradients
    random_state = torch.get_rng_state()
    trace_step(model, x)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    for name, parameter in model.named_parameters():
        gradient, before = gradients[name]
        assert parameter.grad is gradient
        assert torch.equal(gradient, before)
    assert x.grad is None
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(module.training is training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not isinstance(model(x), torch._subclasses.FakeTensor)


@pytest.mark.parametrize("model", [conv_net(), DataDependent()], ids=["fake", "real"])
def test_gradients_start_as_none(model: nn.Module) -> None:
    x = torch.randn(4, 3, 12, 12)
    random_state = torch.get_rng_state()
    fresh = trace_step(model, x)
    training_step(model, (x,))
    torch.set_rng_state(random_state)
    assert trace_step(model, x) == fresh


def test_parts_that_are_frozen_stay_so() -> None:
    model = conv_net()
    frozen = model[1].eval()
    running = frozen.running_mean.clone()
    training_step(model, (torch.randn(4, 3, 12, 12),))
    assert not frozen.training
    assert torch.equal(frozen.running_mean, running)
