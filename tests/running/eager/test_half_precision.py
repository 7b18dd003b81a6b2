"""Layers in bfloat16 and float16, wholly or by autocast: compiled algorithms run them, bound, past the operators."""

from __future__ import annotations

import pytest
import torch
from support.eager_layers import COMPILED, K, N, choices_of, images, layer, ran, torchs

from mucudnn.core.config import DEFAULT_MAX_RELATIVE_ERROR
from mucudnn.core.problem import Operation
from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.kernels.torch_convolution import relative_l2_error

pytestmark = pytest.mark.skipif(loaded_build().library is None, reason="nothing is compiled")
ALGORITHMS = [(COMPILED,), ("winograd-4x4",), ("winograd-6x6", COMPILED)]
by_algorithms = pytest.mark.parametrize("algorithms", ALGORITHMS, ids=str)
by_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


@by_dtype
@by_algorithms
def test_a_layer_in_half_precision_wholly_or_by_autocast(
    algorithms: tuple[str, ...], dtype: str, registered: list[Operation]
) -> None:
    """Torch's autocast rounds operands to the type; so the definition is of rounded operands."""
    of_dtype: torch.dtype = getattr(torch, dtype)
    for is_cast in (False, True):
        ours, dy = layer(choices_of(*algorithms, dtype=dtype)), torch.randn(N, K, 9, 8).to(of_dtype)
        x = images(True) if is_cast else images().to(of_dtype).requires_grad_()
        rounded = torchs(ours).to(of_dtype).double()
        ours = ours if is_cast else ours.to(of_dtype)
        with torch.autocast("cpu", of_dtype, enabled=is_cast):
            y = ours(x)
        found = [y, *torch.autograd.grad(y, [x, *ours.parameters()], dy)]
        x = x.detach().to(of_dtype).double().requires_grad_()
        y = rounded(x)
        exact = [y, *torch.autograd.grad(y, [x, *rounded.parameters()], dy.double())]
        assert [t.dtype for t in found] == [of_dtype, *[torch.float32 if is_cast else of_dtype] * 3]
        for ours_one, wanted in zip(found, exact, strict=True):
            assert relative_l2_error(ours_one.detach(), wanted.detach()) < DEFAULT_MAX_RELATIVE_ERROR[dtype]
        assert ours.choices is not None
        assert ran(ours.choices) == set(Operation)
        assert all(one is not None and one.bound is not None for one in ours.choices.executables.values())
        assert is_cast or registered == []
