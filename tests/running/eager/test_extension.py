"""What the extension asks of tensors: what runs a call, what is plain, and the results that it makes by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.eager_layers import COMPILED, TOLERANCE, C, choices_of, images, layer, ran
from torch import Tensor
from torch.nn import functional as F

from mucudnn.core.problem import Operation
from mucudnn.running.eager import hot_path

CALL: dict[str, Any] = {
    "operation": Operation.FORWARD,
    "x": torch.zeros(2, 4, 9, 8),
    "w": torch.zeros(6, 4, 3, 3),
    "third": torch.zeros(6),
    "stride": (1, 1),
    "padding": (1, 1),
    "dilation": (1, 1),
    "groups": 1,
}
OTHERS: dict[str, list[Any]] = {
    "operation": [Operation.BACKWARD_DATA, Operation.BACKWARD_FILTER],
    "x": [
        *(torch.zeros(3, 4, 9, 8), torch.zeros(2, 4, 8, 9), torch.zeros(2, 4, 9, 8, dtype=torch.bfloat16)),
        torch.zeros(2, 4, 9, 8).contiguous(memory_format=torch.channels_last),
    ],
    "w": [torch.zeros(6, 4, 3, 1), torch.zeros(6, 4, 3, 3, dtype=torch.float64), torch.zeros(6, 4, 9).view(6, 4, 9, 1)],
    "third": [None, torch.zeros(5), torch.zeros(6, dtype=torch.float64), torch.zeros(6, 1)],
    "stride": [(1, 2), (2, 1)],
    "padding": [(1, 2), (2, 1)],
    "dilation": [(1, 2), (2, 1)],
    "groups": [2],
}

only_native = pytest.mark.skipif(hot_path.extension is None, reason="the extension was not built")


@pytest.fixture
def names_of_torch() -> Iterator[None]:
    yield
    hot_path.set_up()


def key(**other: Any) -> bytes | None:
    return hot_path.known_key(*{**CALL, **other}.values())


@only_native
def test_calls_have_the_same_key_where_nothing_differs_that_decides() -> None:
    assert key() == key(x=torch.ones(2, 4, 9, 8), stride=[1, 1]) is not None
    every = [key(), *(key(**{name: other}) for name, others in OTHERS.items() for other in others)]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        every.append(key())
    finally:
        torch.set_num_threads(threads)
    assert None not in every
    assert len(set(every)) == len(every)


@only_native
@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(2, 4, 9, 8, device="meta")},
        {"x": torch.zeros(2, 4, 9, 8).to_sparse()},
        {"x": torch.zeros(1, 2, 4, 9, 8)},
        {"x": torch.zeros(2, 4, 9, 8).as_subclass(type("Special", (Tensor,), {}))},
        {"stride": 1},
        {"padding": (1,)},
        {"padding": (-1, 1)},
        {"groups": 1.0},
    ],
    ids=str,
)
def test_calls_that_are_not_for_it_have_no_key(other: dict[str, Any]) -> None:
    assert key(**other) is None


# ---- results that it makes by itself ---------------------------------------------------------------------------------


def test_gradients_have_the_strides_that_torch_gives_them() -> None:
    """Of operands of one sample, or one channel, strides may be anything."""
    ours = layer(choices_of(COMPILED, n=1))
    x = images()[:1].as_strided((1, C, 9, 8), (7, 72, 8, 1)).requires_grad_()
    y = ours(x)
    expected = F.conv2d(x, ours.weight, ours.bias, padding=1)
    dy = torch.randn_like(y)
    mine, wanted = (torch.autograd.grad(each, [x, *ours.parameters()], dy) for each in (y, expected))
    for gradient, of_torch in zip(mine, wanted, strict=True):
        torch.testing.assert_close(gradient, of_torch, **TOLERANCE)
        assert gradient.stride() == of_torch.stride()
    assert ran(ours.choices) == set(Operation)
