"""Models that keep random values of a forward pass, and loops that must not see it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from mucudnn.optimizing.keeping import Keeping
from mucudnn.running import tape
from mucudnn.running.keeping import KeepingModule, make_keeping
from mucudnn.running.tape import Tape
from mucudnn.solver.keeping import Choice

X = torch.randn(3, 3, 40, 40, generator=torch.Generator().manual_seed(0))


Loop = Callable[[nn.Module], Any]


def within(model: nn.Module, seed: int) -> KeepingModule:
    """Return a copy of the model that keeps random values of its forward pass on X."""
    names: list[str] = []

    class Named(Tape):
        def _choice(self, name: str) -> Choice:
            names.append(name)
            return Choice.KEPT

    with Named():
        copy.deepcopy(model)(X)
    drawn = random.Random(seed)
    keeping = make_keeping(copy.deepcopy(model))
    keep(keeping, [(name, drawn.choice([*Choice])) for name in names])
    return keeping


def keep(model: KeepingModule, choices: Iterable[tuple[str, Choice]]) -> None:
    vars(model)["keeping"] = Keeping(tuple(choices), 0, 0, 0.0, 0)


def assert_same(loop: Loop, model: nn.Module, seeds: int = 4) -> None:
    """Require that a loop gives the same bits within a budget, in results and in the model, and the same draws."""

    def outcome(trained: nn.Module) -> list[Any]:
        torch.manual_seed(1)
        results = loop(trained)
        gradients = [parameter.grad for parameter in trained.parameters()]
        return [results, torch.get_rng_state(), *trained.state_dict().values(), *gradients]

    expected = outcome(copy.deepcopy(model))
    for seed in range(seeds):
        torch.testing.assert_close(outcome(within(model, seed)), expected, rtol=0, atol=0)
        assert tape.recording() is None


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1, momentum=0.9)


def accumulating(model: nn.Module) -> None:
    optimizer = sgd(model)
    for set_to_none in (True, False):
        optimizer.zero_grad(set_to_none=set_to_none)
        for _ in range(2):
            model(X).square().mean().backward()
        optimizer.step()


def two_passes_before_one(model: nn.Module) -> None:
    optimizer = sgd(model)
    for _ in range(2):
        optimizer.zero_grad()
        first, second = model(X), model(X + 1)
        (first * second).mean().backward()
        optimizer.step()
