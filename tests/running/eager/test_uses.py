"""What users do with layers: threads, hooks, copies, changes in place; and what runs besides."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.eager_layers import GEOMETRY, images, layer, ran
from torch import Tensor
from torch.nn import functional as F

from mucudnn.core.problem import Operation
from mucudnn.running import operators


def test_threads_compute_beside_each_other() -> None:
    ours, x = layer(), images()
    with ThreadPoolExecutor(4) as pool:
        every = list(pool.map(lambda _: ours(x).detach(), range(40)))
    assert all(torch.equal(y, every[0]) for y in every)


def test_hooks_of_modules_tensors_and_saved_tensors_run() -> None:
    ours, x, seen = layer(), images(True), list[object]()

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.shape)
        return tensor.clone()

    ours.register_forward_hook(lambda *_: seen.append("forward"))
    ours.register_full_backward_hook(lambda *_: seen.append("backward"))
    ours.weight.register_hook(lambda g: seen.append("weight"))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = ours(x)
    y.sum().backward()
    assert seen[:3] == [x.shape, ours.weight.shape, "forward"]
    assert {*seen[3:]} == {"weight", "backward"}


def test_a_graph_can_be_kept_is_gone_otherwise_and_notices_operands_changed_in_place() -> None:
    ours, x = layer(), images()
    y = ours(x).sum()
    first = torch.autograd.grad(y, ours.weight, retain_graph=True)
    assert torch.equal(*first, *torch.autograd.grad(y, ours.weight))
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(y, ours.weight)
    for changed in (x, ours.weight):
        y = ours(x)
        with torch.no_grad():
            changed.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    y = F.relu(ours(x), inplace=True)
    with torch.no_grad():
        ours.bias.zero_()  # type: ignore[union-attr]
    y.sum().backward()


def test_what_is_not_tuned_is_torchs_own() -> None:
    ours = layer()
    assert ours.choices is not None
    x, w = images()[:2], ours.weight
    y = operators.convolve(Operation.FORWARD, x, w, None, *GEOMETRY, ours.choices)
    assert torch.equal(y, F.conv2d(x, w, padding=1))
    assert y.grad_fn is not None
    y.sum().backward()
    assert ran(ours.choices) == set()
    for geometry in (((1,), (1,), (1,), 1), ((1, 1, 1), (0, 0, 0), (1, 1, 1), 1)):
        dimensions = 2 + len(geometry[0])
        x, w = torch.randn([2] * dimensions), torch.randn([2] * dimensions)
        assert operators.computed(Operation.FORWARD, x, w, None, geometry, ours.choices) is None


def test_a_call_computes_without_autograd_and_takes_lists() -> None:
    ours, x = layer(), images()
    assert ours.choices is not None
    lists: tuple[Any, ...] = ([1, 1], [1, 1], [1, 1], 1)
    for _ in range(2):
        y = operators.computed(Operation.FORWARD, x, ours.weight.detach(), ours.bias, lists, ours.choices)
        torch.testing.assert_close(y, ours(x).detach())
    assert len(ours.choices.executables) == 1
