"""Results of a graph share memory exactly where those of the model do, and have their strides."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from support.graphs import graph_of
from torch import Tensor, nn
from torch.nn import functional as F

import mucudnn
from mucudnn.graph.operators.operator import Barrier
from mucudnn.graph.schedule import Schedule
from mucudnn.kernels.memory import peak_allocated_bytes
from mucudnn.running.workspace import BorrowedWorkspace, release_workspaces, workspace_of


class Returns(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.conv, self.function = nn.Conv2d(3, 4, 3, padding=1), function
        self.register_buffer("known", torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.function(self, x)


def with_y(made: Callable[[Tensor], tuple[Tensor, ...]]) -> Callable[[Any, Tensor], tuple[Tensor, ...]]:
    return lambda model, x: made(model.conv(x))


def pixels_read_twice(y: Tensor) -> tuple[Tensor, ...]:
    pixels = F.adaptive_avg_pool2d(y, 1)
    return pixels.flatten(1), (pixels * 2).flatten(1), (y * pixels.sigmoid())


RESULTS: dict[str, Callable[[Any, Tensor], tuple[Tensor, ...]]] = {
    "clone of the input": lambda model, x: (model.conv(x), x.clone()),
    "input": lambda model, x: (model.conv(x), x, x.contiguous(), x.detach()),
    "dropout of the input": lambda model, x: (model.conv(x), F.dropout(x, 0.5, False)),
    "channels of the input": lambda model, x: (model.conv(x), x[:, :2], x.flatten(2)),
    "bits of the input": lambda model, x: (model.conv(x), x.view(torch.int32)),
    "buffer": lambda model, x: (model.conv(x), model.known),
    "product of a buffer": lambda model, x: (model.conv(x), model.known * 3),
    "copies of a buffer": lambda model, x: (model.conv(x), model.known.clone(), model.known.clone()),
    "weight": lambda model, x: (model.conv(x), model.conv.weight, model.conv.weight.flatten(1)),
    "same twice": with_y(lambda y: (y, y)),
    "result and its copy": with_y(lambda y: (y, y.clone(), y.clone())),
    "parts": with_y(lambda y: tuple(y.chunk(2, 1))),
    "overlapping views": with_y(lambda y: (y[:, :3], y[:, 1:], y.flatten(2))),
    "pixels": with_y(lambda y: (y.mean((2, 3), keepdim=True).flatten(1),)),
    "pixels and what reads them": with_y(pixels_read_twice),
    "pixels twice": with_y(lambda y: (y.mean((2, 3), keepdim=True), y.mean((2, 3), keepdim=True).flatten(1))),
    "copies of parts": with_y(lambda y: (y[:, :3].clone(), y[:, 1:].clone(), y.relu())),
}


@torch.no_grad()
def test_pixels_are_written_where_the_caller_gets_them() -> None:
    x = torch.randn(2, 3, 8, 7)
    for name, expected in (("pixels", False), ("pixels and what reads them", True)):
        (schedule,) = graph_of(Returns(RESULTS[name]), x).tuned_graphs.schedules.values()
        assert schedule is not None
        assert any(isinstance(operator, Barrier) for operator in schedule.operators) == expected


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*runs as it was")
def test_results_share_memory_exactly_where_the_models_do() -> None:
    for (name, function), memory_format in zip(RESULTS.items(), cycle((torch.channels_last, torch.contiguous_format))):
        x = torch.randn(2, 3, 8, 7).contiguous(memory_format=memory_format)
        model = Returns(function)
        fitted = graph_of(model, x)
        fitted(x)
        for changed in range(len(model(x))):
            found = []
            for ours in (model, fitted):
                own, given = copy.deepcopy(model.state_dict()), x.clone()
                results = ours(given)
                if results[changed].is_floating_point():
                    results[changed].add_(1)
                else:
                    results[changed].fill_(1)
                again = [one.clone() for one in ours(given)]
                found.append([*results, given, *(one.clone() for one in model.state_dict().values()), *again])
                model.load_state_dict(own)
            for theirs, mine in zip(*found, strict=True):
                torch.testing.assert_close(mine, theirs, msg=f"{name}, {changed}")
            for theirs, mine in zip(model(x), fitted(x), strict=True):
                assert mine.stride() == theirs.stride(), name


@torch.no_grad()
def test_every_result_has_the_strides_of_the_models_for_arguments_of_any_strides(runs: list[Schedule]) -> None:
    def results(y: Tensor) -> tuple[Tensor, ...]:
        mean = y.mean(1, keepdim=True)
        of_images = (y > 0, y.sort(1)[1], F.max_pool2d(y, 2, return_indices=True)[1], y.long(), y.double(), mean)
        of_parts = (y[:, ::2] + 1, (y > 0)[:, ::2], (y > 0)[0], torch.cat((y, y)), (y > 0).permute(0, 2, 3, 1))
        of_views = (mean.expand_as(y), (mean + 1).expand_as(y), y.unfold(2, 3, 1), (y > 0).flatten(2), y[:, ::2])
        return *of_images, *of_parts, *of_views, y.sum(1, keepdim=True), torch.complex(y, y)

    x = torch.randn(2, 3, 8, 7)
    formats = torch.contiguous_format, torch.channels_last
    for memory_format in formats:
        model = Returns(lambda model, x: (*results(model.conv(x)), x[:, 1:]))
        fitted = graph_of(model, x.contiguous(memory_format=memory_format))
        for other in formats:
            given = x.contiguous(memory_format=other)
            for _ in range(2):
                for number, (mine, theirs) in enumerate(zip(fitted(given), model(given), strict=True)):
                    assert mine.stride() == theirs.stride(), (memory_format, other, number)
                    torch.testing.assert_close(mine, theirs, rtol=1.3e-6, atol=1e-5)  # float64 has float32's values
    assert len(runs) == 8


@torch.no_grad()
def test_nobody_else_gets_the_memory_of_a_call() -> None:
    cpu = torch.device("cpu")
    with BorrowedWorkspace(10_000, cpu) as arena:
        inside = workspace_of(5_000, cpu, keeps=True)
        assert inside.data_ptr() != arena.data_ptr()
        with BorrowedWorkspace(5_000, cpu) as nested:
            assert nested.data_ptr() == inside.data_ptr()
            assert workspace_of(5_000, cpu, keeps=True).data_ptr() not in (nested.data_ptr(), arena.data_ptr())
    assert workspace_of(5_000, cpu, keeps=True).data_ptr() == arena.data_ptr()


class ComputedFilter(nn.Module):
    """A convolution that is a barrier, since its filter is computed in the call, between others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(y + F.conv2d(y, self.inner.weight * y.mean(), self.inner.bias, padding=1))


@torch.no_grad()
def test_operators_of_ours_inside_a_graph(tmp_path: Path) -> None:
    config = mucudnn.Config(database=tmp_path / "m.sqlite", time_limit="200ms", confirm=False)
    model, x = ComputedFilter().eval(), torch.randn(2, 8, 30, 28).contiguous(memory_format=torch.channels_last)
    expected = model(x)
    fitted = graph_of(model, x)
    with mucudnn.tuned(config):
        for _ in range(3):
            torch.testing.assert_close(fitted(x), expected)
    layers = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), mucudnn.Conv2d(8, 8, 5), nn.Conv2d(8, 4, 3)).eval()
    expected = layers(x)
    mucudnn.optimize(layers[2], torch.randn(2, 8, 28, 26).contiguous(memory_format=torch.channels_last), config)
    fitted = graph_of(layers, x)
    (schedule,) = fitted.tuned_graphs.schedules.values()
    assert schedule is not None
    schedule.count((x,))
    for _ in range(2):
        torch.testing.assert_close(fitted(x), expected)
    release_workspaces()
    gc.collect()
    found: list[Tensor] = []
    peak = peak_allocated_bytes(lambda: found.append(fitted(x)))
    assert peak - found[0].nbytes <= schedule.needed_bytes, "the budget counts what they allocate"
