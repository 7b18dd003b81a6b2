"""Modes, transforms and compilers of torch: they see the registered operators, or torch's own."""

from __future__ import annotations

from typing import Any

import torch
from support.eager_layers import images, layer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mucudnn.core.problem import Operation
from mucudnn.running import operators


def test_modes_see_the_operator() -> None:
    seen: list[Any] = []

    def note(mode: object, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(func)
        return func(*args, **(kwargs or {}))

    dispatch = type("Dispatch", (TorchDispatchMode,), {"__torch_dispatch__": note})
    function = type("Function", (TorchFunctionMode,), {"__torch_function__": note})
    ours, x = layer(), images()
    for mode in (dispatch, function):
        with mode():
            ours(x)
        assert operators.conv2d in seen
        seen.clear()
    with dispatch():
        ours(x).sum().backward()
    assert operators.OPERATORS[Operation.BACKWARD_FILTER] in seen
    y = ours(x)
    seen.clear()
    with dispatch():  # which was not there when the forward pass ran
        y.sum().backward()
    assert operators.OPERATORS[Operation.BACKWARD_FILTER] in seen


def test_compiled_models_keep_the_operator() -> None:
    ours, x = layer(), images()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    y = torch.compile(ours, backend=keep, fullgraph=True)(x)
    torch.testing.assert_close(y, ours(x))
    assert [node.target for graph in graphs for node in graph.graph.nodes].count(operators.conv2d) == 1
