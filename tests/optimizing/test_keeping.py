"""Training steps within a budget: chosen, counted, reported; and what does not fit."""

from __future__ import annotations

import copy
import pickle
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import mucudnn
from mucudnn.core.answers import TunedProblem
from mucudnn.core.config import Config
from mucudnn.core.errors import InfeasibleError
from mucudnn.core.team import ALONE
from mucudnn.core.terminal import silent
from mucudnn.kernels.memory import mark, peaks_between_marks
from mucudnn.measuring.clocks import Clock
from mucudnn.optimizing import keeping as keeping_steps
from mucudnn.optimizing import trace
from mucudnn.optimizing.keeping import keep_within
from mucudnn.optimizing.steps import Step
from mucudnn.optimizing.trace import MeasuredStep
from mucudnn.running import tape
from mucudnn.running.keeping import KeepingModule, make_keeping
from mucudnn.running.modules import TunedModule
from mucudnn.running.norms import make_groups
from mucudnn.solver import keeping as solver
from mucudnn.solver.keeping import Choice
from mucudnn.tuning.model_state import OwnStep
from tests.support.always_ours import choose_always_ours

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
    return bytes_of(OwnStep(X), model)


def bytes_of(step: Step, model: nn.Module) -> int:
    step(model)
    return max(MeasuredStep(model, step, "cpu").peaks())


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
        keeping = cast(KeepingModule, within).keeping
        assert counted_bytes <= budget_bytes
        assert bool(keeping.choices) is (share < 1)
        gradients = []
        for trained in (copy.deepcopy(model), within, pickle.loads(pickle.dumps(within))):
            torch.manual_seed(1)
            trained.load_state_dict(states)
            trained.zero_grad()
            trained(X).square().sum().backward()
            gradients.append([parameter.grad for parameter in trained.parameters()] + [*trained.buffers()])
        for others in gradients[1:]:
            assert all(map(torch.equal, gradients[0], others))
        assert str(keeping) in re.sub(r"\s+", " ", str(mucudnn.report(within)))


def least_bytes(model: nn.Module, config: Config, x: Tensor = X) -> int:
    with pytest.raises(InfeasibleError, match="at least") as raised:
        mucudnn.optimize(model, x, _with_budget(config, 100_000), progress=False)
    named = re.search(r"at least (\d+)B", str(raised.value))
    assert named is not None
    return int(named[1])


def test_the_least_budget_that_is_named_works(config: Config) -> None:
    torch.manual_seed(0)
    for enabled in (False, True):  # of autocast, which keeps casts of weights until it ends
        model, step = Net(), OwnStep(X)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            budget_bytes = least_bytes(model, config)
            within = mucudnn.optimize(model, X, _with_budget(config, budget_bytes), progress=False)

        def run(within: nn.Module = within, step: OwnStep = step, *, enabled: bool = enabled) -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                step(within)

        run()
        assert max(MeasuredStep(within, run, "cpu").peaks()) <= budget_bytes


def test_a_step_without_workspaces_is_traced_once(config: Config) -> None:
    with mock.patch.object(MeasuredStep, "traced", autospec=True, side_effect=MeasuredStep.traced) as traced:
        least_bytes(Skips(), config, torch.randn(1, 3, 64, 64))
    assert traced.call_count == 1


def test_the_least_budget_does_not_depend_on_times(config: Config) -> None:
    torch.manual_seed(0)
    model, named = Net(), set()
    for seed in range(3):
        drawn = random.Random(seed)
        clock = SimpleNamespace(now=lambda drawn=drawn: drawn.random() ** 9)
        with mock.patch.object(trace, "wall_clock", lambda _, clock=clock: clock):
            named.add(least_bytes(model, config))
    assert len(named) == 1


class Skips(nn.Module):
    """A forward pass that holds results of its first layers until its last ones."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(a, b, 5, padding=2) for a, b in ((3, 8), (8, 8), (8, 8)))
        self.up = nn.ModuleList(nn.Conv2d(16, 8, 5, padding=2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = layer(x).tanh()
            skips.append(x)
        for layer in self.up:
            x = layer(torch.cat((skips.pop(), x), 1)).tanh()
        return x.mean((2, 3))


def test_predicted_bytes_are_those_that_are_counted(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what convolutions allocate while they are computed again, and what the forward pass holds but drops."""
    choose_always_ours(monkeypatch)
    torch.manual_seed(0)
    image = torch.randn(1, 3, 64, 64)
    for algorithm in ("native", "fft"):  # which runs PyTorch's operators, with several times the memory of x and y
        model = Skips()
        of_algorithm = replace(config, algorithms=algorithm, time_limit=None)
        budget_bytes = least_bytes(model, of_algorithm, image)
        within = mucudnn.optimize(model, image, _with_budget(of_algorithm, budget_bytes), progress=False)
        keeping = cast(KeepingModule, within).keeping
        assert abs(keeping.predicted_bytes / keeping.peak_bytes - 1) < 0.04, (algorithm, keeping)
        names = {name for name, _ in keeping.choices}
        assert names <= {"convolution", "aten::convolution", "aten::tanh", "aten::cat"}, algorithm
        assert ("convolution" in names) is (algorithm != "native")


def test_convolutions_get_smaller_workspaces_where_the_budget_asks_for_it(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    image = torch.randn(1, 3, 64, 64)
    config = replace(config, algorithms="fft", time_limit=None)
    with monkeypatch.context() as patch:
        choose_always_ours(patch)
        model = mucudnn.optimize(Skips(), image, config, progress=False)
    for layer in (one for one in model.modules() if isinstance(one, TunedModule)):
        accounts = [replace(one.account, smallest_feasible_bytes=0) for one in layer.tuned if one.account is not None]
        vars(layer)["tuned"] = tuple(map(lambda one, account: replace(one, account=account), layer.tuned, accounts))

    def within(budget_bytes: int) -> KeepingModule:
        made = make_keeping(copy.deepcopy(model))
        keep_within(made, image, _with_budget(config, budget_bytes), None, ALONE, silent)
        return made

    def choices() -> list[tuple[TunedProblem, ...]]:
        return [one.tuned for one in model.modules() if isinstance(one, TunedModule) and one.tuned]

    def least() -> int:
        before = choices()
        with pytest.raises(InfeasibleError) as raised:
            keep_within(model, image, _with_budget(config, 100_000), None, ALONE, silent)
        assert choices() == before
        return raised.value.smallest_feasible_bytes or 0

    with mock.patch.object(keeping_steps, "_AGAIN", 0):
        tuned_bytes = least()
    limited_bytes = least()
    assert limited_bytes < 0.8 * tuned_bytes
    for budget_bytes in (limited_bytes, (limited_bytes + tuned_bytes) // 2):
        first, second = within(budget_bytes), within(budget_bytes)  # the second one from what is stored
        assert first.keeping == second.keeping
        assert "are limited" in str(first.keeping)
        limits = dict(first.keeping.workspaces)
        for made in (first, second):
            assert bytes_of(OwnStep(image), made) <= budget_bytes
            for name, limit_bytes in limits.items():
                chosen = [one.configuration for one in cast(TunedModule, made.get_submodule(name)).tuned]
                assert all(one.is_baseline or one.workspace_bytes <= limit_bytes for one in chosen)
    assert any(limits.values())


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


def test_calls_out_of_sight_of_pytorch_have_their_time() -> None:
    now_s = 0.0

    def function(x: Tensor) -> Tensor:
        nonlocal now_s
        now_s += 5.0
        return -x

    timer = trace._Timer(cast(Clock, SimpleNamespace(now=lambda: now_s)))
    x = torch.zeros(100_000)
    with timer:
        tape.note(torch.empty_like(x), "ours", function, x)
    assert timer.times_s == [5.0]


def several(model: nn.Module) -> None:
    for part in X.chunk(2):
        model(part).sum().backward()


def before_gradients(model: nn.Module) -> None:
    (model(X) * model(X + 1)).sum().backward()


def in_bfloat16(model: nn.Module) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        y = model(X)
    y.float().sum().backward()


def after_evaluation(model: nn.Module) -> None:
    with torch.no_grad():
        target = model(X)
    (model(X) - target).square().sum().backward()


def test_a_users_step_may_run_the_model_several_times(config: Config) -> None:
    for step in (several, before_gradients, in_bfloat16, after_evaluation):
        torch.manual_seed(0)
        model = Net()
        budget_bytes = int(0.7 * bytes_of(step, copy.deepcopy(model)))
        within = mucudnn.optimize(model, X, _with_budget(config, budget_bytes), progress=False, step=step)
        assert cast(KeepingModule, within).keeping.choices
        assert bytes_of(step, within) <= budget_bytes


def test_optimizers_of_hooks_are_not_run(config: Config) -> None:
    torch.manual_seed(0)
    model = Net()
    budget_bytes = int(0.8 * step_bytes(copy.deepcopy(model)))
    updated: list[Tensor] = []
    handles = [parameter.register_post_accumulate_grad_hook(updated.append) for parameter in model.parameters()]
    within = mucudnn.optimize(model, X, _with_budget(config, budget_bytes), progress=False)
    assert not updated
    assert step_bytes(within) <= budget_bytes
    assert {*map(id, updated)} == {*map(id, within.parameters())}
    for handle in handles:
        handle.remove()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in within.parameters())


def test_an_interval_begins_after_what_is_freed_next() -> None:
    def step(marks_again: bool) -> None:
        kept = [torch.empty(2000), torch.empty(3000)]
        mark(kept[0].nbytes)
        if marks_again:
            mark()
        del kept[0]
        mark()
        kept.append(torch.empty(500))

    assert peaks_between_marks(lambda: step(False)) == [20_000, 12_000, 14_000]
    assert peaks_between_marks(lambda: step(True)) == [20_000, 12_000, 12_000, 14_000]


def test_gradients_of_parameters_do_not_count() -> None:
    """Not when they are first made; one that is added to another counts as long as it is there."""
    model, x = nn.Linear(1000, 1000, bias=False), torch.randn(2, 1000)
    assert bytes_of(lambda model: model(x).sum().backward(), model) < model.weight.nbytes / 2
    assert bytes_of(lambda model: [model(x).sum().backward() for _ in range(2)], model) >= model.weight.nbytes


def test_a_model_that_is_optimized_without_a_budget_keeps_all_again(config: Config) -> None:
    torch.manual_seed(0)
    model = Net()
    all_bytes = step_bytes(copy.deepcopy(model))
    within = mucudnn.optimize(model, X, _with_budget(config, int(0.8 * all_bytes)), progress=False)
    assert step_bytes(mucudnn.optimize(within, X, config, progress=False)) > 0.8 * all_bytes


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
    return replace(config, memory_budget=budget_bytes)


def test_a_trace_has_the_values_of_a_step_that_nobody_traces() -> None:
    """Norms compute nothing earlier because the modules are watched."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 16, 3)).train()
    x = torch.randn(4, 3, 40, 40)
    make_groups(model, lambda module: module(x))
    names: list[str] = []

    class Named(tape.Tape):
        def note_unseen(self, y: Tensor, name: str, *call: Any) -> None:
            names.append(name)
            super().note_unseen(y, name, *call)

    with Named():
        model(x)
    assert names == ["group"]
    traced, parts = MeasuredStep(make_keeping(model), OwnStep(x), "cpu").traced()
    assert [name for name in traced.names if name == "group" or "norm" in name] == ["group"]
    assert (0, 3) in [(part.segment.first, part.segment.last) for part in parts]
    assert all(1 not in (part.segment.first, part.segment.last) for part in parts)
