"""What was chosen to keep within a budget is stored: a second run measures nothing, and another model all again."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from support.database_rows import change
from torch import Tensor, nn
from torch.nn import functional as F

import mucudnn
from mucudnn.core.config import Config
from mucudnn.core.records import Comparison
from mucudnn.measuring.turns import Rounds
from mucudnn.optimizing import keeping
from mucudnn.optimizing.description import description
from mucudnn.optimizing.keeping import Keeping
from mucudnn.optimizing.trace import MeasuredStep
from mucudnn.running.choices import Choices
from mucudnn.running.keeping import KeepingModule
from mucudnn.running.segments import Band, Segment
from mucudnn.solver.keeping import Choice
from mucudnn.tuning.model_state import OwnStep

X = torch.randn(4, 3, 16, 16)
BANDS = Band(0, 8, 0, ((0, 9), (0, 5))), Band(8, 16, 1, ((7, 16), (3, 8)))
CHOSEN = Keeping(
    choices=(("aten::convolution", Choice.KEPT), ("aten::relu", Choice.ONCE), ("aten::relu", Choice.EACH_TIME)),
    budget_bytes=10**6,
    predicted_bytes=900_000,
    time_s=0.1,
    all_bytes=2 * 10**6,
    peak_bytes=950_000,
    step=Comparison.of([0.5, 0.7, 0.4], [0.6, 0.9, 0.5]),
    predicted_s=1 / 3,
    segments=(Segment("blocks", 0, 1, 2), Segment("blocks.3", None, None, 1, BANDS)),
)


def activated(x: Tensor) -> Tensor:
    return F.relu(x)


class Block(nn.Sequential):
    scale, kind = 2.0, "by_function"

    def forward(self, x: Tensor) -> Tensor:
        return x + getattr(self, f"activated_{self.kind}")(super().forward(x)) * self.scale

    def activated_by_function(self, x: Tensor) -> Tensor:
        return activated(x)

    def saved(self) -> str:
        return "no step runs this"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        blocks = (Block(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Dropout(0.2)) for _ in range(4))
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.first(x)).mean((2, 3))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(
        database=tmp_path / "m.sqlite", algorithms="native", policy="undivided", time_limit="10ms", confirm=False,
        fuse=False, memory_budget=10**6,
    )  # fmt: skip


@pytest.fixture
def measured() -> Iterator[list[object]]:
    """Models of which steps were run to choose; what is then chosen is ``CHOSEN``."""
    models: list[object] = []

    def measure(module: object, *_: object) -> Keeping:
        models.append(module)
        return CHOSEN

    with mock.patch.object(keeping, "_measured", measure):
        yield models


def optimized(model: nn.Module, config: Config, x: Tensor = X, **named: Any) -> KeepingModule:
    return cast(KeepingModule, mucudnn.optimize(model, x, config, progress=False, **named))


def test_a_second_run_runs_no_step(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "_ROUNDS", Rounds(1, 1, 1.0))
    torch.manual_seed(0)
    model = Net()
    one = copy.deepcopy(model)
    OwnStep(X)(one)
    config = replace(config, memory_budget=int(0.8 * max(MeasuredStep(one, OwnStep(X), "cpu").peaks())))
    first = optimized(copy.deepcopy(model), config)
    monkeypatch.setattr(OwnStep, "__call__", lambda *_: pytest.fail("a step was run"))
    second = optimized(copy.deepcopy(model), config, torch.randn(X.shape))
    assert second.keeping == first.keeping
    assert second.keeping.choices
    gradients = []
    for trained in (model, first, second):
        torch.manual_seed(1)
        trained(X).square().sum().backward()
        gradients.append([parameter.grad for parameter in trained.parameters()])
    assert all(map(torch.equal, gradients[0], gradients[1]))
    assert all(map(torch.equal, gradients[0], gradients[2]))


def test_a_run_with_other_convolutions_counts_a_step(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was stored holds if the step has the same values, and its peak is within the budget."""
    monkeypatch.setattr(keeping, "_ROUNDS", Rounds(1, 1, 1.0))
    one = Net()
    OwnStep(X)(one)
    config = replace(config, memory_budget=int(0.8 * max(MeasuredStep(one, OwnStep(X), "cpu").peaks())))
    text = cast(Any, description(Net(), X))[0]
    with mock.patch.object(keeping, "description", return_value=(text, "first")):
        first = optimized(Net(), config)
    assert first.keeping.choices

    def again(convolutions: str) -> Any:
        with mock.patch.object(keeping, "description", return_value=(text, convolutions)):
            return optimized(Net(), config).keeping

    with monkeypatch.context() as patched:
        patched.setattr(keeping, "_measured", lambda *_: pytest.fail("all was measured again"))
        second = again("second")
        assert second == replace(first.keeping, peak_bytes=second.peak_bytes)
        assert 0 < second.peak_bytes <= second.budget_bytes
        counted = steps_from_now_on(patched)
        assert again("second") == second  # which was stored
        assert not counted
    monkeypatch.setattr(keeping, "_measured", lambda *_: CHOSEN)
    with monkeypatch.context() as patched:
        patched.setattr(MeasuredStep, "peaks", lambda _: [second.budget_bytes + 1])
        assert again("third") == CHOSEN
    # Choices of other values, which are now stored too, are for no step of this model.
    change(cast(Path, config.database), "DELETE FROM timings WHERE subject NOT LIKE '%blocks.3%'")
    assert again("fourth") == CHOSEN


def steps_from_now_on(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list of the steps that are run from now on."""
    steps: list[object] = []
    own = OwnStep.__call__
    monkeypatch.setattr(OwnStep, "__call__", lambda self, model: (steps.append(model), own(self, model))[1])
    return steps


def test_all_that_was_chosen_is_stored(config: Config, measured: list[object]) -> None:
    for model in (Net(), Net()):
        within = optimized(model, config)
        assert within.keeping == CHOSEN
        assert within.blocks.segments == CHOSEN.segments[:1]
    assert len(measured) == 1
    # in the same process, of the model that has been optimized
    optimized(within, config)
    assert len(measured) == 1


def frozen(model: Net) -> None:
    model.blocks[1][0].weight.requires_grad_(False)


def evaluated(model: Net) -> None:
    model.blocks[2].eval()


def longer(model: Net) -> None:
    model.blocks.append(nn.Tanh())


def with_attribute(model: Net) -> None:
    model.blocks[0][2].p = 0.3


def with_hook(model: Net) -> None:
    model.blocks[0].register_forward_hook(lambda module, arguments, result: result + 1)


def with_hook_of_gradient(model: Net) -> None:
    model.first.weight.register_hook(lambda gradient: gradient * 2)


def with_own_forward(model: Net) -> None:
    model.blocks[3].forward = lambda x: x - 1


def with_class(model: Net) -> None:
    """Make the first block of another class with the same name."""

    class Block(nn.Sequential):
        scale = 2.0

        def forward(self, x: Tensor) -> Tensor:
            return activated(super().forward(x)) * self.scale + x

    Block.__qualname__ = "Block"
    model.blocks[0].__class__ = Block


def channels_last(model: Net) -> None:
    model.to(memory_format=torch.channels_last)


def with_buffer(model: Net) -> None:
    model.register_buffer("table", torch.zeros(3))


CHANGES: list[Callable[[Net], None]] = [
    *(frozen, evaluated, longer, with_attribute, with_hook, with_hook_of_gradient, with_own_forward, with_class),
    *(channels_last, with_buffer),
]


def test_other_models_are_measured(config: Config, measured: list[object]) -> None:
    optimized(Net(), config)
    for number, change_model in enumerate(CHANGES, 2):
        for _ in range(2):
            model = Net()
            change_model(model)
            optimized(model, config)
        assert len(measured) == number, change_model


def test_other_code_in_the_same_places_is_measured(
    config: Config, measured: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    optimized(Net(), config)
    for number, (owner, name, value) in enumerate(
        (
            (Block, "scale", 3.0),
            (Block, "activated_by_function", lambda _, x: torch.exp(x)),
            (sys.modules[__name__], "activated", lambda x: F.relu(x + 1)),
            (sys.modules[__name__], "activated", lambda x: F.relu(x - 1)),
            (sys.modules[__name__], "activated", lambda x: F.relu(x + 2)),
            (F, "relu", lambda x: x.relu()),
            (nn.BatchNorm2d, "_check_input_dim", lambda *_: None),
        ),
        2,
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, value)
            optimized(Net(), config)
        assert len(measured) == number, name
    monkeypatch.setattr(Block, "saved", lambda _: "nor this")
    optimized(Net(), config)
    assert len(measured) == number


def test_other_steps_are_measured(config: Config, measured: list[object]) -> None:
    optimized(Net(), config)
    others: list[Callable[[], object]] = [
        lambda: optimized(Net(), replace(config, memory_budget=10**6 + 1)),
        lambda: optimized(Net(), replace(config, deterministic=True)),
        lambda: optimized(Net(), config, X[:2]),
        lambda: optimized(Net(), config, X.to(memory_format=torch.channels_last)),
        lambda: optimized(Net(), config, X.clone().requires_grad_()),
        lambda: in_bfloat16(partial(optimized, Net(), config)),
    ]
    for number, run in enumerate(others, 2):
        run()
        assert len(measured) == number
    for run in others:
        run()
    assert len(measured) == 1 + len(others)


def in_bfloat16(run: Callable[[], object]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        run()


def test_steps_of_the_user_are_measured_each_time(config: Config, measured: list[object]) -> None:
    for number in (1, 2):
        optimized(Net(), config, step=lambda model: model(X).sum().backward())
        assert len(measured) == number


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE timings SET subject = substr(subject, 1, length(subject) - 1) WHERE subject LIKE '%step within%'",
        "UPDATE timings SET subject = replace(subject, 'kept', 'lost')",
        "UPDATE timings SET subject = replace(subject, 'peak_bytes', 'peak')",
        "UPDATE timings SET seconds = '[[1.0]]' WHERE subject LIKE '%step within%'",
    ],
)
def test_what_cannot_be_read_is_measured_again(config: Config, measured: list[object], damage: str) -> None:
    optimized(Net(), config)
    change(cast(Path, config.database), damage)
    for _ in range(2):
        assert optimized(Net(), config).keeping == CHOSEN
    assert len(measured) == 2


def test_equal_constants_may_be_one_object() -> None:
    """Whether they are depends on whether code was just compiled, or loaded."""
    first, second = map(tuple, ([1, 2], [1, 2]))
    text = description(Net(), X, [first, first])
    assert text == description(Net(), X, [first, second])
    assert text is not None


def test_choices_of_convolutions_are_described_apart(config: Config) -> None:
    texts = []
    tuned = mucudnn.optimize(Net(), X, replace(config, memory_budget=None), progress=False)
    for limit_bytes in (1, 2):
        vars(cast(Any, tuned).first)["choices"] = Choices({}, "cpu", limit_bytes=limit_bytes)
        texts.append(cast(Any, description(tuned, X)))
    one, other = texts
    assert one[0] == other[0]
    assert one[1] != other[1]


@pytest.mark.slow
def test_other_processes_describe_a_model_alike() -> None:
    """Sets of texts have another order in each of them."""
    here = description(Net(), X)
    assert here is not None
    code = "import hashlib; from optimizing.test_stored_keeping import Net, X, description; "
    code += "print(hashlib.sha256(str(description(Net(), X)).encode()).hexdigest())"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([*sys.path, "tests"])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
