"""Training steps within a budget: chosen, counted, reported; and what does not fit."""

from __future__ import annotations

import copy
import pickle
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import mucudnn
from mucudnn.core.config import Config
from mucudnn.core.errors import InfeasibleError, InvalidInputError
from mucudnn.kernels.memory import peak_allocated_bytes
from mucudnn.optimizing import keeping
from mucudnn.running.keeping import KeepingModule
from mucudnn.solver import keeping as solver
from mucudnn.solver.keeping import Choice
from mucudnn.tuning.model_state import OwnStep

X = torch.randn(4, 3, 32, 32)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2))
            for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for block in self.blocks:
            y = y + block(y)
        return y.mean((2, 3))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(database=tmp_path / "m.sqlite", algorithms="native", time_limit="10ms", confirm=False, fuse=False)


def step_bytes(model: nn.Module) -> int:
    """Return the peak of a step beside the gradients of the parameters."""
    step = OwnStep(X, keeps_gradients=True)
    step(model)
    return peak_allocated_bytes(lambda: step(model))


def test_steps_stay_within_the_budget_with_the_same_gradients(config: Config) -> None:
    torch.manual_seed(0)
    model = Net()
    states = copy.deepcopy(model.state_dict())
    all_bytes = step_bytes(copy.deepcopy(model))
    for share in (1.1, 0.9, 0.75):
        budget_bytes = int(all_bytes * share)
        within = mucudnn.optimize(copy.deepcopy(model), X, _with_budget(config, budget_bytes), progress=False)
        assert isinstance(within, Net)
        assert all(map(torch.equal, within.state_dict().values(), states.values()))
        counted_bytes = step_bytes(within)
        kept = cast(KeepingModule, within).keeping
        assert counted_bytes <= budget_bytes
        assert bool(kept.choices) is (share < 1)
        gradients = []
        for trained in (copy.deepcopy(model), within, pickle.loads(pickle.dumps(within))):
            torch.manual_seed(1)
            trained.load_state_dict(states)
            trained.zero_grad()
            trained(X).square().sum().backward()
            gradients.append([parameter.grad for parameter in trained.parameters()] + [*trained.buffers()])
        for others in gradients[1:]:
            assert all(map(torch.equal, gradients[0], others))
        assert str(kept) in re.sub(r"\s+", " ", str(mucudnn.report(within)))


def least_bytes(model: nn.Module, config: Config) -> int:
    with pytest.raises(InfeasibleError, match="at least") as raised:
        mucudnn.optimize(model, X, _with_budget(config, 100_000), progress=False)
    named = re.search(r"at least (\d+)B", str(raised.value))
    assert named is not None
    return int(named[1])


def test_the_least_budget_that_is_named_works(config: Config) -> None:
    torch.manual_seed(0)
    for enabled in (False, True):  # of autocast, which keeps casts of weights until it ends
        model, step = Net(), OwnStep(X, keeps_gradients=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            budget_bytes = least_bytes(model, config)
            within = mucudnn.optimize(model, X, _with_budget(config, budget_bytes), progress=False)

        def run(within: nn.Module = within, step: OwnStep = step, *, enabled: bool = enabled) -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                step(within)

        run()
        assert peak_allocated_bytes(run) <= budget_bytes


def test_the_least_budget_does_not_depend_on_times(config: Config) -> None:
    torch.manual_seed(0)
    model, named = Net(), set()
    for seed in range(3):
        drawn = random.Random(seed)
        with mock.patch.object(keeping, "perf_counter", lambda drawn=drawn: drawn.random() ** 9):
            named.add(least_bytes(model, config))
    assert len(named) == 1


def test_choices_that_need_more_than_predicted_are_no_least_budget(config: Config) -> None:
    torch.manual_seed(0)
    model = Net()
    budget_bytes = int(0.8 * step_bytes(copy.deepcopy(model)))

    def too_low(values: Sequence[solver.Value], allowed_bytes: int) -> solver.Keeping:
        return solver.Keeping((Choice.KEPT,) * len(values), 0.0, allowed_bytes)

    def fewest(values: Sequence[solver.Value]) -> solver.Keeping:
        choices = tuple(Choice.EACH_TIME if index % 2 else Choice.ONCE for index in range(len(values)))
        return solver.Keeping(choices, 0.0, 0)

    with mock.patch.object(solver, "least_time", too_low), mock.patch.object(solver, "least_memory", fewest):
        within = mucudnn.optimize(model, X, _with_budget(config, budget_bytes), progress=False)
    assert step_bytes(within) <= budget_bytes


def test_a_model_that_is_optimized_without_a_budget_keeps_all_again(config: Config) -> None:
    torch.manual_seed(0)
    model = Net()
    all_bytes = step_bytes(copy.deepcopy(model))
    within = mucudnn.optimize(model, X, _with_budget(config, int(0.8 * all_bytes)), progress=False)
    assert step_bytes(mucudnn.optimize(within, X, config, progress=False)) > 0.8 * all_bytes


def test_several_ranks_are_refused_before_anything_is_tuned(config: Config) -> None:
    model = Net()
    several = mock.Mock(are_several=True)
    told = mock.patch.object(sys.modules["mucudnn.optimizing.optimize"], "team_of", return_value=several)
    with told, pytest.raises(InvalidInputError, match="several ranks"):
        mucudnn.optimize(model, X, _with_budget(config, 10**9), progress=False)
    assert type(model) is Net


def test_evaluation_other_batches_and_frozen_models_run_as_before(config: Config) -> None:
    torch.manual_seed(0)
    model = Net()
    budget_bytes = int(0.75 * step_bytes(copy.deepcopy(model)))
    within = mucudnn.optimize(copy.deepcopy(model), X, _with_budget(config, budget_bytes), progress=False)
    assert torch.equal(within.eval()(X), model.eval()(X))
    for batch in (X[:1], torch.cat((X, X))):
        gradients = []
        for trained in (model.train(), within.train()):
            torch.manual_seed(2)
            trained.zero_grad()
            trained(batch).square().sum().backward()
            gradients.append([parameter.grad for parameter in trained.parameters()])
        assert all(map(torch.equal, *gradients))
    for trained in (model, within):
        trained.requires_grad_(False)
    assert not within(X).requires_grad


def _with_budget(config: Config, budget_bytes: int) -> Config:
    return Config(
        database=config.database, algorithms="native", time_limit="10ms", confirm=False, fuse=False,
        memory_budget=budget_bytes,
    )  # fmt: skip
