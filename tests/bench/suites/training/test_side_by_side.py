"""Two trainings side by side: how far they part, and what the demo prints of it."""

from __future__ import annotations

import copy

import torch
from support.snapshots import assert_as_stored

from mucudnn.bench.sources.trainee import labelled_batches
from mucudnn.bench.suites.training.demo import training_table
from mucudnn.bench.suites.training.side_by_side import (
    Difference,
    GradientErrors,
    TrainingComparison,
    train_in_turns,
)


def test_training_of_equal_models_has_no_difference() -> None:
    def model() -> torch.nn.Module:
        torch.manual_seed(1)
        return torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Dropout(), torch.nn.Linear(4 * 6 * 6, 10)
        )

    comparison = train_in_turns(model(), model(), labelled_batches(20, 8, (3, 8, 8)))
    assert comparison.difference.loss == 0
    assert comparison.difference.gradient == 0
    assert comparison.losses[-1] < comparison.losses[0]


def test_training_of_unequal_models_has_the_difference() -> None:
    models = [torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 10)) for _ in range(2)]
    comparison = train_in_turns(*models, labelled_batches(2, 8, (3, 2, 2)))
    assert comparison.difference.loss > 0
    assert comparison.difference.gradient > 0


class Drifting(torch.nn.Linear):
    """Another function from its second call on."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * min(self.calls, 2)


def test_gradients_are_compared_in_the_first_step_where_weights_are_the_same() -> None:
    models = [torch.nn.Sequential(torch.nn.Flatten(), layer) for layer in (torch.nn.Linear(12, 10), Drifting(12, 10))]
    models[1].load_state_dict(models[0].state_dict())
    comparison = train_in_turns(*models, labelled_batches(3, 8, (3, 2, 2)))
    assert comparison.difference.loss > 1e-3
    assert comparison.difference.gradient == 0


def test_errors_of_gradients_are_those_of_rounding() -> None:
    torch.manual_seed(1)
    layers = torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Dropout(), torch.nn.Linear(144, 10)
    model = torch.nn.Sequential(*layers)
    rough = copy.deepcopy(model)
    for parameter in rough.parameters():
        parameter.data *= 1.001
    errors = train_in_turns(model, rough, labelled_batches(2, 8, (3, 8, 8))).errors
    assert 0 < errors.torch < 1e-5
    assert errors.mucudnn > 1e-4


def test_training_table_prints_times_differences_and_errors() -> None:
    differences = Difference(1e-6, 3e-5), Difference(2e-6, 4e-5)
    comparison = TrainingComparison((0.5,), (0.25,), (2.3, 1.1), *differences, GradientErrors(5e-7, 6e-7))
    assert_as_stored("demo", training_table(comparison))
