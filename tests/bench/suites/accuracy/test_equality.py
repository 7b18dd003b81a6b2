"""Two trainings side by side: how far they part, and what the demo prints of it."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from support.snapshots import assert_as_stored

from mucudnn.bench.folders.rows import Row
from mucudnn.bench.sources.trainee import labelled_batches
from mucudnn.bench.suites.accuracy.demo import training_table
from mucudnn.bench.suites.accuracy.equality import train_in_turns


class Drifting(torch.nn.Linear):
    """Another function from its second call on."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * min(self.calls, 2)


def test_gradients_are_compared_in_the_first_step_where_weights_are_the_same() -> None:
    models = [torch.nn.Sequential(torch.nn.Flatten(), layer) for layer in (torch.nn.Linear(12, 10), Drifting(12, 10))]
    models[1].load_state_dict(models[0].state_dict())
    _, ours = train_in_turns(*models, labelled_batches(3, 8, (3, 2, 2)), {})
    assert ours.more["loss_difference"] > 1e-3
    assert ours.more["gradient_difference"] == 0


def test_errors_of_gradients_are_those_of_rounding() -> None:
    torch.manual_seed(1)
    layers = torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Dropout(), torch.nn.Linear(144, 10)
    model = torch.nn.Sequential(*layers)
    rough = copy.deepcopy(model)
    for parameter in rough.parameters():
        parameter.data *= 1.001
    torchs, ours = train_in_turns(model, rough, labelled_batches(2, 8, (3, 8, 8)), {})
    assert torchs.relative_error is not None
    assert ours.relative_error is not None
    assert 0 < torchs.relative_error < 1e-5
    assert ours.relative_error > 1e-4


def test_training_table_prints_times_differences_and_errors() -> None:
    torchs = Row({}, "torch", (0.5,), relative_error=5e-7)
    ours = Row({}, "mucudnn", (0.25,), relative_error=6e-7)
    theirs, own = ({"loss_difference": loss, "gradient_difference": 3e-5} for loss in (2e-6, 1e-6))
    theirs["gradient_difference"] = 4e-5
    table = training_table(replace(torchs, more=theirs), replace(ours, more={**own, "losses": [2.3, 1.1]}))
    assert_as_stored("demo", table)
