"""Modes, transforms and compilers of torch: they see the registered operators, or torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.eager_layers import TOLERANCE, images, layer, torchs
from torch import Tensor
from torch.nn import functional as F

from mucudnn.running import operators
from mucudnn.words.problem import Operation

# ---- modes ----------------------------------------------------------------------------------------------------------


def test_autocast_computes_in_its_type(registered: list[Operation]) -> None:
    ours, x = layer(), images(True)
    with torch.autocast("cpu", torch.bfloat16):
        y = ours(x)
    assert y.dtype is torch.bfloat16
    assert set(registered) == {Operation.FORWARD}
    with torch.autocast("cpu", torch.bfloat16):  # a backward pass inside does not cast, as torch's does not
        ours(x).float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is torch.float32


def test_modes_see_the_operator() -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[Any] = []

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    ours, x = layer(), images()
    for mode in (Dispatch, Function):
        with mode():
            y = ours(x)
        assert operators.conv2d in seen
        seen.clear()
    with Dispatch():
        y = ours(x)
        y.sum().backward()
    assert operators.conv2d_backward_filter in seen
    y = ours(x)
    seen.clear()
    with Dispatch():  # which was not there when the forward pass ran
        y.sum().backward()
    assert operators.conv2d_backward_filter in seen


def test_transforms_of_torch_func_get_torchs_own() -> None:
    ours, x = layer(), images()
    parameters = {name: p.detach() for name, p in ours.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(ours, parameters, (x,)).square().sum()  # type: ignore[no-any-return]

    gradients = torch.func.grad(loss)(parameters, x)
    ours(x).square().sum().backward()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-3)
    each = torch.func.vmap(lambda one: ours(one.unsqueeze(0)))(x)
    torch.testing.assert_close(each.squeeze(1), torchs(ours)(x), **TOLERANCE)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # by torch itself
def test_forward_mode_derivatives_are_torchs() -> None:
    import torch.autograd.forward_ad as fwAD

    ours, x = layer(), images()
    tangent = torch.randn_like(x)
    with fwAD.dual_level():
        y = fwAD.unpack_dual(ours(fwAD.make_dual(x, tangent)))
    torch.testing.assert_close(y.tangent, F.conv2d(tangent, ours.weight, padding=1), **TOLERANCE)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_a_trace_computes_the_same() -> None:
    ours, x = layer(), images()
    torch.testing.assert_close(torch.jit.trace(ours, x)(x), ours(x), **TOLERANCE)


def test_compiled_models_keep_the_operator() -> None:
    ours, x = layer(), images()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    y = torch.compile(ours, backend=keep, fullgraph=True)(x)
    torch.testing.assert_close(y, ours(x))
    assert [node.target for graph in graphs for node in graph.graph.nodes].count(operators.conv2d) == 1
