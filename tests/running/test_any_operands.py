"""Whatever an optimized module is given, it answers as ``torch.nn.Conv2d``: the same result, or the same error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from support.problems.tuned_by_hand import ran, tune_by_hand
from torch import Tensor, nn
from torch.autograd import forward_ad

from mucudnn.core.problem import Operation

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{words}")
    for words in ("`torch.jit.script` is deprecated", "The PyTorch API of nested tensors", ".*quantize_per_tensor")
]  # of torch, about itself
SHAPE = (3, 4, 7, 7)
FORMATS = torch.contiguous_format, torch.channels_last


def of_shape(*shape: int) -> Callable[[], Any]:
    return lambda: torch.randn(shape)


def of_dtype(dtype: torch.dtype) -> Callable[[], Any]:
    return lambda: torch.randn(SHAPE).abs().to(dtype)


INPUTS: dict[str, Callable[[], Any]] = {
    **{f"{tuple(shape)}": of_shape(*shape) for shape in (SHAPE, SHAPE[1:], SHAPE[2:], (4,), (), (*SHAPE, 2))},
    **{f"{tuple(shape)}": of_shape(*shape) for shape in ((0, 4, 7, 7), (3, 4, 0, 7), (3, 0, 7, 7), (3, 4, 0, 0))},
    **{f"{tuple(shape)}": of_shape(*shape) for shape in ((3, 3, 7, 7), (3, 5, 7, 7), (3, 8, 7, 7), (3, 7, 7))},
    **{
        str(dtype): of_dtype(dtype)
        for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64)
    },
    **{str(dtype): of_dtype(dtype) for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool)},
    "meta": lambda: torch.randn(SHAPE, device="meta"),
    "expanded": lambda: torch.randn(1, 4, 1, 1).expand(SHAPE),
    "one sample, expanded": lambda: torch.randn(1, 4, 7, 7).expand(SHAPE),
    "transposed": lambda: torch.randn(SHAPE).transpose(2, 3),
    "every other column": lambda: torch.randn(3, 4, 7, 14)[..., ::2],
    "a part": lambda: torch.randn(4, 4, 7, 14)[1:, :, :, :7],
    "later in memory": lambda: torch.randn(3 * 4 * 49 + 1)[1:].view(SHAPE),
    "pending negation": lambda: torch._neg_view(torch.randn(SHAPE)),
    "part of a conjugate": lambda: torch.randn(SHAPE, dtype=torch.complex64).conj().imag,
    "efficient zeros": lambda: torch._efficientzerotensor(SHAPE),
    "sparse": lambda: torch.randn(SHAPE).to_sparse(),
    "oneDNN's": lambda: torch.randn(SHAPE).to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(SHAPE), 0.1, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(SHAPE[1:]) for _ in range(3)]),
    "a list": lambda: [1.0],
    "None": lambda: None,
    "NumPy's": lambda: torch.randn(SHAPE).numpy(),
}

Call = Callable[[nn.Module, Any], Any]


def gradients(module: nn.Module, x: Any) -> tuple[Tensor, ...]:
    plain = isinstance(x, Tensor) and x.is_floating_point() and x.layout is torch.strided and not x.is_nested
    x = x.detach().requires_grad_() if plain else x
    y = module(x)
    wanted = [tensor for tensor in (x, *module.parameters()) if isinstance(tensor, Tensor) and tensor.requires_grad]
    return y, *torch.autograd.grad(y.abs().sum(), wanted, allow_unused=True, materialize_grads=True)


def under_autocast(module: nn.Module, x: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return module(x)


def dual(module: nn.Module, x: Any) -> Any:
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(module(forward_ad.make_dual(x, x))))


CALLS: dict[str, Call] = {
    "training": gradients,
    "no_grad": torch.no_grad()(lambda module, x: module(x)),
    "inference_mode": torch.inference_mode()(lambda module, x: module(x)),
    "autocast": under_autocast,
    "vmap": lambda module, x: torch.vmap(module)(x[:, None]),
    "jvp": lambda module, x: torch.func.jvp(module, (x,), (x,)),
    "func.grad": lambda module, x: torch.func.grad(lambda x: module(x).abs().sum())(x),
    "dual numbers": dual,
}


def answer(call: Call, module: nn.Module, x: Any) -> tuple[Any, tuple[type, str] | None]:
    """The results, or the exception's type and text."""
    try:
        results = call(module, x)
        return results.to_dense() if getattr(results, "is_mkldnn", False) else results, None
    except Exception as error:
        return None, (type(error), str(error))


def assert_same_answers(name: str, change: Callable[[nn.Conv2d], object], x: Any) -> None:
    torchs = nn.Conv2d(4, 6, 3, padding=1)
    ours = tune_by_hand(copy.deepcopy(torchs), torch.randn(SHAPE))
    for module in (torchs, ours):
        change(module)
    (results, error), (expected, expected_error) = (answer(CALLS[name], module, x) for module in (ours, torchs))
    assert error == expected_error, name
    if error is None:
        assert type(results) is type(expected), name
        torch.testing.assert_close(results, expected, rtol=2e-2, atol=2e-2, msg=lambda said: f"{name}: {said}")


@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
def test_every_input_gets_torchs_answer(make: Callable[[], Any]) -> None:
    for name in CALLS:
        assert_same_answers(name, lambda module: None, make())


def with_parameter(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[nn.Conv2d], object]:
    return lambda module: setattr(module, name, nn.Parameter(make(getattr(module, name).detach())))


def with_attributes(**attributes: Any) -> Callable[[nn.Conv2d], object]:
    return lambda module: [setattr(module, name, value) for name, value in attributes.items()]


CHANGES = {
    "weight of float64": with_parameter("weight", Tensor.double),
    "weight of complex numbers": with_parameter("weight", lambda w: w.to(torch.complex64)),
    "sparse weight": with_parameter("weight", Tensor.to_sparse),
    "weight of 5 dimensions": with_parameter("weight", lambda w: w[..., None]),
    "weight of 3 dimensions": with_parameter("weight", lambda w: w[0]),
    "weight of another size": with_parameter("weight", lambda w: w[..., :1]),
    "bias of float64": with_parameter("bias", Tensor.double),
    "bias too short": with_parameter("bias", lambda bias: bias[:3]),
    "bias of 2 dimensions": with_parameter("bias", lambda bias: bias[None]),
    **{
        f"{name} {value!r}": with_attributes(**{name: value})
        for name in ("stride", "padding", "dilation")
        for value in ((0, 0), (-1, -1), 1, (1,), (1, 1, 1), [1, 1], None, "no such")
    },
    **{f"groups {groups}": with_attributes(groups=groups) for groups in (-1, 0, 2, 3)},
    "padding mode": with_attributes(padding_mode="no such"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_module_that_was_changed_by_hand_gives_torchs_answer(change: Callable[[nn.Conv2d], object]) -> None:
    for name, dtype in product(("training", "no_grad", "autocast"), (torch.float32, torch.float64)):
        assert_same_answers(name, change, torch.randn(SHAPE, dtype=dtype))


def test_gradients_of_filters_have_torchs_strides() -> None:
    """Also in dimensions of size 1, which DistributedDataParallel compares."""
    for threads, n, c, k, r, of_x, of_w in product((1, 2), (1, 2), (1, 3), (1, 3), (1, 3), FORMATS, FORMATS):
        torch.set_num_threads(threads)
        torchs = nn.Conv2d(c, k, r).to(memory_format=of_w)
        x = torch.randn(n, c, 5, 4).contiguous(memory_format=of_x)
        ours, found = tune_by_hand(copy.deepcopy(torchs), x), []
        for model in (torchs, ours):
            y = model(x)
            found.append(torch.autograd.grad(y, model.weight, torch.ones_like(y))[0].stride())
        assert Operation.BACKWARD_FILTER in ran(ours)
        assert found[0] == found[1], (threads, n, c, k, r, of_x, of_w)
