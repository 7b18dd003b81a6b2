"""Training steps within a budget on several ranks: the same choices on all, and the gradients of steps without one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from support.ranks.group import Ranks, error_of, run_once
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mucudnn
from mucudnn.core.config import Config
from mucudnn.optimizing import keeping
from mucudnn.optimizing.steps import Step
from mucudnn.optimizing.trace import MeasuredStep
from mucudnn.running.keeping import KeepingModule
from mucudnn.tuning.model_state import OwnStep

pytestmark = pytest.mark.slow

X = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(5)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for block in self.blocks:
            y = y + block(y)
        return y.mean((2, 3))


peaks_of = MeasuredStep.peaks


def own_step(model: nn.Module) -> None:
    model(X).sum().backward()


def within(folder: Path, share: float, step: Step | None = None) -> KeepingModule:
    """Return a model that trains within a share of the bytes that a step needs."""
    torch.manual_seed(0)
    model = Net()
    measured, measured_step = copy.deepcopy(model), OwnStep(X)
    measured_step(measured)
    budget_bytes = int(share * max(peaks_of(MeasuredStep(measured, measured_step, "cpu"))))
    config = Config(
        database=folder / "all.sqlite", algorithms="native", confirm=False, fuse=False, memory_budget=budget_bytes
    )
    return cast(KeepingModule, mucudnn.optimize(model, X, config, progress=False, step=step))


def chosen(model: KeepingModule) -> list[str]:
    return [choice.name for _, choice in model.keeping.choices]


def trained(rank: int, folder: Path, is_within: bool) -> dict[str, Any]:
    """Train three steps, in buckets of one gradient; return the order of the gradients, the choices and the states."""
    torch.manual_seed(0)
    net = within(folder, 0.75) if is_within else Net()
    parallel = DistributedDataParallel(net, bucket_cap_mb=1e-6)
    order: list[str] = []
    for name, parameter in net.named_parameters():
        parameter.register_post_accumulate_grad_hook(partial(lambda name, _: order.append(name), name))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    gradients = []
    for step in range(3):
        optimizer.zero_grad()
        with parallel.no_sync() if step == 1 else torch.enable_grad():
            parallel(X + rank + step).square().mean().backward()
        gradients += [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
        optimizer.step()
    choices = chosen(net) if isinstance(net, KeepingModule) else []
    return {"order": order, "gradients": gradients, "buffers": [*net.buffers()], "choices": choices}


def counted(rank: int, folder: Path, more_bytes: int, share: float) -> dict[str, Any]:
    """Choose where steps of rank 1 need more bytes, and where the ranks take times of their own; nothing is stored."""
    found: dict[str, Any] = {}

    def of_rank(measured: MeasuredStep) -> list[int]:
        return [peak + rank * more_bytes for peak in peaks_of(measured)]

    def optimized() -> None:
        model = within(folder, share)
        found.update(choices=chosen(model), peak_bytes=model.keeping.peak_bytes, step=repr(model.keeping.step))

    with (
        mock.patch.object(MeasuredStep, "peaks", of_rank),
        mock.patch.object(keeping, "description", return_value=None),
    ):
        return {"error": error_of(optimized), **found}


def chosen_again(rank: int, folder: Path) -> dict[str, Any]:
    """Choose twice, the second time where no step may run; and once more where rank 1 has another model."""
    first, calls = within(folder, 0.8), []

    def measured(module: KeepingModule, *_: Any) -> Any:
        calls.append(module)
        return first.keeping

    with mock.patch.object(keeping, "_measured", measured):
        second = within(folder, 0.8)
        calls_of_second = len(calls)
        with mock.patch.object(Net, "forward", forward_of_other if rank else Net.forward):
            within(folder, 0.8)
    return {"keepings": [first.keeping, second.keeping], "calls": [calls_of_second, len(calls)]}


def forward_of_other(model: Net, x: Tensor) -> Tensor:
    y = model.first(x)
    for block in model.blocks:
        y = block(y) + y
    return y.mean((2, 3))


def failing(rank: int, folder: Path, at: int) -> str:
    steps = iter(range(1000))

    def step(model: nn.Module) -> None:
        if next(steps) == at and rank == 1:
            raise ValueError("no data")
        own_step(model)

    return error_of(lambda: within(folder, 0.75, step))


def step_on_one_rank(rank: int, folder: Path) -> str:
    return error_of(lambda: within(folder, 0.75, own_step if rank == 0 else None))


Run = Callable[..., Sequence[Any]]


@pytest.fixture(scope="module")
def run(ranks: Mapping[int, Ranks], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_once(ranks[2], tmp_path_factory.mktemp("scenarios"))


def test_gradients_are_those_without_a_budget_in_the_same_order(run: Run) -> None:
    without, found = run(trained, False), run(trained, True)
    assert "KEPT" in found[0]["choices"]
    assert {"ONCE", "EACH_TIME"} & {*found[0]["choices"]}
    for rank in (0, 1):
        assert found[rank]["choices"] == found[0]["choices"]
        assert found[rank]["order"] == without[0]["order"]
        for name in ("gradients", "buffers"):
            torch.testing.assert_close(found[rank][name], without[rank][name], rtol=0, atol=0)
    synchronized = len(found[0]["gradients"]) // 3
    for first, second in zip(*(one["gradients"][:synchronized] for one in found), strict=True):
        assert torch.equal(first, second)


def test_the_most_bytes_of_any_rank_are_within_the_budget(run: Run) -> None:
    alike, unlike = run(counted, 0, 0.9), run(counted, 500_000, 0.9)
    for first, second in (alike, unlike):
        assert first == second
        assert first["error"] == "none"
    assert unlike[0]["choices"].count("KEPT") < alike[0]["choices"].count("KEPT")


def test_all_ranks_use_what_was_stored_or_none_does(run: Run) -> None:
    for of_rank in run(chosen_again):
        assert of_rank["keepings"][0] == of_rank["keepings"][1]
        assert of_rank["calls"] == [0, 1]


def test_a_budget_that_is_too_small_for_one_rank_is_the_same_error_on_all(run: Run) -> None:
    first, second = run(counted, 10**9, 0.9)
    assert first == second
    assert first["error"].startswith("InfeasibleError: memory_budget is ")


def test_a_rank_that_fails_stops_all(run: Run) -> None:
    for at in (0, 2, 4):
        first, second = run(failing, at)
        assert first.startswith("SharingError: "), first
        assert "rank 1: ValueError: no data" in first
        assert second == "ValueError: no data"
    (error,) = {*run(step_on_one_rank)}
    assert error == "SharingError: step is given on rank 0, None on rank 1; give it on all ranks, or on none"
