"""Calls of fused convolutions that the extension makes: the same as in Python, and only where nothing has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from support.problems.fused_layers import N, exact, images, layer
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.kernels.contract.epilogue import ACTIVATIONS, Epilogue
from mucudnn.modules.conv2d import Conv2d
from mucudnn.modules.fused import FusedConvolution
from mucudnn.running import executable
from mucudnn.running.eager import hot_path
from mucudnn.running.workspace import release_workspaces
from mucudnn.words.problem import MemoryFormat

pytestmark = pytest.mark.skipif(
    loaded_build().library is None or not hot_path.is_built,
    reason="nothing is compiled, or the extension was not built",
)

PARTS = (("winograd-4x4", 2), ("implicit-gemm", 2), ("winograd-4x4", 1))


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
    release_workspaces()


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Samples of each call that the extension has left to Python."""
    calls: list[int] = []
    fused = Conv2d.fused

    def counted(module: Conv2d, x: Tensor, epilogue: Epilogue) -> Tensor | None:
        calls.append(len(x))
        return fused(module, x, epilogue)

    monkeypatch.setattr(Conv2d, "fused", counted)
    return calls


def of(module: FusedConvolution) -> Conv2d:
    convolution = module.convolution
    assert isinstance(convolution, Conv2d)
    return convolution


@pytest.mark.parametrize("keeps_filter", [False, True])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("memory_format", MemoryFormat)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_a_call_that_is_known_needs_no_python(
    activation: str | None, memory_format: MemoryFormat, adds: bool, keeps_filter: bool, in_python: list[int]
) -> None:
    module = layer(*PARTS, activation=activation, memory_format=memory_format, keeps_filter=keeps_filter)
    x, added = images(memory_format), images(memory_format) if adds else None
    expected = of(module).fused(x, Epilogue(activation, added))
    assert expected is not None
    assert in_python == [N]
    y = module(x, added)
    assert in_python == [N]
    assert torch.equal(y, expected)
    assert y.stride() == expected.stride()


CHANGES: dict[str, Callable[[Conv2d], object]] = {
    "in place": lambda conv: conv.weight.mul_(2),
    "unseen by torch": lambda conv: conv.weight.data.mul_(2),
    "by numpy": lambda conv: conv.weight.detach().numpy().__setitem__(3, 1),
    "another filter": lambda conv: setattr(conv, "weight", nn.Parameter(torch.randn(9, 9, 3, 3))),
    "another bias": lambda conv: setattr(conv, "bias", nn.Parameter(torch.randn(9))),
    "one thread": lambda conv: torch.set_num_threads(1),
    "workspaces released": lambda conv: release_workspaces(),
}


@pytest.mark.parametrize("keeps_filter", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_every_call_sees_what_has_changed(change: str, keeps_filter: bool) -> None:
    module, x, added = layer(*PARTS, keeps_filter=keeps_filter), images(), images()
    threads = torch.get_num_threads()
    try:
        module(x, added)
        CHANGES[change](of(module))
        for _ in range(2):
            torch.testing.assert_close(module(x, added).double(), exact(module, x, added), rtol=1e-4, atol=1e-4)
    finally:
        torch.set_num_threads(threads)


def test_what_is_kept_is_given_back() -> None:
    module = layer(*PARTS, keeps_filter=True)
    module(images(), images())
    filters = of(module).filter_cache
    assert filters is not None
    prepared = [buffer.nbytes for _, buffer in filters._prepared.values()]
    assert [buffer.nbytes for *_, buffer in filters.kept.values()] == prepared
    release_workspaces()
    assert not filters.kept


@pytest.mark.parametrize("of_all", [False, True])
def test_hooks_are_called(of_all: bool) -> None:
    module, x, added = layer(*PARTS), images(), images()
    module(x, added)
    seen: list[object] = []
    register = register_module_forward_hook if of_all else of(module).register_forward_hook
    handle = register(lambda called, *_: seen.append(called))
    try:
        module(x, added)
    finally:
        handle.remove()
    assert of(module) in seen


def test_a_padding_that_is_no_zeros_is_seen() -> None:
    module, x, added = layer(*PARTS), images(), images()
    module(x, added)
    of(module).padding_mode = "circular"
    padded = nn.functional.pad(x, (1, 1, 1, 1), mode="circular")
    y = nn.functional.conv2d(padded, of(module).weight, of(module).bias)
    torch.testing.assert_close(module(x, added), (y + added).relu(), rtol=1e-4, atol=1e-5)


def test_large_results_are_made_in_python(monkeypatch: pytest.MonkeyPatch, in_python: list[int]) -> None:
    advised: list[int] = []
    monkeypatch.setattr(executable, "is_advised", lambda size_bytes: True)
    monkeypatch.setattr(executable, "on_huge_pages", lambda tensor: advised.append(tensor.nbytes) or tensor)
    module, x, added = layer(*PARTS, keeps_filter=True), images(), images()
    first = module(x, added)
    assert torch.equal(module(x, added), first)
    assert advised == [first.nbytes] * 2
    assert in_python == [N]
