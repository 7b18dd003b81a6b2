"""Segments that are chosen for a budget: none that mix samples, and enough of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

import mucudnn
from mucudnn.core.config import Config
from mucudnn.optimizing.trace import Stepping
from mucudnn.running.keeping import KeepingModule
from mucudnn.tuning.model_state import OwnStep

X = torch.randn(8, 3, 40, 40)


class Centred(nn.Module):
    """A layer that mixes samples, which no class tells."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


def layers(*inside: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        *inside,
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 8, 3),
        nn.Flatten(),
        nn.Linear(8 * 18 * 18, 4),
    )


def test_a_step_stays_within_less_than_any_choice_of_whole_tensors_needs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Config(database=tmp_path / "m.sqlite", algorithms="native", time_limit="10ms", confirm=False, fuse=False)
    for inside, has_segments in ((nn.Identity(), True), (Centred(), False), (nn.Dropout(0.1), False)):
        model = layers(inside)
        all_bytes = max(Stepping(model, OwnStep(X), "cpu").peaks())
        one_bytes = X.shape[0] * 32 * 40 * 40 * 4
        assert all_bytes > 4 * one_bytes
        budget_bytes = int(2.5 * one_bytes)  # the backward pass of a convolution has three such tensors
        within_budget = Config(**{**_fields(config), "memory_budget": budget_bytes})
        try:
            within = mucudnn.optimize(copy.deepcopy(model), X, within_budget, progress=False)
        except mucudnn.InfeasibleError:
            assert not has_segments
            continue
        assert has_segments
        keeping = cast(KeepingModule, within).keeping
        assert keeping.segments
        assert max(Stepping(within, OwnStep(X), "cpu").peaks()) <= budget_bytes
        reference = copy.deepcopy(model).double()
        for trained, x in ((reference, X.double()), (model, X), (within, X)):
            trained.zero_grad()
            trained(x).square().sum().backward()
        for exact, plain, own in zip(*(m.parameters() for m in (reference, model, within)), strict=True):
            wanted = cast(Tensor, exact.grad)
            errors = [(cast(Tensor, got.grad).double() - wanted).norm() / wanted.norm() for got in (own, plain)]
            error, torchs = errors
            assert error <= 1.5 * torchs + 1e-7


def _fields(config: Config) -> dict[str, object]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}
