"""The measured peaks of a training step: by torch's allocator, and the growth of a process."""

from __future__ import annotations

import sys

import pytest
import torch
from support.peaks import peak_bytes
from torch import nn

import mucudnn
from mucudnn.bench.suites.shared.step_costs import allocator_peak_bytes, resident_growth
from mucudnn.core.records import Configuration, MicroConfig
from mucudnn.running.choices import Choices
from mucudnn.tuning.trace import trace
from mucudnn.tuning.training_step import trace_step

MIB = 2**20


def convolution(channels: int = 4) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())


def optimized(x: torch.Tensor) -> nn.Module:
    """The forward pass undivided by gemm, which needs the whole im2col matrix as its workspace."""
    model = convolution()
    ((name, problem, n),) = [(call.name, call.problem, call.batch_size) for call in trace(model, x)]
    module = model.get_submodule(name)
    module.__class__ = mucudnn.Conv2d
    whole = Configuration((MicroConfig("gemm", n),), time_s=1e-3, workspace_bytes=0)
    module.choices = Choices.of({problem: {n: whole}})  # type: ignore[assignment]
    return model


def test_allocator_peak_is_the_most_at_once() -> None:
    def step() -> None:
        first = torch.empty(MIB, dtype=torch.uint8)
        second = torch.empty(2 * MIB, dtype=torch.uint8)
        del first, second
        torch.empty(MIB, dtype=torch.uint8)

    assert allocator_peak_bytes(step) == 3 * MIB


def test_a_kept_workspace_counts() -> None:
    x = torch.randn(8, 3, 32, 32)
    im2col_bytes = 8 * 3 * 9 * 32 * 32 * 4
    assert peak_bytes(optimized(x), x) >= peak_bytes(convolution(), x) + im2col_bytes / 2


def test_the_same_model_has_the_same_peak_and_is_left_as_it_was() -> None:
    model, x = convolution().eval(), torch.randn(8, 3, 32, 32)
    running = model.get_buffer("1.running_mean").clone()
    peak = peak_bytes(model, x)
    assert peak_bytes(model, x) == peak
    assert peak >= trace_step(model, x).peak_bytes - trace_step(model, x).base_bytes
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(model.get_buffer("1.running_mean"), running)


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_a_process_grows_by_what_its_first_call_touches() -> None:
    found, grown_bytes = resident_growth(lambda: torch.zeros(64 * MIB, dtype=torch.uint8).sum())
    assert found == 0
    assert grown_bytes is not None
    assert grown_bytes > 60 * MIB
