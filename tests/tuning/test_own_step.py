"""Steps that a sample input makes: what they compute, and what they leave alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mucudnn.tuning.model_state import OwnStep


class Several(nn.Module):
    """Returns what is asked for, made of its convolution's result; notes what a step is like."""

    def __init__(self, returned: Any) -> None:
        super().__init__()
        self.convolution, self.returned = nn.Conv2d(3, 4, 3), returned
        self.seen: list[tuple[bool, Tensor]] = []

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        y = self.convolution(x) * scale
        self.seen.append((torch.is_grad_enabled(), y))
        return self.returned(y)


X = torch.ones(2, 3, 6, 6)


@pytest.mark.parametrize(
    "returned",
    [lambda y: y, lambda y: {"loss": y.sum(), "classes": y.argmax(1)}, lambda y: (y.sum(), [y.mean(), None])],
)
def test_in_training_all_outputs_that_have_gradients_are_differentiated(returned: Any) -> None:
    model = Several(returned)
    OwnStep(X)(model)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_each_step_is_the_same_and_adds_no_gradients_up() -> None:
    model, step = Several(lambda y: y), OwnStep((X, 2.0))
    step(model)
    first = model.convolution.weight.grad
    step(model)
    assert first is not None
    assert model.convolution.weight.grad is not None
    assert torch.equal(first, model.convolution.weight.grad)
    torch.testing.assert_close(
        first, torch.autograd.grad(model(X, 2.0), model.convolution.weight, step._gradients[0])[0]
    )


def test_in_eval_and_where_nothing_is_trained_it_is_the_forward_pass() -> None:
    for model, is_recording in ((Several(lambda y: y.argmax(1)).eval(), False), (Several(lambda y: y.argmax(1)), True)):
        OwnStep(X)(model)
        OwnStep(X)(model.requires_grad_(False))
        assert [enabled for enabled, _ in model.seen] == [is_recording] * 2
        assert model.training is is_recording


def test_the_callers_input_gets_no_gradient() -> None:
    x = torch.ones(2, 3, 6, 6, requires_grad=True)
    model = Several(lambda y: y)
    OwnStep(x)(model)
    assert x.grad is None
    assert model.convolution.weight.grad is not None


def test_under_autocast_filters_are_converted_in_each_step() -> None:
    model, step = Several(lambda y: y), OwnStep(X)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            step(model)
    assert {y.dtype for _, y in model.seen} == {torch.bfloat16}
