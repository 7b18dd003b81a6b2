"""What ``optimize`` does to a model. Nothing is measured here."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.problems.tuned_by_hand import assert_exact, ran
from torch import Tensor, nn

import mucudnn
from mucudnn.core.answers import TunedProblem
from mucudnn.core.config import Config
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Configuration, Environment, Measurement, MicroConfig, Task
from mucudnn.tuning.result import Tuning

HERE = Environment("test", "none", 1, "2", "none", "torch")


def divided(n: int) -> Configuration:
    return Configuration((MicroConfig("gemm", 1),) * n, time_s=1e-3, workspace_bytes=64)


def baseline(n: int) -> Configuration:
    return Configuration((MicroConfig("native", n),), time_s=1e-3, workspace_bytes=0)


class FakeTuner:
    """Chooses without measuring, in place of ``tune_tasks``; ``asked`` has what it was asked for."""

    def __init__(self) -> None:
        self.choose: Callable[[int], Configuration] = divided
        self.asked: list[tuple[ConvProblem, int]] = []
        measured = MicroConfig("gemm", 1), MicroConfig("native", 1)
        self.measurements = tuple(Measurement(m, 0.0, 1e-3 * (i + 1), 0, 64, 1e-7) for i, m in enumerate(measured))

    def __call__(self, tasks: Sequence[Task], config: Config, **_: Any) -> Tuning:
        def tuned(task: Task) -> TunedProblem:
            problem, n, chosen = task.problem, task.batch_size, self.choose(task.batch_size)
            return TunedProblem(problem, n, chosen, 2e-3, 1e-3, 1e-7, "it was told to", self.measurements)

        self.asked += [(task.problem, task.batch_size) for task in tasks]
        torch.rand(1)  # as random data is made
        return Tuning(config, HERE, tuple(map(tuned, tasks)))


@pytest.fixture(autouse=True)
def tuner(monkeypatch: pytest.MonkeyPatch) -> FakeTuner:
    fake = FakeTuner()
    monkeypatch.setattr("mucudnn.optimizing.optimize.tune_tasks", fake)
    return fake


def test_smaller_batches_have_configurations_from_the_same_sweep_and_other_dtypes_torchs_own() -> None:
    torchs = nn.Conv2d(4, 6, 3)
    ours = mucudnn.optimize(copy.deepcopy(torchs), torch.randn(3, 4, 7, 7, requires_grad=True))
    ours.choices.executables.clear()
    assert_exact(ours, torchs, torch.randn(2, 4, 7, 7))
    assert ran(ours) == set(Operation)
    ours.choices.executables.clear()
    assert_exact(ours.double(), torchs.double(), torch.randn(3, 4, 7, 7, dtype=torch.float64))
    assert ran(ours) == set()


class Block(nn.Module):
    """Convolutions of every kind that ``optimize`` meets; draws random numbers, and keeps running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.twice = nn.Conv2d(4, 4, 3, padding=1)
        self.alias = self.twice
        self.derived = DerivedConv2d(4, 4, 1)
        self.parametrized = nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1))
        self.unused = nn.Conv2d(4, 4, 1)
        self.norm, self.dropout = nn.BatchNorm2d(4), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.norm(self.first(x)))
        y: Tensor = self.parametrized(self.derived(self.twice(self.alias(x))))
        return y


class DerivedConv2d(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


def test_optimize_swaps_what_it_can_and_the_model_stays_the_same() -> None:
    model = Block()
    torchs = copy.deepcopy(model).eval()
    assert mucudnn.optimize(model, torch.randn(2, 3, 7, 7)) is model
    assert type(model.first) is type(model.twice) is mucudnn.Conv2d
    assert model.alias is model.twice
    assert isinstance(model.derived, mucudnn.Conv2d)
    assert isinstance(model.derived, DerivedConv2d)
    assert type(model.unused) is nn.Conv2d
    x = torch.randn(2, 3, 7, 7)
    results = [(y := m(x), *torch.autograd.grad(y.square().sum(), m.first.weight)) for m in (model.eval(), torchs)]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_each_problem_is_asked_for_once_and_dx_of_the_input_not_at_all(tuner: FakeTuner) -> None:
    mucudnn.optimize(Block(), torch.randn(2, 3, 7, 7))
    asked = [(problem.operation, problem.c, n) for problem, n in tuner.asked]
    backward_filter = Operation.BACKWARD_FILTER
    assert asked[:2] == [(Operation.FORWARD, 3, 2), (backward_filter, 3, 2)]
    assert asked[2:] == [(operation, 4, 2) for operation in Operation] * 2  # of 3x3, and of the parametrized 1x1


def test_optimize_leaves_no_trace() -> None:
    model = Block()
    model.dropout.eval()
    torch.autograd.backward(model(torch.randn(2, 3, 7, 7)).sum())
    state = copy.deepcopy(model.state_dict())
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    modes = [module.training for module in model.modules()]
    random_state = torch.get_rng_state()
    x = torch.randn(2, 3, 7, 7, generator=torch.Generator().manual_seed(1))
    mucudnn.optimize(model, x)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    torch.testing.assert_close([p.grad for p in model.parameters()], gradients, rtol=0, atol=0)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, None), "model is None; it must be a Module"),
        (("resnet18", None), "model is 'resnet18'; it must be a Module"),
        ((nn.Conv2d(3, 4, 3), torch.ones(1), {"deterministic": True}), r"give mucudnn.Config\(\*\*config\)"),
    ],
)
def test_what_cannot_be_optimized_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        mucudnn.optimize(*arguments)


def test_lazy_modules_are_tuned_when_the_sample_has_made_them_and_where_torch_wins_there_is_no_operator(
    tuner: FakeTuner,
) -> None:
    for configuration in (divided, baseline):
        tuner.choose = configuration
        (module,) = mucudnn.optimize(nn.Sequential(nn.LazyConv2d(4, 3)), torch.randn(2, 4, 8, 8))
        assert type(module) is mucudnn.Conv2d
        assert (module.choices is None, len(module.tuned)) == (configuration is baseline, 2)
