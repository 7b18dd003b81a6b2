"""``mucudnn.Conv3d`` beside ``torch.nn.Conv3d``, by each algorithm for volumes; nothing is measured here."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from support import compiled
from torch import Tensor, nn

import mucudnn
from mucudnn.core.problem import MemoryFormat, Operation
from mucudnn.core.records import Configuration, MicroConfig
from mucudnn.kernels.memory import format_of
from mucudnn.kernels.registry import algorithm
from mucudnn.running.choices import Choices
from mucudnn.running.modules import make_tunable
from mucudnn.running.problems import problem_of_call
from mucudnn.tuning.trace import trace

N, SIZE = 3, (5, 9, 8)
GEOMETRIES: dict[str, dict[str, Any]] = {
    "frames-implicit-gemm": {"kernel_size": 3, "stride": (2, 1, 2), "padding": (2, 1, 0), "dilation": (1, 2, 1)},
    "frames-winograd-4x4": {"kernel_size": 3, "padding": "same"},
    "patches": {"kernel_size": (2, 3, 4), "stride": (2, 3, 4)},
    "native-other-format": {"kernel_size": (3, 1, 2), "groups": 2, "padding": (1, 0, 1), "padding_mode": "circular"},
}


def pair(name: str, memory_format: MemoryFormat) -> tuple[nn.Conv3d, mucudnn.Conv3d, Tensor]:
    """Torch's module, ours with the same parameters, all of whose operations an algorithm computes, and an input."""
    if name.startswith("frames-"):
        compiled.algorithm(name.removeprefix("frames-"))  # or this build has none
    torchs = nn.Conv3d(4, 6, **GEOMETRIES[name])
    torchs = torchs.to(memory_format=format_of(memory_format, 5))  # type: ignore[call-overload]
    x = torch.randn(N, 4, *SIZE).contiguous(memory_format=format_of(memory_format, 5))
    (call,) = trace(torchs, x)
    ours = copy.deepcopy(torchs)
    make_tunable(ours)
    assert isinstance(ours, mucudnn.Conv3d)
    sizes = (2, 1) if algorithm(name).supports_micro_batch(call.problem, 1) is None else (3,)
    chosen = Configuration(tuple(MicroConfig(name, n) for n in sizes), time_s=1e-3, workspace_bytes=0)
    ours.choices = Choices.of({call.problem.with_operation(one): {N: chosen} for one in Operation})
    return torchs, ours, x


def results(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    x = x.detach().requires_grad_()
    y = module(x)
    return y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])


def ran(module: mucudnn.Conv3d) -> list[Operation]:
    assert module.choices is not None
    return [one.problem.operation for one in module.choices.executables.values() if one is not None]


@pytest.mark.parametrize("memory_format", MemoryFormat)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_training_gives_torchs_result_and_gradients(name: str, memory_format: MemoryFormat) -> None:
    torchs, ours, x = pair(name, memory_format)
    assert_close = torch.testing.assert_close
    assert_close(results(ours, x), results(torchs, x), rtol=1e-4, atol=1e-4)
    assert sorted(ran(ours)) == sorted(Operation)
    assert all(
        made.stride() == given.stride() for made, given in zip(results(ours, x), results(torchs, x), strict=True)
    )
    assert_close(results(pickle.loads(pickle.dumps(ours)), x), results(torchs, x), rtol=1e-4, atol=1e-4)
    one = ours(x[0])  # another batch size, without its dimension: torch's own runs
    assert_close(one, torchs(x[0]))
    gradient = torch.autograd.grad(torchs(x).sum(), torchs.weight)[0]
    second = torch.autograd.grad(ours(x).sum(), ours.weight, create_graph=True)[0]
    assert_close(second, gradient, rtol=1e-4, atol=1e-4)


def test_registered_operators_take_volumes() -> None:
    torchs, ours, x = pair("frames-winograd-4x4", MemoryFormat.CONTIGUOUS)
    graph = torch.compile(ours, backend="aot_eager")
    torch.testing.assert_close(results(graph, x), results(torchs, x), rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours(x).dtype is torch.bfloat16
    assert ran(ours)


def test_other_dimensions_are_no_problem_of_ours() -> None:
    geometry = (1, 1, 1), (0, 0, 0), (1, 1, 1), 1
    x, w = torch.zeros(2, 3, 4, 5, 6), torch.zeros(4, 3, 1, 1, 1)
    problem = problem_of_call(x, w, *geometry)
    assert problem is not None
    assert problem.x_shape(2) == tuple(x.shape)
    assert problem.y_shape(2) == (2, 4, 4, 5, 6)
    assert problem_of_call(x[:, :, 0], w, *geometry) is None
    assert problem_of_call(x[..., None], w[..., None], *geometry) is None
    assert problem_of_call(x, w, (1, 1), (0, 0), (1, 1), 1) is None
