"""Segments that are chosen for a budget: none that mix samples, and enough of them."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import mucudnn
from mucudnn.core.config import Config
from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.optimizing import keeping
from mucudnn.optimizing.trace import MeasuredStep
from mucudnn.running.keeping import KeepingModule
from mucudnn.running.modules import TunedModule
from mucudnn.running.norms import make_groups
from mucudnn.tuning.model_state import OwnStep

X = torch.randn(8, 3, 40, 40)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(database=tmp_path / "m.sqlite", algorithms="native", time_limit="10ms", confirm=False, fuse=False)


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


def test_a_step_stays_within_less_than_any_choice_of_whole_tensors_needs(config: Config) -> None:
    torch.manual_seed(0)
    for inside, has_segments in ((nn.Identity(), True), (Centred(), True), (nn.Dropout(0.1), False)):
        model = layers(inside)
        all_bytes = max(MeasuredStep(model, OwnStep(X), "cpu").peaks())
        one_bytes = X.shape[0] * 32 * 40 * 40 * 4
        assert all_bytes > 4 * one_bytes
        budget_bytes = int(2.5 * one_bytes)  # the backward pass of a convolution has three such tensors
        within_budget = replace(config, memory_budget=budget_bytes)
        try:
            within = mucudnn.optimize(copy.deepcopy(model), X, within_budget, progress=False)
        except mucudnn.InfeasibleError:
            assert not has_segments
            continue
        assert has_segments
        kept = cast(KeepingModule, within).keeping
        assert kept.segments
        assert max(MeasuredStep(within, OwnStep(X), "cpu").peaks()) <= budget_bytes
        reference = copy.deepcopy(model).double()
        for trained, x in ((reference, X.double()), (model, X), (within, X)):
            trained.zero_grad()
            trained(x).square().sum().backward()
        for exact, plain, own in zip(*(m.parameters() for m in (reference, model, within)), strict=True):
            wanted = cast(Tensor, exact.grad)
            errors = [(cast(Tensor, got.grad).double() - wanted).norm() / wanted.norm() for got in (own, plain)]
            error, torchs = errors
            assert error <= 1.5 * torchs + 1e-6


def for_one_image() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    pooling = nn.AvgPool2d([1, 1])  # type: ignore[arg-type]  # sizes may be lists
    layers = nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 8, 3)
    return nn.Sequential(*layers, pooling), torch.randn(1, 3, 128, 96)


def test_a_step_of_one_image_runs_in_bands_which_are_tuned_and_stored(config: Config) -> None:
    model, x = for_one_image()
    budget_bytes = max(MeasuredStep(model, OwnStep(x), "cpu").peaks()) // 2
    expected = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
    within_budget, stored = replace(config, memory_budget=budget_bytes), []
    for _ in range(2):
        within = mucudnn.optimize(copy.deepcopy(model), x, within_budget, progress=False)
        kept = cast(KeepingModule, within).keeping
        (segment,) = kept.segments
        assert len(segment.bands) > 1
        assert max(MeasuredStep(within, OwnStep(x), "cpu").peaks()) <= budget_bytes
        found = torch.autograd.grad(within(x).square().sum(), [*within.parameters()])
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        sizes = {tuned.problem.h for tuned in cast(TunedModule, within.get_submodule("0")).tuned}
        assert len(sizes) == 1 + len({stop - start for band in segment.bands for start, stop in band.of_inputs})
        stored.append(kept)
    assert stored[0] == stored[1]


def test_bands_run_pytorchs_convolutions_where_others_need_too_much(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = for_one_image()
    own_peaks, own_put_back, more_bytes = MeasuredStep.peaks, keeping.put_back, [0]
    budget_bytes = max(MeasuredStep(model, OwnStep(x), "cpu").peaks()) // 2

    def tune_bands(model: nn.Module, *_: object) -> list[str]:
        more_bytes[0] = budget_bytes
        vars(model.get_submodule("0"))["tuned"] = ()
        return ["0"]

    def put_back(choices: Any) -> None:
        more_bytes[0] = 0
        own_put_back(choices)

    monkeypatch.setattr(keeping, "tune_bands", tune_bands)
    monkeypatch.setattr(keeping, "put_back", put_back)
    monkeypatch.setattr(MeasuredStep, "peaks", lambda step: [peak + more_bytes[0] for peak in own_peaks(step)])
    within = mucudnn.optimize(model, x, replace(config, memory_budget=budget_bytes), progress=False)
    kept = cast(KeepingModule, within).keeping
    assert kept.segments[0].bands
    assert not kept.tunes_bands
    assert cast(TunedModule, within.get_submodule("0")).tuned
    assert max(MeasuredStep(within, OwnStep(x), "cpu").peaks()) <= budget_bytes


def test_an_interruption_while_bands_are_tuned_puts_choices_back(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = for_one_image()
    budget_bytes = max(MeasuredStep(model, OwnStep(x), "cpu").peaks()) // 2

    def tune_bands(model: nn.Module, *_: object) -> list[str]:
        vars(model.get_submodule("0"))["tuned"] = ()
        raise KeyboardInterrupt

    monkeypatch.setattr(keeping, "tune_bands", tune_bands)
    with pytest.raises(KeyboardInterrupt):
        mucudnn.optimize(model, x, replace(config, memory_budget=budget_bytes), progress=False)
    assert cast(TunedModule, model.get_submodule("0")).tuned
    assert cast(KeepingModule, model).keeping is None


def test_the_gradient_of_a_large_result_is_counted() -> None:
    model, target = nn.Conv2d(3, 64, 1), torch.randn(8, 64, 40, 40)

    def step(model: nn.Module) -> None:
        (model(X) * target).sum().backward()

    own, users = (max(MeasuredStep(model, one, "cpu").peaks()) for one in (OwnStep(X), step))
    assert own >= users >= 2 * target.nbytes


class Branches(nn.Module):
    """A model of which only the whole can be a segment; its result is small, and no gradient needs it."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1), last

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.first(x))
        result: Tensor = self.last(torch.sigmoid(self.second(y) + y).mean((2, 3)))
        return result


def test_a_whole_model_may_be_a_segment_also_for_another_budget(config: Config) -> None:
    torch.manual_seed(0)
    model = Branches(nn.Identity())
    expected = [one.clone() for one in torch.autograd.grad(model(X).square().sum(), [*model.parameters()])]
    all_bytes = max(MeasuredStep(model, OwnStep(X), "cpu").peaks())
    for share in (0.5, 0.4):
        budget_bytes = int(share * all_bytes)
        model = mucudnn.optimize(model, X, replace(config, memory_budget=budget_bytes), progress=False)
        kept = cast(KeepingModule, model).keeping
        assert [segment.module for segment in kept.segments] == [""]
        assert max(MeasuredStep(model, OwnStep(X), "cpu").peaks()) <= budget_bytes
        assert kept.predicted_bytes == pytest.approx(kept.peak_bytes, rel=0.05)
        found = torch.autograd.grad(model(X).square().sum(), [*model.parameters()])
        torch.testing.assert_close([*found], expected, rtol=1e-3, atol=1e-3)


def test_the_only_part_may_turn_out_to_be_no_segment(config: Config) -> None:
    torch.manual_seed(0)
    model = Branches(Centred())
    budget_bytes = max(MeasuredStep(model, OwnStep(X), "cpu").peaks()) // 2
    with pytest.raises(mucudnn.InfeasibleError):
        mucudnn.optimize(model, X, replace(config, memory_budget=budget_bytes), progress=False)
    assert cast(KeepingModule, model).segments == ()


@pytest.mark.skipif(loaded_build().library is None, reason="nothing is compiled")
def test_looking_for_parts_leaves_norms_and_their_activations_together() -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 8, 3))
    make_groups(model, lambda model: model(X))
    traced, parts = MeasuredStep(model, OwnStep(X), "cpu").traced()
    assert traced.names == ["aten::convolution", "group", "aten::convolution"]
    assert all(part.batch_size == len(X) for part in parts)


def test_an_error_leaves_no_choices_behind(config: Config) -> None:
    torch.manual_seed(0)
    model, calls = Branches(nn.Identity()), 0
    all_bytes = max(MeasuredStep(model, OwnStep(X), "cpu").peaks())

    def step(model: nn.Module) -> None:
        nonlocal calls
        calls += bool(getattr(model, "keeping", None))
        if calls > 1:
            raise KeyboardInterrupt
        model(X).sum().backward()

    within_budget = replace(config, memory_budget=all_bytes // 2)
    with pytest.raises(KeyboardInterrupt):
        mucudnn.optimize(model, X, within_budget, step=step, progress=False)
    assert cast(KeepingModule, model).keeping is None
    assert cast(KeepingModule, model).segments == ()
