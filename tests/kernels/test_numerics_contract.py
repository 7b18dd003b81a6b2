"""How far NaN and infinities spread: at least as far as the definition says, and no further where that is promised."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mucudnn
from mucudnn.kernels.registry import algorithm, algorithms
from mucudnn.kernels.torch_ops import gemm
from mucudnn.running.choices import Choices
from mucudnn.testing.checks import (
    IMAGE,
    dependent,
    torchs_spoilt_result,
)
from mucudnn.testing.geometries import GEOMETRIES, geometry
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.words.results import Configuration, MicroConfig

EVERY = [a.name for a in algorithms()]


@pytest.mark.parametrize("beyond", ["rows", "columns"])
def test_gemm_is_local_in_half_precision_where_torchs_product_is(monkeypatch: pytest.MonkeyPatch, beyond: str) -> None:
    """Here that of bfloat16 gives each row, or column, what the next one has of zeros times NaN; others do not."""

    def multiply(operation: Operation, x: Tensor, w: Tensor, y: Tensor) -> None:
        left, right, out = gemm._factors(operation, x, w, y)
        exact = left.double() @ right.double()
        if x.dtype is torch.bfloat16:
            exact += 0 * exact.roll(-1, 1 if beyond == "rows" else 2)
        out.copy_(exact)

    monkeypatch.setattr(gemm, "multiply", multiply)
    gemm._product_is_local.cache_clear()
    dtypes = ("float32", "float16", "bfloat16")
    assert [gemm.GEMM.is_local(forward(3, 8, dtype)) for dtype in dtypes] == [True, True, False]
    gemm._product_is_local.cache_clear()


def test_torchs_own_spoils_what_the_definition_says() -> None:
    """In float32; of dw what zeros of the padding explain too, since some of its backends multiply them by NaN."""
    for operation, key, memory_format in product(Operation, GEOMETRIES, MemoryFormat):
        problem, _, _ = geometry(key, operation, memory_format=memory_format)
        image = IMAGE[operation]
        assert torch.equal(~torchs_spoilt_result(problem, image).isfinite(), dependent(problem, image)), problem
        if operation is Operation.BACKWARD_FILTER:
            allowed = dependent(problem, "y", on_padding=True)
            assert not (~torchs_spoilt_result(problem, "y").isfinite() & ~allowed).any(), problem


# Loss scaling


def scaled_cases() -> list[Any]:
    """(name, filter size, image size, dtype): the smallest that the algorithm computes, in each dtype of training."""
    parameters = []
    for name, dtype in product(EVERY, ("float32", "float16", "bfloat16")):
        sizes = [(3, 8), (5, 8), (3, 40)]
        problems = {size: forward(*size, dtype) for size in sizes}
        fitting = [size for size, problem in problems.items() if algorithm(name).supports(problem) is None]
        parameters += [pytest.param(name, *size, dtype, id=f"{name}-{dtype}") for size in fitting[:1]]
    return parameters


def forward(r: int, height: int, dtype: str) -> ConvProblem:
    return ConvProblem(Operation.FORWARD, 4, height, height, 4, r, r, padding=(r // 2, r // 2), dtype=dtype)


def tuned_layer(name: str, problem: ConvProblem) -> mucudnn.Conv2d:
    """On four samples, in every operation, it runs this algorithm; without a bias, whose gradient is torch's."""
    layer = mucudnn.Conv2d(problem.c, problem.k, problem.r, padding=problem.padding, bias=False)
    configuration = Configuration((MicroConfig(name, 4),), time_s=1.0, workspace_bytes=0)
    layer.choices = Choices.of({problem.with_operation(operation): {4: configuration} for operation in Operation})
    return layer


@pytest.mark.parametrize(("name", "r", "height", "dtype"), scaled_cases())
def test_loss_scaling_finds_the_overflow_and_skips_the_step(name: str, r: int, height: int, dtype: str) -> None:
    """As with torch: the layer's own weight through dw, and that of the layer before through dx."""
    torch.manual_seed(0)
    problem, half = forward(r, height, dtype), dtype != "float32"
    before, layer = nn.Conv2d(3, 4, 1), tuned_layer(name, problem)
    optimizers = [torch.optim.SGD(module.parameters(), lr=1e-3) for module in (before, layer)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, backoff_factor=2.0**-60)
    x, weights = torch.randn(4, 3, height, height), torch.full((4, 4, height, height), 2.0**-20)
    weights[1, 2, 3, 3] = 8.0  # one element of the gradient overflows, the others do not
    initial = [module.weight.detach().clone() for module in (before, layer)]

    def step() -> None:
        with torch.autocast("cpu", getattr(torch, dtype if half else "bfloat16"), enabled=half):
            y = layer(before(x))
        scaler.scale((y.float() * weights).sum()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()

    step()
    assert all(module.weight.equal(w) for module, w in zip((before, layer), initial, strict=True))
    assert scaler.get_scale() == 2.0**66
    for _ in range(2):  # in float16 the first of them overflows still
        step()
    assert scaler.get_scale() == (2.0**6 if dtype == "float16" else 2.0**66)
    for module, w in zip((before, layer), initial, strict=True):
        assert module.weight.isfinite().all()
        assert not module.weight.equal(w)
    assert layer.choices is not None
    ran = {executable.problem.operation for executable in layer.choices.executables.values() if executable is not None}
    assert ran == (set() if name == "native" else set(Operation))
