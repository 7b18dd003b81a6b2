"""What runs as a graph is the model for those who ask: its class, attributes, methods and the way it is called."""

from __future__ import annotations

import copy
import inspect
import pickle
from functools import partial
from typing import Any, cast

import pytest
import torch
from support.graphs import graph_of
from torch import Tensor, nn

from mucudnn.graph.schedule import Schedule


class Asked(nn.Module):
    """With attributes, a property and methods of its own, some of the names that ours have elsewhere."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.model, self.config, self.scale = nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU()), {"width": width}, 2.0

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def encode(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.model(x))

    def predict(self, x: Tensor) -> Tensor:
        return cast(Tensor, self(x)) + self.forward(x)

    def forward(self, pixels: Tensor, scale: float = 1.0, flag: bool | None = None) -> Tensor:
        return self.encode(pixels) * scale * self.scale


class Halving(Asked):
    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return super().__call__(*arguments, **named) / 2


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*runs as it was")
def test_the_graph_is_the_model_for_those_who_ask(runs: list[Schedule]) -> None:
    model, x = Asked(), torch.randn(2, 3, 8, 8)
    fitted: Any = graph_of(model, x)
    expected = model(x)
    assert isinstance(fitted, Asked)
    assert type(fitted).__name__ == "Asked"
    assert fitted.untuned_model is model
    assert (fitted.model, fitted.config, fitted.dtype) == (model.model, model.config, torch.float32)
    assert inspect.signature(fitted.forward) == inspect.signature(model.forward)
    assert [*dict(fitted.named_modules())] == [*dict(model.named_modules())]
    Asked().load_state_dict(fitted.state_dict())
    fitted.load_state_dict(model.state_dict())
    torch.testing.assert_close(fitted.encode(x) * 2, expected)
    for number, arguments, named in (
        *((1, (), {"pixels": x}), (1, (x,), {"flag": None, "scale": 1.0}), (1, (), {"scale": 1.0, "pixels": x})),
        *((0, (x,), {"scale": 3.0}), (0, (), {"flag": True, "pixels": x}), (0, (x, 1.0), {})),
    ):
        runs.clear()
        torch.testing.assert_close(fitted(*arguments, **named), model(*arguments, **named))
        assert len(runs) == number, named
    runs.clear()
    torch.testing.assert_close(fitted.predict(x), 2 * expected)
    assert len(runs) == 2
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        fitted(x, other=1)

    fitted.scale = 4.0
    assert model.scale == 4.0
    torch.testing.assert_close(fitted(x), 2 * expected)
    model.scale = 2.0
    for copied in (copy.copy(fitted), copy.deepcopy(fitted), pickle.loads(pickle.dumps(fitted))):
        runs.clear()
        torch.testing.assert_close(copied(x), expected)
        assert len(runs) == 1
        assert isinstance(copied, Asked)
        copied.scale = 3.0
        torch.testing.assert_close(copied(x), 1.5 * expected)
    assert model.scale == 2.0
    other = type(fitted)(width=6)
    assert (type(other), other.train()(x).shape[1]) == (Asked, 6)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*runs as it was")
def test_a_graph_is_of_the_whole_call_of_a_model(runs: list[Schedule]) -> None:
    x = torch.randn(2, 3, 8, 8)
    patched, compiled = Asked(), Asked()
    patched.forward = lambda x: 3 * Asked.forward(patched, x)  # type: ignore[method-assign, assignment, misc]
    compiled.compile(backend="eager")
    for model in (Halving(), patched, compiled, torch.fx.symbolic_trace(Asked())):
        expected, fitted = model(x), graph_of(model, x)
        runs.clear()
        torch.testing.assert_close(fitted(x), expected)
        assert len(runs) == 1
    layers = graph_of(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), x)
    first = cast(nn.Sequential, layers)[:1]
    assert type(first) is nn.Sequential
    for strict in (True, False):
        shapes = {"pixels": {0: torch.export.Dim("batch", min=2, max=8)}}
        fitted = graph_of(model := Asked(), x)
        program = torch.export.export(fitted, (), {"pixels": x}, dynamic_shapes=shapes, strict=strict).module()
        torch.testing.assert_close(program(pixels=x.repeat(2, 1, 1, 1)), model(x.repeat(2, 1, 1, 1)))
    runs.clear()
    compile_it = partial(torch.compile, backend="eager")
    for caller in (compile_it(fitted), compile_it(nn.Sequential(fitted, nn.Identity())), fitted):
        torch.testing.assert_close(caller(x), model(x))
    assert len(runs) == 3
