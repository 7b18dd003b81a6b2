"""The peaks of two models' training steps, torch's and ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from mucudnn.bench.suites.shared.step_costs import allocator_peak_bytes
from mucudnn.tuning.own_step import undisturbed
from mucudnn.tuning.training_step import training_step


def repeatable_step(model: nn.Module, sample_input: Tensor) -> Callable[[], None]:
    """A forward and a backward pass, after which gradients are None."""

    def step() -> None:
        training_step(model, (sample_input,))
        model.zero_grad(set_to_none=True)

    return step


@dataclass(frozen=True)
class Peaks:
    torch_allocator_bytes: int
    mucudnn_allocator_bytes: int


def compare_peaks(torch_model: nn.Module, mucudnn_model: nn.Module, sample_input: Tensor) -> Peaks:
    """The models are left as they were."""
    return Peaks(*(_peak_bytes(model, sample_input) for model in (torch_model, mucudnn_model)))


def _peak_bytes(model: nn.Module, sample_input: Tensor) -> int:
    with undisturbed(model):
        return allocator_peak_bytes(repeatable_step(model, sample_input))
