"""The peak memory of training steps that can be repeated."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from mucudnn.bench.suites.shared.step_costs import allocator_peak_bytes
from mucudnn.tuning.model_state import undisturbed
from mucudnn.tuning.training_step import training_step


def repeatable_step(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """A forward and a backward pass, after which gradients are None."""

    def step() -> None:
        training_step(model, (x,))
        model.zero_grad(set_to_none=True)

    return step


def peak_bytes(model: nn.Module, x: Tensor) -> int:
    """Of the allocator in a step; the model is left as it was."""
    with undisturbed(model):
        return allocator_peak_bytes(repeatable_step(model, x))
