"""Costs of a step: shares of the kinds of layers, and its measured peaks by the allocator and the process."""

from __future__ import annotations

import sys

import pytest
import torch
from support.peaks import peak_bytes
from torch import nn
from torch.nn import functional as F

import mucudnn
from mucudnn.bench.results.bounds import shares
from mucudnn.bench.suites.shared.step_costs import (
    REST,
    StepTimes,
    allocator_peak_bytes,
    kind_of_operator,
    median_by_kind,
    resident_growth,
)
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Configuration, MicroConfig
from mucudnn.measuring.clocks import WallClock
from mucudnn.running.choices import Choices
from mucudnn.tuning.trace import trace
from mucudnn.tuning.training_step import trace_step


class Several(nn.Module):
    """A layer of each kind, some as functions; an activation is in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.depthwise, self.pointwise = nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1)
        self.usual, self.linear = nn.Conv2d(8, 8, 3), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn(self.first(x)), inplace=True)
        y = F.max_pool2d(self.pointwise(self.depthwise(y)), 2)
        y = self.usual(y).mean((2, 3))
        return F.gelu(self.linear(y))


def test_a_step_has_each_of_its_kinds_forward_and_backward() -> None:
    model, x = Several(), torch.randn(2, 3, 16, 16)
    found = StepTimes(lambda: model(x).sum().backward(), WallClock()).kinds()
    convolutions = {"first layer", "depthwise", "pointwise", "3x3"}
    assert {*found} == {*convolutions, "normalization", "activation", "pooling", "linear", REST}
    assert all(seconds > 0 for seconds in found.values())
    forward = StepTimes(lambda: model(x), WallClock()).kinds()
    assert {*forward} == {*found}


def test_the_matrix_products_of_our_convolutions_are_no_linear_layers() -> None:
    layer = mucudnn.Conv2d(4, 8, 3)
    problem = ConvProblem(Operation.FORWARD, 4, 6, 6, 8, 3, 3)
    layer.choices = Choices.of({problem: {2: Configuration((MicroConfig("gemm", 2),), 1.0, 2**20)}})
    x = torch.randn(2, 4, 6, 6)
    assert {*StepTimes(lambda: layer(x).sum().backward(), WallClock()).kinds()} <= {"first layer", REST}


def test_operators_are_seen_unless_watching_changes_what_runs() -> None:
    model, watched = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), list[int]()
    model[1].register_forward_hook(lambda *_: watched.append(torch._C._len_torch_dispatch_stack()))
    x = torch.randn(2, 3, 8, 8)
    for sees_operators, kinds in (
        (True, {"first layer", "normalization", "activation", REST}),
        (False, {"first layer", REST}),
    ):
        watched.clear()
        assert {
            *StepTimes(lambda: model(x).sum().backward(), WallClock(), sees_operators=sees_operators).kinds()
        } == kinds
        assert watched == [int(sees_operators)]


def test_operators_have_kinds() -> None:
    for name, kind in (
        ("native_layer_norm_backward.default", "normalization"),
        ("hardtanh_.default", "activation"),
        ("max_pool2d_with_indices_backward.default", "pooling"),
        ("addmm.default", "linear"),
        ("_scaled_dot_product_flash_attention_for_cpu.default", "linear"),
        ("upsample_bilinear2d.default", "rest"),
        ("lgamma.default", "rest"),
        ("linalg_vector_norm.default", "rest"),
        ("add_.Tensor", "rest"),
    ):
        assert kind_of_operator(name) == kind


def test_medians_are_of_each_kind_and_shares_of_all() -> None:
    samples = [{"3x3": 0.1, REST: 0.9}, {"3x3": 0.3, "linear": 0.6, REST: 0.5}, {"3x3": 0.2, "linear": 0.4, REST: 0.1}]
    kinds_s = median_by_kind(samples)
    assert kinds_s == {"linear": 0.4, "3x3": 0.2, REST: 0.5}
    assert [*kinds_s] == ["linear", "3x3", REST]  # the longest first, the rest last
    assert sum(shares(kinds_s).values()) == pytest.approx(1)
    assert (median_by_kind([]), shares({})) == ({}, {})


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
