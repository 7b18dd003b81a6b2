"""What steps of a model have shown is kept: the same model in the same environment is confirmed without a step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from math import inf
from pathlib import Path

import pytest
import torch
from support.clock.machine import FakeClock
from support.clock.shared_machine import SharedProcessors
from support.confirmed_net import REST_S, Machine, Net, X, confirmed, made_up_machine, torchs, tuned_net
from torch import nn

import mucudnn
from mucudnn.database.database import Database
from mucudnn.optimizing import confirm_model as module
from mucudnn.tuning.confirmation import Confirmation
from mucudnn.words.config import Config
from mucudnn.words.problem import Operation

OPEN = Config()  # whether it is confirmed


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return made_up_machine(monkeypatch)


def is_new(found: Confirmation | None) -> bool:
    """Whether steps ran for it just now."""
    assert found is not None
    return found.stored_on is None


def test_the_same_is_put_back_without_a_step(machine: Machine) -> None:
    machine.ours_s[3] = 0.003
    first, second = tuned_net(), tuned_net()
    found = confirmed(first, OPEN)
    ended_s, machine.ours_s[3] = machine.clock.seconds, 0.001  # which nobody sees
    told: list[str] = []
    again = confirmed(second, OPEN, progress=lambda text, fraction: told.append(text))
    assert machine.clock.seconds == ended_s
    assert found is not None
    assert again is not None
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    assert again == replace(found, stored_on=today)
    assert told == [str(found)]
    assert torchs(second) == torchs(first) == {("first", Operation.FORWARD), ("first", Operation.BACKWARD_FILTER)}
    assert second.first.choices is None
    assert second.second.choices is not None
    assert f"confirmed on {today}: step" in str(mucudnn.report(second))
    details = mucudnn.report(second).details().replace(f"confirmed on {today}:", "confirmed:")
    assert details == mucudnn.report(first).details()


def test_asked_for_steps_run_again_and_count_from_then_on(machine: Machine, database: Path) -> None:
    confirmed(tuned_net(), OPEN)
    machine.ours_s[3] = 0.003
    assert is_new(confirmed(tuned_net(), Config(confirm=True)))
    net = tuned_net()
    assert not is_new(confirmed(net, OPEN))
    assert torchs(net)
    assert confirmed(tuned_net().eval(), OPEN) is None, "no step is run unasked"
    assert is_new(confirmed(tuned_net().eval(), Config(confirm=True)))
    assert not is_new(confirmed(tuned_net().eval(), OPEN))
    assert confirmed(tuned_net().eval(), Config(confirm=False)) is None


def test_nothing_of_a_users_step_is_kept_and_nothing_kept_is_taken_for_it(machine: Machine, database: Path) -> None:
    def step(model: nn.Module) -> None:
        model(X).sum().backward()

    assert is_new(confirmed(tuned_net(), OPEN, step=step))
    with Database(database) as opened:
        assert not opened.environments()
    assert is_new(confirmed(tuned_net(), OPEN))
    assert is_new(confirmed(tuned_net(), OPEN, step=step))


OTHERS: list[Callable[[Net], object]] = [
    lambda net: net.drop.eval(),
    lambda net: net.first.requires_grad_(False),
    lambda net: setattr(net, "drop", nn.Identity()),
    lambda net: setattr(net, "more", nn.Linear(2, 2)),
    lambda net: net.normal.double().float().register_buffer("more", torch.zeros(1)),
    lambda net: setattr(net.second, "tuned", tuned_net(algorithm="direct").second.tuned),
    lambda net: torch.set_num_threads(2),
]


def test_another_model_is_confirmed_by_steps_of_its_own(machine: Machine) -> None:
    named = [nn.Sequential(OrderedDict({name: tuned_net()})) for name in ("a", "b", "a")]
    assert [is_new(confirmed(model, OPEN)) for model in named] == [True, True, False]
    confirmed(tuned_net(), OPEN)
    for change in OTHERS:
        same, other = tuned_net(), tuned_net()
        assert not is_new(confirmed(same, OPEN))
        change(other)
        assert is_new(confirmed(other, OPEN)), OTHERS.index(change)


def test_inputs_limits_autocast_and_versions_tell_them_apart(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    tight, headroom = Config(workspace_limit=999), Config(workspace_limit="headroom")
    confirmed(tuned_net(limit_bytes=999), OPEN)
    assert is_new(confirmed(tuned_net(limit_bytes=999), tight)), "PyTorch's own may not be put back"
    assert is_new(confirmed(tuned_net(limit_bytes=999), headroom)), "the workspace is freed after each call"
    assert is_new(confirmed(tuned_net(x=X[:1]), OPEN, x=X[:1]))
    assert is_new(confirmed(tuned_net(), OPEN, x=X.clone().requires_grad_()))
    with torch.autocast("cpu", torch.bfloat16):
        assert is_new(confirmed(tuned_net(), OPEN))
    assert not is_new(confirmed(tuned_net(), OPEN))
    monkeypatch.setattr("mucudnn.optimizing.confirm_model.algorithm_versions", lambda device_type: {"gemm": 99})
    assert is_new(confirmed(tuned_net(), OPEN))


def test_optimize_finds_it_again(database: Path) -> None:
    """Chance says whether anything is faster than torch's own here, and with that whether there is any to confirm."""
    algorithms, reports = ("gemm", "direct"), []
    for confirm in (True, None):
        net = Net()
        mucudnn.optimize(net, X, Config(confirm=confirm, algorithms=algorithms, database=database))
        reports.append(mucudnn.report(net))
    first, second = reports
    assert second.layers == first.layers
    assert len(second.confirmations) == len(first.confirmations)
    for found, again in zip(first.confirmations, second.confirmations, strict=True):
        assert not is_new(again)
        assert replace(again, stored_on=None) == found


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
def test_what_others_do_decides_nothing_and_is_not_kept(monkeypatch: pytest.MonkeyPatch, quiet_from_s: float) -> None:
    processors = SharedProcessors(others=1.0, quiet_from_s=quiet_from_s)
    machine, watch = made_up_machine(monkeypatch, WorkingClock(processors)), processors.watch()
    machine.rest_s = Rests(processors)
    processors.work(1.0)
    monkeypatch.setattr(module, "watch_of", lambda device_type: watch)
    net, told = tuned_net(), list[str]()
    found = confirmed(net, OPEN, progress=lambda text, fraction: told.append(text))
    assert found is not None
    assert any(text.startswith("waiting for a quiet machine: others take") for text in told)
    assert not torchs(net), "it is slower only while others work"
    becomes_quiet = quiet_from_s < inf
    assert found.is_disturbed == (not becomes_quiet)
    assert ("measured on a busy machine, 100% of its speed was missing" in told[-1]) == (not becomes_quiet)
    assert is_new(confirmed(tuned_net(), OPEN)) == (not becomes_quiet)
