"""A tuned model in steps of its own: torch's side and ours, what is put back, and what is left as it was.

A clock that moves only where a convolution or a step is told to take time makes the outcome known.
"""

from __future__ import annotations

import copy
import pickle
import signal
from collections.abc import Callable
from importlib import import_module
from math import inf
from pathlib import Path

import pytest
import torch
from support.clock.machine import FakeClock
from support.clock.shared_machine import SharedProcessors
from support.confirmed_net import REST_S, Machine, Net, X, confirmed, made_up_machine, torchs, tuned_net
from support.ranks.group import group_of_one
from torch import Tensor, nn

import mucudnn
from mucudnn.core.config import Config
from mucudnn.core.problem import Operation
from mucudnn.core.torch_settings import TORCHS_OWN
from mucudnn.optimizing import confirm as module
from mucudnn.optimizing.steps import InPlaceTimes
from mucudnn.running import operators


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return made_up_machine(monkeypatch)


def test_what_is_faster_stays_and_is_told(machine: Machine) -> None:
    net, told = tuned_net(), []
    found = confirmed(net, progress=lambda text, fraction: told.append(text))
    assert found is not None
    assert not torchs(net)
    assert found.step.baseline_s == pytest.approx(REST_S + 5 * 0.002)
    assert found.step.time_s == pytest.approx(REST_S + 5 * 0.001)
    assert (found.convolutions.speedup, found.share) == pytest.approx((2, 0.5))
    assert mucudnn.report(net).confirmation is found
    assert (
        mucudnn.report(copy.deepcopy(net)).confirmation == pickle.loads(pickle.dumps(net.first)).confirmation == found
    )
    assert told == ["confirming in the model's own step", str(found)]


def test_torchs_own_is_put_back_where_ours_is_slower_in_place(machine: Machine) -> None:
    machine.ours_s[3] = 0.003
    net = tuned_net()
    found = confirmed(net)
    assert found is not None
    assert torchs(net) == {("first", Operation.FORWARD), ("first", Operation.BACKWARD_FILTER)}
    assert net.first.choices is None  # torch's own module, without anything in its way
    assert net.second.choices is not None
    assert found.step.time_s == pytest.approx(REST_S + 2 * 0.002 + 3 * 0.001)
    text = str(mucudnn.report(net))
    assert f"confirmed: {found}"[:90] in text
    assert "PyTorch's own restored, as it is faster in the step, in first" in text
    details = mucudnn.report(net).details()
    assert "why        PyTorch's own: slower in the step, 0.67 ± 0.00; tuning chose gemm 2" in details


def test_nothing_is_left_behind(machine: Machine) -> None:
    net = tuned_net()
    net.drop.eval()
    net(X).sum().backward()
    state = copy.deepcopy(net.state_dict())
    gradients = [(p.grad, p.grad.clone()) for p in net.parameters() if p.grad is not None]
    versions = [p._version for p in net.parameters()]
    random_state = torch.get_rng_state()
    confirmed(net)
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert versions == [p._version for p in net.parameters()]
    for parameter, (gradient, before) in zip(net.parameters(), gradients, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(gradient, before)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert net.training
    assert not net.drop.training
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in net.modules())
    assert operators.observer is None


def test_the_users_step_is_run_and_parameters_are_restored(machine: Machine) -> None:
    net = tuned_net()
    before = copy.deepcopy(net.state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen = []

    def step(model: nn.Module) -> None:
        optimizer.zero_grad()
        model(X).square().sum().backward()
        optimizer.step()
        seen.append((model is net, net.first.choices is not None))

    found = confirmed(net, Config(), step=step)  # without being asked for otherwise
    assert found is not None
    assert all(is_net for is_net, _ in seen)
    assert {ours for _, ours in seen} == {False, True}
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_a_step_that_fails_or_is_interrupted_leaves_what_was_tuned(machine: Machine) -> None:
    net = tuned_net()

    def failing(error: BaseException) -> Callable[[nn.Module], None]:
        def step(model: nn.Module) -> None:
            raise error

        return step

    words = r"could not be confirmed in the model's own step: RuntimeError: no memory$"
    with pytest.warns(RuntimeWarning, match=words):
        assert confirmed(net, step=failing(RuntimeError("no memory\nand a stack"))) is None
    with pytest.raises(KeyboardInterrupt):
        confirmed(net, step=failing(KeyboardInterrupt()))
    before = signal.signal(signal.SIGUSR1, lambda *_: failing(TimeoutError())(net))
    with pytest.raises(TimeoutError):
        confirmed(net, step=lambda _: signal.raise_signal(signal.SIGUSR1))
    signal.signal(signal.SIGUSR1, before)
    assert not torchs(net)
    assert net.first.choices is not None
    assert net.second.choices is not None
    assert mucudnn.report(net).confirmation is None


def short(machine: Machine, net: Net, patch: pytest.MonkeyPatch) -> None:
    machine.rest_s, machine.torchs_s, machine.ours_s = {True: 1e-5, False: 1e-5}, 2e-5, {3: 1e-5, 4: 1e-5}


def training_in_hooks(machine: Machine, net: Net, patch: pytest.MonkeyPatch) -> None:
    def train(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.mul_(0.9)

    net.first.weight.register_post_accumulate_grad_hook(train)  # type: ignore[no-untyped-call]


def one_of_several(machine: Machine, net: Net, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_is_one_of_several", lambda: True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda machine, net, patch: net.eval(), "the model is in eval mode"),
        (short, "a step takes 10 us"),
        (training_in_hooks, "its parameters have gradient hooks, which may train the model"),
        (one_of_several, "this process is one of several that do not tune together"),
    ],
    ids=["eval", "short", "hooks", "several"],
)
def test_some_models_are_confirmed_only_if_asked_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, change: Callable[..., object], reason: str
) -> None:
    net = tuned_net()
    change(machine, net, monkeypatch)
    state, training = copy.deepcopy(net.state_dict()), net.training
    assert confirmed(net, Config()) is None
    assert f"not confirmed: {reason}; Config(confirm=True) confirms anyway" in mucudnn.report(net).details()
    found = confirmed(net)
    assert found is not None
    assert "not confirmed" not in str(mucudnn.report(net))
    assert net.training == training
    if not training:  # the step is the forward pass
        assert found.step.baseline_s == pytest.approx(REST_S + 2 * 0.002)
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert confirmed(net, Config(confirm=False)) is None
    assert "not confirmed: confirm=False" in str(mucudnn.report(net))
    for copied in (copy.deepcopy(net.first), pickle.loads(pickle.dumps(net.first))):
        assert copied.unconfirmed == "confirm=False"


def test_where_nothing_of_ours_runs_nothing_is_run(machine: Machine) -> None:
    assert confirmed(tuned_net(algorithm=TORCHS_OWN)) is None
    assert machine.clock.seconds == pytest.approx(REST_S)  # of the trace


def test_a_group_of_one_is_alone() -> None:
    with group_of_one():
        assert not module._is_one_of_several()


def test_optimize_confirms_where_convolutions_can_be_timed(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuning runs past all wrappers in torch's dispatcher; confirming must not: it times torch's own by one."""
    recorded: list[int] = []

    def confirm_probe(model: nn.Module, sample_input: torch.Tensor, *_: object, **__: object) -> None:
        times = InPlaceTimes("cpu")
        with times.recording():
            model(sample_input)
        recorded.append(sum(spent.calls for spent in times.take().values()))

    monkeypatch.setattr(import_module("mucudnn.optimizing.optimize"), "confirm_model", confirm_probe)
    mucudnn.optimize(Net(), X, Config(algorithms=("gemm",), time_limit="20ms", database=database, confirm=True))
    assert recorded == [2]


def test_a_step_that_is_no_function_is_refused() -> None:
    with pytest.raises(mucudnn.InvalidInputError, match="step is 3; give a function"):
        mucudnn.optimize(Net(), X, step=3)  # type: ignore[arg-type]


# Others work, too


class WorkingClock(FakeClock):
    """What takes time works on processors that others use."""

    def __init__(self, processors: SharedProcessors) -> None:
        super().__init__()
        self.processors = processors

    def now(self) -> float:
        return self.processors.now()

    def advance(self, seconds: float) -> None:
        self.processors.work(seconds)


class Rests(dict[bool, float]):
    """All else of a step takes longer with ours while others work."""

    def __init__(self, processors: SharedProcessors) -> None:
        super().__init__()
        self.processors = processors

    def __getitem__(self, is_ours: bool) -> float:
        return 5 * REST_S if is_ours and self.processors.is_busy() else REST_S


@pytest.mark.parametrize("quiet_from_s", [4.2, inf])
def test_what_others_do_decides_nothing(monkeypatch: pytest.MonkeyPatch, quiet_from_s: float) -> None:
    processors = SharedProcessors(others=1.0, quiet_from_s=quiet_from_s)
    machine, watch = made_up_machine(monkeypatch, WorkingClock(processors)), processors.watch()
    machine.rest_s = Rests(processors)
    processors.work(1.0)
    monkeypatch.setattr(module, "watch_of", lambda device_type: watch)
    net, told = tuned_net(), list[str]()
    found = confirmed(net, Config(), progress=lambda text, fraction: told.append(text))
    assert found is not None
    assert any(text.startswith("waiting for a quiet machine: others take") for text in told)
    assert not torchs(net), "it is slower only while others work"
    becomes_quiet = quiet_from_s < inf
    assert found.is_disturbed == (not becomes_quiet)
    assert ("measured on a busy machine, 100% of its speed was missing" in told[-1]) == (not becomes_quiet)
