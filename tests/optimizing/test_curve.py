"""Training steps by their budget, and the largest batch that fits one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import mucudnn
from mucudnn.core.config import Config
from mucudnn.core.errors import InfeasibleError, InvalidInputError, UnavailableError
from mucudnn.optimizing import curve
from mucudnn.optimizing.keeping import Keeping
from mucudnn.optimizing.trace import MeasuredStep
from mucudnn.running.keeping import KeepingModule
from mucudnn.tuning.model_state import OwnStep

X = torch.randn(4, 3, 32, 32)
SMALL = torch.randn(3, 2)


class Net(nn.Module):
    """A model whose blocks keep all samples together, and whose end may run in micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(2))
        self.last = nn.Sequential(nn.Conv2d(16, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 4, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for norm in self.norms:
            y = y + torch.sigmoid(norm(y))
        return self.last(y).mean((2, 3))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    database = tmp_path_factory.mktemp("curve") / "m.sqlite"
    return Config(
        database=database, operations="forward", algorithms="native", time_limit="10ms", confirm=False, fuse=False
    )


def peak_bytes(model: nn.Module, x: Tensor) -> int:
    step = MeasuredStep(model, OwnStep(x), "cpu")
    step.peaks()
    return max(step.peaks())


def least_bytes(model: nn.Module, x: Tensor, config: Config) -> int | None:
    with pytest.raises(InfeasibleError) as raised:
        mucudnn.optimize(model, x, replace(config, memory_budget=1), progress=False)
    return raised.value.smallest_feasible_bytes


def test_times_fall_from_the_least_budget_to_that_with_which_all_is_kept(config: Config) -> None:
    torch.manual_seed(0)
    model = Net()
    before, random_state = copy.deepcopy(model), torch.get_rng_state()
    front = mucudnn.step_curve(model, X, config, points=3, progress=False)
    # The model is as before, and keeps all.
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(map(torch.equal, model.state_dict().values(), before.state_dict().values()))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert cast(KeepingModule, model).keeping is None
    assert front[-1].budget_bytes == front[-1].peak_bytes == peak_bytes(model, X)
    assert front[-1].time_s == 0
    # Its budgets are those of optimize.
    assert front[0].budget_bytes == least_bytes(model, X, config)
    assert front[0].segments
    for less, more in pairwise(front):
        assert less.budget_bytes < more.budget_bytes
        assert less.predicted_s > more.predicted_s > 0
        assert less.predicted_s - less.time_s == pytest.approx(more.predicted_s - more.time_s)
    for keeping in front[:-1]:
        assert keeping.peak_bytes <= keeping.budget_bytes
        within = mucudnn.optimize(
            copy.deepcopy(model), X, replace(config, memory_budget=keeping.budget_bytes), progress=False
        )
        assert peak_bytes(within, X) <= keeping.budget_bytes


def test_the_budget_that_is_asked_for_is_tried_and_slower_ones_are_left_out(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {0: 9.0, 100: 5.0, 333: 3.0, 550: 4.0}

    def kept_within(_: object, budget_bytes: int, all_bytes: int) -> Keeping:
        return Keeping((), budget_bytes, budget_bytes, times[budget_bytes], all_bytes, budget_bytes or 100)

    monkeypatch.setattr(curve, "kept_within", kept_within)
    monkeypatch.setattr(curve, "all_kept", lambda *_: Keeping((), 1000, 1000, 0.0, 1000, 1000))
    for asked_bytes, expected in ((99, [100, 550, 1000]), (333, [100, 333, 1000]), (1001, [100, 550, 1000])):
        asked = replace(config, memory_budget=asked_bytes)
        front = mucudnn.step_curve(nn.Sequential(nn.Linear(2, 2)), SMALL, asked, points=3, progress=False)
        assert [keeping.budget_bytes for keeping in front] == expected


def test_the_largest_batch_fits_and_one_more_sample_does_not(config: Config) -> None:
    torch.manual_seed(0)
    model = Net()
    least = least_bytes(model, X, config)
    assert least is not None
    budget = replace(config, memory_budget=2 * least)
    largest, keeping = mucudnn.largest_batch(model, X, budget, progress=False)
    assert largest > len(X)
    assert keeping.peak_bytes <= 2 * least
    assert keeping.predicted_s > 0
    batch = torch.cat((X, X, X))
    within = mucudnn.optimize(copy.deepcopy(model), batch[:largest], budget, progress=False)
    assert peak_bytes(within, batch[:largest]) <= 2 * least
    with pytest.raises(InfeasibleError):
        mucudnn.optimize(model, batch[: largest + 1], budget, progress=False)


@pytest.mark.parametrize(
    "least_of",
    [
        lambda size: 10 * size,
        lambda size: 700 + size,
        lambda size: 3 * size + size * size // 50,
        lambda size: 100 * (size // 10 + 1),
        lambda size: 999 if size < 40 else 1001,
        lambda size: 20 * size if size < 20 else 400 + size,
    ],
)
def test_the_largest_batch_is_that_of_all_sizes(
    least_of: Callable[[int], int], config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def all_kept(_: object, measured: Any, team: object) -> Keeping:
        tried.append(len(measured.step.arguments[0]))
        size = 4 * least_of(tried[-1])
        return Keeping((), size, size, 0.0, size, size)

    def kept_within(size: Any, budget_bytes: int, all_bytes: int) -> Keeping:
        return Keeping((), budget_bytes, 0, 0.0, all_bytes, max(least_of(size), budget_bytes))

    monkeypatch.setattr(curve, "all_kept", all_kept)
    monkeypatch.setattr(curve, "kept_within", kept_within)
    monkeypatch.setattr(curve, "Traces", SimpleNamespace(of=lambda *_: tried[-1]))
    config = replace(config, memory_budget=1000)
    largest, _ = mucudnn.largest_batch(nn.Sequential(nn.Linear(2, 2)), SMALL, config, progress=False)
    assert largest == max(size for size in range(1000) if least_of(size) <= 1000)
    assert len(tried) <= 16


def test_what_has_no_largest_batch_says_so(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    model, within = nn.Sequential(nn.Linear(2, 2)), replace(config, memory_budget=1000)
    with pytest.raises(InvalidInputError, match=r"in eval\(\).*call model.train\(\)"):
        mucudnn.largest_batch(copy.deepcopy(model).eval(), SMALL, within, progress=False)
    with pytest.raises(InvalidInputError, match="memory_budget is off; give"):
        mucudnn.largest_batch(model, SMALL, config, progress=False)
    with pytest.raises(InvalidInputError, match="no samples to repeat"):
        mucudnn.largest_batch(model, torch.tensor(1.0), within, progress=False)
    wide = nn.Sequential(nn.Linear(2, 100_000), nn.ReLU())
    with pytest.raises(InfeasibleError, match="one sample needs at least") as raised:
        mucudnn.largest_batch(wide, SMALL, within, progress=False)
    assert raised.value.smallest_feasible_bytes == least_bytes(wide, SMALL[:1], config)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=5_000_000))
    with pytest.raises(UnavailableError, match=r"a batch of \d+ that keeps all.* 3 fit the budget: give"):
        mucudnn.largest_batch(wide, SMALL, replace(config, memory_budget=10_000_000), progress=False)
