"""Runs of a model leave it as it was, and a trace does not depend on what it was left with."""

from __future__ import annotations

import random
from collections import deque
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.problems.nets import conv_net
from support.problems.tuned_by_hand import tune_by_hand
from torch import Tensor, nn

from mucudnn.tuning.model_state import reachable, undisturbed
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


class Cache:
    __slots__ = ("last", "table")

    def __init__(self) -> None:
        self.table = {"values": [torch.zeros(2)]}


class FilledCache(Cache):
    __slots__ = ()


class Keeps(nn.Module):
    """Assigns all kinds of state in a call."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.plain, self.calls = nn.Conv2d(3, 4, 3), torch.zeros(2), 0
        self.array, self.queue, self.names = np.zeros(2), deque([1], maxlen=1), {"a"}
        self.cache, self.space, self.generator = Cache(), SimpleNamespace(last=None), torch.Generator()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("sparse", torch.eye(2).to_sparse())
        self.register_buffer("mkldnn", torch.zeros(2).to_mkldnn())
        self.register_buffer("nested", torch.nested.nested_tensor([torch.zeros(2), torch.zeros(1)]))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        self.last = self.cache.last = self.space.last = self.cache.table["last"] = y  # type: ignore[attr-defined]
        self.cache.table["values"].append(y)
        self.cache.__class__ = FilledCache
        del self.calls
        self.queue.append(2)
        self.names.add("b")
        self.array += 1
        self.plain += torch.rand(1, generator=self.generator) + torch.rand(1) + random.random() + np.random.rand()
        self.mean, self.sparse = self.mean + 1, self.sparse.mul_(2)
        self.mkldnn.copy_(torch.ones(2).to_mkldnn())
        self.nested.mul_(2).add_(1)
        self.conv.weight.data = self.conv.weight * 2
        self.conv.bias.mul_(2).requires_grad_(False)  # type: ignore[union-attr]
        self.conv.register_forward_hook(lambda *of: None)
        self.added, self.training = nn.Linear(2, 2), False
        return y


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return all to which a model refers, with values and memory."""
    parts = {name: part for name, part in reachable(model) if not isinstance(part, (tuple, torch.Generator))}
    numbers: dict[str, Any] = {
        name: (part.to_dense() if part.layout is not torch.strided else part).tolist()
        for name, part in parts.items()
        if isinstance(part, Tensor) and not part.is_nested
    }
    numbers["nested"] = [part.tolist() for part in model.nested.unbind()]  # type: ignore[operator, union-attr]
    memory = [part.data_ptr() for part in (*model.parameters(), model.mean)]  # type: ignore[operator]
    kept = {name: repr(part) for name, part in parts.items() if not isinstance(part, (Tensor, nn.Module))}
    random_states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index, union-attr]
    flags = [(part.requires_grad, part.grad) for part in model.parameters()]
    generator = model.generator.get_state().tolist()  # type: ignore[operator, union-attr]
    return {**numbers, **kept, "other": (memory, random_states, flags, generator)}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_all_that_a_call_assigns_is_put_back(error: type[BaseException] | None) -> None:
    model = Keeps()
    before = state_of(model)
    with suppress(RuntimeError, KeyboardInterrupt), undisturbed(model):
        model(torch.zeros(1, 3, 4, 4))
        changed = state_of(model)
        assert len([name for name, value in before.items() if changed.get(name) != value]) > 15
        if error is not None:
            raise error
    after = state_of(model)
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert after[name] == value, name


def test_modules_that_are_tuned_stay_so_unless_an_error_is_raised() -> None:
    class Ended(BaseException):
        pass

    for error in (None, Ended):
        model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.Conv2d(4, 4, 3))), torch.zeros(2, 3, 8, 8)
        with suppress(Ended), undisturbed(model):
            tune_by_hand(model, x)
            if error is not None:
                raise error
        assert [type(part) is nn.Conv2d for part in (model[0], model[1][0])] == [error is not None] * 2
        assert [hasattr(part, "choices") for part in (model[0], model[1][0])] == [error is None] * 2
