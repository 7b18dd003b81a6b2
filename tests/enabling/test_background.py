"""Measuring between steps, with a clock that moves only when told to: when, how much of the time, and to what end."""

from __future__ import annotations

import threading

import torch
from support.made_up_workshop import MadeUpWorkshop, enabled
from torch import nn

from mucudnn.enabling.session import SHARE
from mucudnn.enabling.status import Origin
from mucudnn.words.config import Config
from mucudnn.words.task import Task

BACKGROUND = Config(workspace_limit=None, background=True)


def small_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))


def train(model: nn.Module) -> None:
    model(torch.randn(2, 4, 8, 8)).square().sum().backward()


def test_nothing_is_measured_within_a_step_and_all_in_the_end() -> None:
    workshop, model, ready = MadeUpWorkshop(), small_net(), set[nn.Parameter]()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: ready.add(one))  # type: ignore[arg-type]

    def all_gradients_are_there(task: Task) -> None:
        was_complete.append(len(ready) == 6)

    workshop.while_tuning, was_complete = all_gradients_are_there, list[bool]()
    with enabled(workshop, BACKGROUND) as session:
        for _ in range(200):
            ready.clear()
            before = len(workshop.tuned)
            train(model)
            workshop.clock.advance(1.0)
            assert len(workshop.tuned) - before <= 1
            assert session.spent_s <= SHARE * workshop.clock.now() + workshop.takes_s
    assert was_complete == [True] * 8  # three operations of three layers, but dx of the first
    assert {met.origin for met in session.status().problems} == {Origin.MEASURED}


def test_what_the_database_has_is_not_put_off() -> None:
    workshop = MadeUpWorkshop(stored=True)
    with enabled(workshop, BACKGROUND) as session:
        train(small_net())
    assert not workshop.tuned
    assert {met.origin for met in session.status().problems} == {Origin.DATABASE}


def test_in_inference_a_convolution_waits_for_one_problem_at_a_time() -> None:
    workshop, model = MadeUpWorkshop(), small_net()
    with enabled(workshop, BACKGROUND), torch.no_grad():
        for _ in range(30):
            before = len(workshop.tuned)
            model(torch.randn(2, 4, 8, 8))
            assert len(workshop.tuned) - before <= 1
            workshop.clock.advance(2.0)
        assert len(workshop.tuned) == 3


def test_nothing_is_measured_while_another_thread_computes() -> None:
    workshop, model = MadeUpWorkshop(), small_net()
    with enabled(workshop, BACKGROUND):
        workshop.clock.advance(100.0)
        other = threading.Thread(target=lambda: model(torch.randn(2, 4, 8, 8)))
        other.start()
        other.join()
        train(model)
        assert not workshop.tuned
        workshop.clock.advance(2.0)  # it computes no longer
        train(model)
        assert len(workshop.tuned) == 1


def test_gradients_by_themselves_are_no_backward_pass() -> None:
    workshop = MadeUpWorkshop()
    x, w = torch.randn(2, 4, 8, 8), torch.randn(6, 4, 3, 3)
    with enabled(workshop, BACKGROUND):
        for _ in range(2):
            torch.ops.aten.convolution_backward(
                torch.randn(2, 6, 6, 6), x, w, None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1, (True, True, False)
            )
    assert len(workshop.tuned) == 1
