"""Trainings side by side: how far they part, and what the demo prints of it."""

from __future__ import annotations

import copy

import pytest
import torch
from support.snapshots import assert_as_stored

from mucudnn.bench.sources.trainee import labelled_batches
from mucudnn.bench.suites.demo import Training, train_in_turns, training_table


class Drifting(torch.nn.Linear):
    """Another function from its second call on."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * min(self.calls, 2)


def test_gradients_are_compared_in_the_first_step_where_weights_are_the_same() -> None:
    models = [torch.nn.Sequential(torch.nn.Flatten(), layer) for layer in (torch.nn.Linear(12, 10), Drifting(12, 10))]
    models[1].load_state_dict(models[0].state_dict())
    exact = copy.deepcopy(models[0]).double()
    torchs, ours, exacts = train_in_turns((*models, exact), [*labelled_batches(3, 8, (3, 2, 2))])
    assert ours.loss_difference(torchs) > 1e-3
    assert ours.gradient_difference(torchs) == 0
    assert 0 < torchs.gradient_difference(exacts) < 1e-5


def test_training_table_prints_times_differences_and_errors() -> None:
    def training(time_s: float, last: float, *gradient: float) -> Training:
        return Training([9.0, time_s], [2.3, last], [torch.tensor(gradient, dtype=torch.float64)])

    torchs, ours = training(0.5, 1.1, 1 + 5e-7), training(0.25, 1.1 * (1 + 1e-6), 1 + 3.05e-5)
    other, exact = training(0.5, 1.1 * (1 + 2e-6), 1 + 4.05e-5), training(0.0, 1.1, 1.0)
    assert ours.loss_difference(torchs) == pytest.approx(1e-6)
    assert_as_stored("demo", training_table(torchs, ours, other, exact))
