"""The peaks of two models' training steps, torch's and ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from mucudnn.bench.contests.peak_memory import allocator_peak_bytes, repeatable_step
from mucudnn.tracing.own_step import undisturbed


@dataclass(frozen=True)
class Peaks:
    torch_allocator_bytes: int
    mucudnn_allocator_bytes: int


def compare_peaks(torch_model: nn.Module, mucudnn_model: nn.Module, sample_input: Any) -> Peaks:
    """The models are left as they were."""
    return Peaks(*(_peak_bytes(model, sample_input) for model in (torch_model, mucudnn_model)))


def _peak_bytes(model: nn.Module, sample_input: Any) -> int:
    with undisturbed(model):
        return allocator_peak_bytes(repeatable_step(model, sample_input))
