"""Programs in C++: the values of torch's operators, for every number, in any call, copy and thread."""

from __future__ import annotations

import copy
import ctypes
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mucudnn
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import Operation
from mucudnn.graph import program
from mucudnn.graph.capture import capture
from mucudnn.graph.costed import CostedGraph, each_by_itself, solver_graph
from mucudnn.graph.model import BandedModel
from mucudnn.graph.operators import steps
from mucudnn.graph.operators.convolution import Convolution, convolutions_of
from mucudnn.graph.operators.operator import Band, Barrier, Local, Operator
from mucudnn.graph.schedule import Schedule
from mucudnn.kernels.compiled.library import ProgramStep, loaded_build
from mucudnn.kernels.memory import peak_allocated_bytes
from mucudnn.kernels.registry import algorithm
from mucudnn.solver.bands import Cut, Segment
from mucudnn.solver.plans import Plan

pytestmark = pytest.mark.skipif(bool(loaded_build().why_not_compiled), reason="there is no C++ build")


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor | tuple[Tensor, ...]], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)
        self.eval()

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.function(x)


def schedule_of(model: nn.Module, *arguments: Tensor) -> Schedule:
    """Return a schedule that computes each operator as a whole."""
    captured = capture(model, arguments)
    costed = CostedGraph(captured, solver_graph(captured))
    return Schedule(costed, each_by_itself(costed.graph))


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "leaky": partial(F.leaky_relu, negative_slope=0.3),
    "gelu": F.gelu,
    "gelu by tanh": partial(F.gelu, approximate="tanh"),
    "sum": lambda x: x + x.flip(1),
    "product": lambda x: x * x.flip(1),
    "line": lambda x: 0.5 * x + 2,
    "scaled channels": lambda x: x * x.mean((2, 3), keepdim=True),
    "shifted channels": lambda x: x.mean((2, 3), keepdim=True) + x,
    "max pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "dilated max pool": lambda x: F.max_pool2d(x, 2, 1, 1, dilation=2),
    "average pool": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "average pool of the image": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "average pool by a divisor": lambda x: F.avg_pool2d(x, 2, divisor_override=3),
    "adaptive pool": lambda x: F.adaptive_avg_pool2d(x, (3, 1)),
    "mean": lambda x: x.mean((2, 3)),
    "shuffle": lambda x: F.pixel_shuffle(x, 2),
    "nearest": lambda x: F.interpolate(x, size=(7, 25)),
    "nearest-exact": lambda x: F.interpolate(x, size=(7, 25), mode="nearest-exact"),
    "pixel norm": lambda x: F.silu(
        F.normalize(F.relu(x + -2.0), dim=1, eps=1e-3) * torch.arange(20.0).to(x.dtype).view(20, 1, 1) + 0.5
    ),
    "bilinear": lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"),
    "aligned": lambda x: F.interpolate(x, size=(17, 5), mode="bilinear", align_corners=True),
    "channels": lambda x: F.pad(x[:, 3:9], (1, 1)),
    "cat": lambda x: torch.cat((x, x[:, 1:4]), 1),
}


def test_operators_compute_what_torchs_do_and_all_in_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """All in one graph: capturing takes most of the time."""
    by_torch: list[str] = []
    compute = program._compute

    def noting(frame: program.Frame, one: Operator, **band: Any) -> None:
        by_torch.append(one.name)
        compute(frame, one, **band)

    monkeypatch.setattr(program, "_compute", noting)
    x = torch.randn(2, 20, 12, 11)
    strange = x.clone()
    strange.view(-1)[::97] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e30]).repeat(100)[:55]
    model = Calls(lambda x: tuple(function(x) for function in FUNCTIONS.values()))
    schedule = schedule_of(model, x)
    for given in (x, strange, x.contiguous(memory_format=torch.channels_last)):
        for name, own, expected in zip(FUNCTIONS, schedule.run((given,)), model(given), strict=True):
            relative = 1e-4 if name in ("bilinear", "aligned") else 1e-5  # torch computes coordinates in float32
            if name == "gelu":  # with AVX-512 torch's of infinity is NaN in float32
                expected = FUNCTIONS[name](given.double()).float()
            torch.testing.assert_close(own, expected, rtol=relative, atol=1e-5, equal_nan=True, msg=name)
    for dtype in (torch.bfloat16, torch.float16):
        halves, error = x.to(dtype), 8 * torch.finfo(dtype).eps
        for name, own, exact in zip(
            FUNCTIONS, schedule_of(model, halves).run((halves,)), model(halves.double()), strict=True
        ):
            assert own.dtype == dtype
            torch.testing.assert_close(own.double(), exact, rtol=error, atol=error, msg=f"{name}, {dtype}")
    assert not by_torch


def test_normalization_and_linear_layers() -> None:
    x = torch.randn(2, 20, 12, 11)
    for layers in (
        [nn.GroupNorm(5, 20), nn.SiLU()],
        [nn.GroupNorm(4, 20, affine=False)],
        [nn.InstanceNorm2d(20, affine=True), nn.ReLU()],
        [nn.BatchNorm2d(20), nn.ReLU()],
        [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(20, 7), nn.ReLU(), nn.Dropout(), nn.Linear(7, 3)],
        [nn.Flatten(), nn.Linear(20 * 12 * 11, 7, bias=False)],
    ):
        model = nn.Sequential(*layers).eval()
        exact = copy.deepcopy(model).double()(x.double())
        for dtype, error in ((torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 1e-5)):
            given = x.to(dtype)
            schedule = schedule_of(copy.deepcopy(model).to(dtype), given)
            torch.testing.assert_close(schedule.run((given,)).double(), exact, rtol=error, atol=error)
    operators = schedule.operators
    assert any(isinstance(one, Convolution) for one in operators), "a linear layer is a convolution"
    assert not any(isinstance(one, Barrier) and "linear" in one.name for one in operators)


def test_a_linear_layer_by_torch_has_the_bits_of_its_matrix_product() -> None:
    """A convolution sums in another order, and takes longer."""
    model, x = nn.Sequential(nn.Flatten(), nn.Linear(512, 100)).eval(), torch.randn(4, 512, 1, 1)
    assert torch.equal(schedule_of(model, x).run((x,)), model(x))


class Standardized(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, F.layer_norm(self.weight, self.weight.shape[1:]), self.bias)


def test_filters_that_are_computed_from_parameters_are_constants() -> None:
    model, x = nn.Sequential(Standardized(3, 8, 3), nn.ReLU()).eval(), torch.randn(1, 3, 9, 8)
    schedule = schedule_of(model, x)
    torch.testing.assert_close(schedule.run((x,)), model(x))
    assert not any(isinstance(one, Barrier) for one in schedule.operators)


class Normed(nn.Module):
    """A normalization whose weights are computed from the input, or of which the result is read twice."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.conv, self.linear, self.drop = name, nn.Conv2d(4, 4, 3), nn.Linear(6, 4), nn.Dropout()
        self.norm = nn.BatchNorm2d(4, affine=False)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear(x.mean((1, 2)))[0].sigmoid()
        if self.name == "group norm":
            return F.group_norm(x, 2, weight, weight)
        if self.name == "read twice":
            y = self.norm(x)
            return F.relu(self.drop(y)) + y
        x = self.conv(x) if self.name == "batch norm of a convolution" else x
        return F.batch_norm(x, self.norm.running_mean, self.norm.running_var, weight, weight)


def test_normalizations_that_are_no_constants() -> None:
    x = torch.randn(2, 4, 5, 6)
    for name in ("group norm", "read twice", "batch norm", "batch norm of a convolution"):
        model = Normed(name)
        torch.testing.assert_close(schedule_of(model, x).run((x,)), model(x), rtol=1e-5, atol=1e-5, msg=name)


def test_without_the_library_torch_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor) -> Tensor:
        normed = F.layer_norm(F.silu(F.pixel_shuffle(x, 2)).permute(0, 2, 3, 1), (2,)).permute(0, 3, 1, 2)
        return F.gelu(F.max_pool2d(normed, 2))

    model, x = Calls(function), torch.randn(1, 8, 9, 7)
    monkeypatch.setattr(steps, "is_available", lambda: False)
    torch.testing.assert_close(schedule_of(model, x).run((x,)), model(x))


def test_callers_and_numbers_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """More threads than processors, a quota of one, one allowed processor, and eight callers: the same bits."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(2), nn.GroupNorm(2, 8), nn.SiLU()).eval()
    xs, allowed = [torch.randn(1, 3, 20, 18) for _ in range(40)], os.sched_getaffinity(0)
    torch.set_num_threads(4)  # conftest puts it back
    with torch.no_grad():
        schedule = schedule_of(model, xs[0])
        expected = [schedule.run((x,)) for x in xs]
        for x, y in zip(xs, expected, strict=True):
            torch.testing.assert_close(y, model(x), rtol=1e-5, atol=1e-5)
        with ThreadPoolExecutor(8) as callers:
            found = [list(callers.map(lambda x: schedule.run((x,)), xs))]
        with monkeypatch.context() as patch:
            patch.setattr(steps, "most_threads", lambda: 1)
            found.append([schedule.run((x,)) for x in xs])
        os.sched_setaffinity(0, {min(allowed)})
        try:
            found.append([schedule.run((x,)) for x in xs])
        finally:
            os.sched_setaffinity(0, allowed)
    for results in found:
        assert all(map(torch.equal, results, expected))


def test_a_refused_step_ends_a_program() -> None:
    x, y, z = (torch.full((1, 8, 4, 4), value).to(memory_format=torch.channels_last) for value in (1.0, 2.0, 3.0))
    refused = steps.copy_step(y, x)
    refused.numbers[0] = 3  # bytes of an element
    bases = (ctypes.c_void_p * 1)()
    with pytest.raises(InvalidInputError, match="not 1, 2, 4 or 8 bytes"):
        steps.run_array(steps.array_of([steps.copy_step(y, x), refused, steps.copy_step(z, x)]), bases)
    assert torch.equal(y, x)
    assert not torch.equal(z, x)
    steps.run_array(steps.array_of([steps.copy_step(z, x)]), bases)
    assert torch.equal(z, x)


class Difference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.relu(self.first(x)) - F.relu(self.second(y))


def test_arguments_that_share_memory() -> None:
    model, x, y = Difference().eval(), torch.randn(1, 3, 8, 8), torch.randn(1, 3, 8, 8)
    schedule = schedule_of(model, x, y)
    with torch.no_grad():
        for given in ((x, x), (x, y), (y, y), (y, x)):
            torch.testing.assert_close(schedule.run(given), model(*given))


def test_copies_of_a_model_that_has_run(tmp_path: Path) -> None:
    layers = (
        *(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Tanh(), nn.Upsample(scale_factor=2)),
        *(nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(8, 3, 1)),
    )
    model, x = nn.Sequential(*layers, nn.Softmax(2)).eval(), torch.randn(1, 3, 20, 18)
    config = mucudnn.Config(fuse=True, confirm=False, time_limit="10ms", database=tmp_path / "m.sqlite")
    fitted = mucudnn.optimize(model, x, config, progress=False)
    assert isinstance(fitted, BandedModel)
    with torch.no_grad():
        expected = fitted(x)
        for other in (copy.deepcopy(fitted), pickle.loads(pickle.dumps(fitted))):
            assert torch.equal(other(x), expected)


def test_fuse_makes_a_graph(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 1)).eval()
    x = torch.randn(2, 3, 20, 18)
    config = mucudnn.Config(fuse=True, confirm=False, time_limit="10ms", database=tmp_path / "m.sqlite")
    fused = mucudnn.optimize(model, x, config, progress=False)
    assert isinstance(fused, BandedModel)
    (schedule,) = fused.tuned_graphs.schedules.values()
    assert [one.activation for one in schedule.operators if isinstance(one, Convolution)] == ["ReLU", None]
    compiled = torch.compile(fused, backend="eager")
    with torch.no_grad():
        for ours in (fused, compiled):
            torch.testing.assert_close(ours(x), model(x), rtol=1e-5, atol=1e-5)
        before = fused(x)
        model[0].weight.mul_(2)
        with pytest.warns(RuntimeWarning, match="the values of 0.weight have changed"):
            assert torch.equal(fused(x), model(x))
        assert not torch.equal(fused(x), before)


@torch.no_grad()
def test_bands_of_transposed_convolutions_begin_where_their_filters_do() -> None:
    """Bands of what follows need rows from any on: ours of strided transposed ones begin at multiples of the stride."""
    for kernel, stride, padding in ((4, 2, 1), (3, 3, 0), (2, 2, 0)):
        up, last = nn.ConvTranspose2d(4, 8, kernel, stride, padding), nn.Conv2d(8, 4, 3, padding=1)
        model, x = nn.Sequential(up, last).eval(), torch.randn(1, 4, 13, 11)
        captured = capture(model, (x,))
        graph, expected = solver_graph(captured), copy.deepcopy(model).double()(x.double())
        (index,) = (i for i, one in convolutions_of(captured.operators).items() if one.is_transposed)
        chosen = {index: (algorithm("implicit-gemm"),)}
        for bands, keeps in product((3, 5, 7), (True, False)):
            segments = Segment(0, 1, Cut(1, 1)), Segment(1, len(graph), Cut(1, bands, keeps=keeps))
            schedule = Schedule(CostedGraph(captured, graph, chosen, chosen), Plan(0, 0.0, segments))
            torch.testing.assert_close(schedule.run((x,)).double(), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_strides_of_single_channels_cost_no_copy() -> None:
    """An image of one channel has the same elements in both formats: torch writes the result where it belongs."""
    conv, x, allocated = nn.Conv2d(1, 1, 3, padding=1), torch.randn(1, 1, 64, 64), []
    model, compute = Calls(lambda x: x - conv(x), conv), Local.compute

    def measured(self: Local, band: Band) -> None:
        allocated.append(peak_allocated_bytes(lambda: compute(self, band)))

    with mock.patch.object(Local, "compute", measured):
        torch.testing.assert_close(schedule_of(model, x).run((x,)), model(x))
    assert allocated == [0]


def test_what_cannot_run_as_a_graph_is_tuned_with_a_warning(tmp_path: Path) -> None:
    config = mucudnn.Config(fuse=True, confirm=False, time_limit="10ms", database=tmp_path / "m.sqlite")
    x, step = torch.randn(1, 3, 8, 8), torch.no_grad()(lambda model: model(torch.randn(1, 3, 8, 8)))
    hooked = nn.Sequential(nn.Conv2d(3, 8, 3)).eval()
    hooked[0].register_forward_hook(lambda *_: None)
    for model, given, why in (
        (hooked, None, "0 has hooks"),
        (nn.Sequential(nn.Conv2d(3, 8, 3)).eval(), step, "its step is given"),
        (nn.Sequential(nn.Linear(8, 8)).eval(), None, "it has no convolution of images"),
    ):
        with pytest.warns(UserWarning, match=f"the model is tuned, but does not run as a graph: {why}"):
            assert mucudnn.optimize(model, x, config, progress=False, step=given) is model
        assert all(task.problem.operation is Operation.FORWARD for _, task in mucudnn.report(model).layers)
    with pytest.raises(InvalidInputError, match="fuse is for inference, and the model is in training mode"):
        mucudnn.optimize(nn.Sequential(nn.Conv2d(3, 8, 3)), x, config, progress=False)


def test_unknown_steps_are_refused() -> None:
    nothing = (ctypes.c_void_p * 1)()
    with pytest.raises(InvalidInputError, match="a step of a kind that is not known"):
        steps.run_array(steps.array_of([ProgramStep(kind=99)]), nothing)
    with pytest.raises(InvalidInputError, match="a copy of elements"):
        steps.run_array(steps.array_of([ProgramStep(kind=1)]), nothing)
