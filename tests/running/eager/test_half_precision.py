"""Layers in bfloat16 and float16, wholly or by autocast: compiled algorithms run them, bound, past the operators."""

from __future__ import annotations

import pytest
import torch
from support.eager_layers import COMPILED, K, N, choices_of, images, layer, ran, torchs
from torch import Tensor

import mucudnn
from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.kernels.contract.reference import relative_l2_error
from mucudnn.words.config import DEFAULT_MAX_RELATIVE_ERROR
from mucudnn.words.problem import Operation

pytestmark = pytest.mark.skipif(loaded_build().library is None, reason="nothing is compiled")
ALGORITHMS = [(COMPILED,), ("winograd-4x4",), ("winograd-6x6", COMPILED)]
by_algorithms = pytest.mark.parametrize("algorithms", ALGORITHMS, ids=str)
by_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


def derivatives(made: torch.nn.Conv2d, x: Tensor, dy: Tensor) -> list[Tensor]:
    """y, and the gradients of x, the weight and the bias."""
    y = made(x)
    return [y, *torch.autograd.grad(y, [x, *made.parameters()], dy)]


def assert_bound(ours: mucudnn.Conv2d) -> None:
    assert ran(ours.choices) == set(Operation)
    assert ours.choices is not None
    assert all(
        executable is not None and executable.bound is not None for executable in ours.choices.executables.values()
    )


@by_dtype
@by_algorithms
def test_a_layer_in_half_precision(algorithms: tuple[str, ...], dtype: str, registered: list[Operation]) -> None:
    of_dtype: torch.dtype = getattr(torch, dtype)
    ours = layer(choices_of(*algorithms, dtype=dtype)).to(of_dtype)
    x, dy = images().to(of_dtype).requires_grad_(), torch.randn(N, K, 9, 8).to(of_dtype)
    found = derivatives(ours, x, dy)
    exact = derivatives(torchs(ours).double(), x.detach().double().requires_grad_(), dy.double())
    for ours_one, wanted in zip(found, exact, strict=True):
        assert ours_one.dtype is of_dtype
        assert relative_l2_error(ours_one.detach(), wanted.detach()) < DEFAULT_MAX_RELATIVE_ERROR[dtype]
    assert_bound(ours)
    assert registered == []


@by_dtype
@by_algorithms
def test_a_layer_under_autocast(algorithms: tuple[str, ...], dtype: str) -> None:
    """Torch's rounds what it reads to the type; so the definition is of rounded operands."""
    of_dtype: torch.dtype = getattr(torch, dtype)
    ours, x, dy = layer(choices_of(*algorithms, dtype=dtype)), images(True), torch.randn(N, K, 9, 8).to(of_dtype)
    with torch.autocast("cpu", of_dtype):
        y = ours(x)
    found = [y, *torch.autograd.grad(y, [x, *ours.parameters()], dy)]
    rounded = torchs(ours)
    rounded.to(of_dtype).double()
    exact = derivatives(rounded, x.detach().to(of_dtype).double().requires_grad_(), dy.double())
    assert [t.dtype for t in found] == [of_dtype, *[torch.float32] * 3]
    for ours_one, wanted in zip(found, exact, strict=True):
        assert relative_l2_error(ours_one.detach(), wanted.detach()) < DEFAULT_MAX_RELATIVE_ERROR[dtype]
    assert_bound(ours)
