"""How far NaN and infinities spread: at least as far as the definition says, and no further where that is promised."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mucudnn
from mucudnn.kernels.registry import algorithm, algorithms
from mucudnn.kernels.torch_ops import gemm
from mucudnn.running.operators import Choices
from mucudnn.testing.checks import (
    check_locality,
    check_locality_of_padding,
    check_nothing_is_hidden,
    torchs_spoilt_result,
)
from mucudnn.testing.geometries import GEOMETRIES, ONE_OF_EACH_KIND, geometry
from mucudnn.testing.not_finite import IMAGE, dependent
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.words.results import Configuration, MicroConfig

EVERY = [a.name for a in algorithms()]


def cases(
    names: Iterable[str],
    geometries: Iterable[str],
    dtypes: Iterable[str] = ("float32",),
    operations: Iterable[Operation] = Operation,
) -> list[Any]:
    """Everything that is supported, as test parameters (name, problem)."""
    parameters = []
    for name, operation, key, memory_format, dtype in product(names, operations, geometries, MemoryFormat, dtypes):
        problem, _, _ = geometry(key, operation, memory_format=memory_format, dtype=dtype)
        if algorithm(name).supports(problem) is None:
            parameters.append(pytest.param(name, problem, id=f"{name}-{operation}-{key}-{memory_format}-{dtype}"))
    return parameters


def local(parameters: Iterable[Any]) -> list[Any]:
    """Those for which the algorithm declares it."""
    return [parameter for parameter in parameters if algorithm(parameter.values[0]).is_local(parameter.values[1])]


@pytest.mark.parametrize(
    ("name", "problem"), cases(EVERY, GEOMETRIES) + cases(EVERY, ONE_OF_EACH_KIND, ("bfloat16", "float16"))
)
def test_what_is_not_finite_is_never_hidden(name: str, problem: ConvProblem) -> None:
    """So whoever looks for it, as loss scaling does, finds it."""
    check_nothing_is_hidden(algorithm(name), problem)


@pytest.mark.parametrize(("name", "problem"), local(cases(EVERY, GEOMETRIES)))
def test_local_algorithms_spoil_what_torch_does(name: str, problem: ConvProblem) -> None:
    """And no more, with infinities of the same sign."""
    image = IMAGE[problem.operation]
    check_locality(algorithm(name), problem)
    assert torch.equal(~torchs_spoilt_result(problem, image).isfinite(), dependent(problem, image))


@pytest.mark.parametrize(("name", "problem"), local(cases(EVERY, ONE_OF_EACH_KIND, ("float64", "bfloat16", "float16"))))
def test_in_other_dtypes_local_algorithms_spoil_no_more_than_torch_does(name: str, problem: ConvProblem) -> None:
    """In bfloat16 torch's own spoils more than the definition says where the number of channels is odd."""
    check_locality(algorithm(name), problem)


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


@pytest.mark.parametrize(("name", "problem"), local(cases(EVERY, GEOMETRIES, operations=[Operation.BACKWARD_FILTER])))
def test_local_algorithms_spoil_no_more_of_dw_than_zeros_of_the_padding_explain(
    name: str, problem: ConvProblem
) -> None:
    """0 * NaN is NaN, and some of torch's own backends multiply the padding."""
    check_locality_of_padding(algorithm(name), problem)
    allowed = dependent(problem, "y", on_padding=True)
    assert not (~torchs_spoilt_result(problem, "y").isfinite() & ~allowed).any()


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
    ran = {recipe.problem.operation for recipe in layer.choices.recipes.values() if recipe is not None}
    assert ran == (set() if name == "native" else set(Operation))
