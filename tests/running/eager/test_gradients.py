"""Values and gradients of every order, of operands as they come."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.eager_layers import COMPILED, GEOMETRY, TOLERANCE, K, N, choices_of, images, layer, ran, torchs
from torch import Tensor
from torch.nn import functional as F

from mucudnn.core.problem import MemoryFormat, Operation
from mucudnn.running import operators


def derivatives(
    convolve: Callable[[Tensor, Tensor, Tensor], Tensor], operands: list[Tensor], directions: list[Tensor]
) -> list[Tensor]:
    """y, and what is left when it is differentiated once, twice and three times, by all operands that can be."""
    leaves = [t.clone().requires_grad_() for t in operands]
    y = convolve(*leaves)
    found = [y]
    scalar = (y * y.sigmoid() * directions[0]).sum()
    for _ in range(3):
        gradients = torch.autograd.grad(scalar, leaves, create_graph=True)
        found += gradients
        scalar = sum(((g * g.sigmoid()).sum() for g in gradients), torch.zeros((), dtype=y.dtype))
    return found


@pytest.mark.parametrize("memory_format", MemoryFormat)
@pytest.mark.parametrize("algorithms", [(COMPILED,), ("winograd-2x2",), ("winograd-2x2", COMPILED), ("gemm",)], ids=str)
def test_derivatives_of_three_orders_are_those_of_float64(
    algorithms: tuple[str, ...], memory_format: MemoryFormat, registered: list[Operation]
) -> None:
    chosen = choices_of(*algorithms, memory_format=memory_format)
    made = layer(chosen)
    assert made.bias is not None
    x = images()
    if memory_format is MemoryFormat.CHANNELS_LAST:
        x = x.contiguous(memory_format=torch.channels_last)
    operands = [x, made.weight.detach(), made.bias.detach()]
    directions = [torch.randn(N, K, 9, 8)]

    def ours(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return operators.convolve(Operation.FORWARD, x, w, bias, *GEOMETRY, chosen)

    def definition(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(x, w, bias, padding=1)

    found = derivatives(ours, operands, directions)
    wanted = derivatives(definition, [t.double() for t in operands], [t.double() for t in directions])
    for ours_one, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours_one.double(), exact, rtol=1e-3, atol=1e-3 * float(exact.detach().abs().max()))
    assert ran(chosen) == set(Operation)
    assert registered == []


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_and_its_gradients_are_torchs(bias: bool) -> None:
    ours = layer(bias=bias)
    theirs, x, dy = torchs(ours), images(True), torch.randn(N, K, 9, 8)
    results = []
    for each in (ours, theirs):
        y = each(x)
        results.append([y, *torch.autograd.grad(y, [x, *each.parameters()], dy)])
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, **TOLERANCE)
        assert mine.stride() == expected.stride()
    assert ran(ours.choices) == set(Operation)


@pytest.mark.parametrize("wanting", ["x", "weight", "bias"])
def test_only_the_gradient_that_is_asked_for_is_computed(wanting: str) -> None:
    ours, x = layer(), images()
    ours.requires_grad_(False)
    tensor = x if wanting == "x" else ours.get_parameter(wanting)
    tensor.requires_grad_()
    y = ours(x)
    y.sum().backward()
    assert [t is tensor for t in (x, *ours.parameters()) if t.grad is not None] == [True]
    expected = {"x": {Operation.BACKWARD_DATA}, "weight": {Operation.BACKWARD_FILTER}, "bias": set()}[wanting]
    assert ran(ours.choices) == {Operation.FORWARD} | expected


def test_nothing_is_recorded_where_nothing_wants_a_gradient(registered: list[Operation]) -> None:
    ours, x = layer(), images()
    ours.requires_grad_(False)
    assert ours(x).grad_fn is None
    ours.requires_grad_(True)
    with torch.no_grad():
        assert not ours(x).requires_grad
    with torch.inference_mode():
        y = ours(x.clone())  # a tensor made in inference mode is as plain as any
    assert y.is_inference()
    torch.testing.assert_close(y, torchs(ours)(x).detach(), **TOLERANCE)
    assert ran(ours.choices) == {Operation.FORWARD}
    assert registered == []
