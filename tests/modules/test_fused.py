"""Fused convolutions: what follows is computed inside the algorithm where it can be, and by torch where not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.problems.fused_layers import FORMATS, N, exact, images, layer
from torch import Tensor

from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.kernels.contract.epilogue import ACTIVATIONS, Epilogue
from mucudnn.modules.fused import FusedConvolution
from mucudnn.words.problem import MemoryFormat

pytestmark = pytest.mark.skipif(loaded_build().library is None, reason="nothing is compiled, so nothing is fused")

# Micro-batches, and for how many samples each time torch computes the epilogue
CUTS = {
    "all inside, bound": ((("winograd-4x4", 2), ("implicit-gemm", 2), ("winograd-4x4", 1)), []),
    "some after it": ((("winograd-4x4", 2), ("gemm", 3)), [3]),
}


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Samples of each epilogue that torch computes."""
    sizes: list[int] = []
    apply = Epilogue.apply

    def counted(epilogue: Epilogue, y: Tensor) -> Tensor:
        sizes.append(len(y))
        return apply(epilogue, y)

    monkeypatch.setattr(Epilogue, "apply", counted)
    return sizes


@torch.no_grad()
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("keeps_filter", [False, True])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("memory_format", MemoryFormat)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_every_micro_batch_has_its_epilogue(
    activation: str | None,
    memory_format: MemoryFormat,
    adds: bool,
    keeps_filter: bool,
    cut: str,
    by_torch: list[int],
) -> None:
    parts, after_it = CUTS[cut]
    module = layer(*parts, activation=activation, memory_format=memory_format, keeps_filter=keeps_filter)
    x = images(memory_format)
    added = images(memory_format) if adds else None
    y = module(x, added)
    assert by_torch == after_it
    assert y.is_contiguous(memory_format=FORMATS[memory_format])
    torch.testing.assert_close(y.double(), exact(module, x, added), rtol=1e-4, atol=1e-5)


BY_TORCH: dict[str, Callable[[FusedConvolution], object]] = {
    "a hook on the convolution": lambda module: module.convolution.register_forward_hook(lambda *_: None),
    "no algorithm that computes it": lambda module: setattr(module, "convolution", layer(("gemm", 5)).convolution),
    "nothing tuned": lambda module: setattr(module.convolution, "choices", None),
}


@torch.no_grad()
@pytest.mark.parametrize("change", BY_TORCH)
def test_torch_computes_what_no_algorithm_may(change: str, by_torch: list[int]) -> None:
    module = layer(("winograd-4x4", N))
    x, added = images(), images()
    module(x, added)
    assert by_torch == []
    BY_TORCH[change](module)
    y = module(x, added)
    assert by_torch == [N]
    torch.testing.assert_close(y.double(), exact(module, x, added), rtol=1e-4, atol=1e-5)


ADDED: dict[str, tuple[Callable[[], Any], bool]] = {
    "as y": (images, True),
    "in the other format": (lambda: images(MemoryFormat.CHANNELS_LAST), True),
    "every other of more": (lambda: torch.randn(2 * N, 9, 13, 11)[::2], True),
    "of one sample": (lambda: torch.randn(9, 13, 11), False),
    "of more samples": (lambda: torch.randn(2, N, 9, 13, 11), False),
    "of another dtype": (lambda: images().double(), False),
    "a number": (lambda: 1.5, False),
}


@torch.no_grad()
@pytest.mark.parametrize("added", ADDED)
def test_what_is_added_may_be_anything(added: str, by_torch: list[int]) -> None:
    module, x = layer(("winograd-4x4", N)), images()
    make, is_inside = ADDED[added]
    other = make()
    y = module(x, other)
    assert (by_torch == []) == is_inside
    expected = exact(module, x, other)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-5)
    assert y.dtype is (x + other).dtype


def test_gradients_are_torchs(by_torch: list[int]) -> None:
    module, x, added = layer(("winograd-4x4", N)), images().requires_grad_(), images().requires_grad_()
    module(x, added).sum().backward()
    assert by_torch == [N]
    gradients, x.grad, added.grad = (x.grad, added.grad), None, None
    exact(module, x, added).sum().backward()
    for ours, expected in zip(gradients, (x.grad, added.grad), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_it_may_add_its_own_input() -> None:
    module, x = layer(("winograd-4x4", N)), images()
    expected = exact(module, x, x.clone())
    torch.testing.assert_close(module(x, x).double(), expected, rtol=1e-4, atol=1e-5)
