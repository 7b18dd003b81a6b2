"""Models whose calls keep something: as graphs, if later calls only read it."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.graphs import graph_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from mucudnn.graph.capture import NotCapturedError, capture
from mucudnn.graph.schedule import Schedule
from mucudnn.tuning.model_state import reachable


@dataclass(slots=True)
class Slot:
    last: Any = None


class Counts(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


class Keeps(nn.Module):
    """A model whose calls keep something. run: computes the results from what a convolution returns, and the image."""

    gain: Any = None

    def __init__(self, run: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.run, self.last, self.calls, self.grid = (
            nn.Conv2d(3, 4, 3, padding=1),
            run,
            None,
            0,
            torch.ones(1),
        )
        self.table: dict[Any, Any] = {}
        self.step = torch.tensor([0.5])
        self.tensors: deque[Tensor] = deque(maxlen=2)
        self.state, self.slot, self.names = SimpleNamespace(last=None), Slot(), [0]
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, self.conv(x), x)


TAPPED: dict[str, Any] = {}
kept_grid = lru_cache(lambda height, width: torch.arange(float(height * width)).view(height, width))


def keeping(change: Callable[[Any, Tensor], object]) -> Callable[[Any, Tensor, Tensor], Tensor]:
    def run(model: Any, y: Tensor, x: Tensor) -> Tensor:
        change(model, y)
        return y

    return run


def keep_everywhere(model: Any, y: Tensor) -> None:
    model.last = model.state.last = model.slot.last = model.table["last"] = y
    model.tensors.append(y)
    model.names[0] = model.calls = model.calls + 1
    model.mean = y.mean()


def anchored(model: Any, y: Tensor, x: Tensor, *, always: bool = False) -> Tensor:
    """As detection heads of Ultralytics' YOLO do."""
    if always or model.gain != y.shape:
        model.last, model.grid = (kept_grid(*y.shape[2:]).clone() + number for number in range(2))
        model.gain = y.shape
    return y * model.grid + model.last


def anchored_by_values(model: Any, y: Tensor, x: Tensor) -> Tensor:
    """The first call reads values of a tensor, as those heads read their strides."""
    if model.gain != y.shape:
        (step,) = model.step
        model.last, model.gain = torch.full(y.shape[2:], step), y.shape
    return y + model.last


def with_first(model: Any, y: Tensor, x: Tensor) -> Tensor:
    if model.last is None:
        model.last = y
    return y + model.last


def from_tables(model: Any, y: Tensor, x: Tensor) -> Tensor:
    for table in (model.table, TAPPED):
        y = y + table.setdefault(y.shape, torch.full(y.shape[2:], 0.5))
    return y + kept_grid(*y.shape[2:])


def with_the_image(model: Any, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a view of argument 0, and keep this number, too."""
    return y, x[:, model.table.setdefault(y.shape, 0) :]


# Why it cannot be a graph, or the calls of the test below that one runs
KEPT: dict[str, tuple[Callable[[Any, Tensor, Tensor], Any], str | tuple[int, ...]]] = {
    "everywhere": (keeping(keep_everywhere), "a call changes mean"),
    "tensor in place": (keeping(lambda model, y: model.grid.add_(1)), "grid is mutated"),
    "weight": (keeping(lambda model, y: model.conv.weight.data.mul_(0.5)), "cannot trace it"),
    "global": (keeping(lambda model, y: TAPPED.update(y=y)), "a global keeps"),
    "anchors of each call": (partial(anchored, always=True), "has changed"),
    "anchors": (anchored, (1, 2, 5)),
    "anchors by values": (anchored_by_values, (1, 2, 5)),
    "tables": (from_tables, (1, 2)),
    "a number": (with_the_image, (1, 2)),
}


def attributes_of(model: nn.Module) -> dict[str, Any]:
    """Return all to which a model refers: tensors as their values."""
    parts = dict(reachable(model))
    assert not any(isinstance(part, FakeTensor) for part in (*parts.values(), *TAPPED.values(), kept_grid(6, 5)))
    return {name: part.tolist() if isinstance(part, Tensor) else repr(part) for name, part in parts.items()}


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*runs as it was")
def test_what_calls_keep_in_a_model_is_as_without_the_graph(runs: list[Schedule]) -> None:
    x, larger = torch.randn(2, 3, 6, 5), torch.randn(2, 3, 7, 5)
    for name, (run, why) in KEPT.items():
        TAPPED.clear()
        model = Keeps(run).eval()
        twin, before = copy.deepcopy(model), attributes_of(model)
        if isinstance(why, str):
            with pytest.raises(NotCapturedError, match=why):
                capture(model, (x,))
            assert attributes_of(model) == before, name
            continue
        fitted = graph_of(model, x)
        assert attributes_of(model) == before, name
        for index, given in enumerate((x, x, x + 1, larger, x, x)):
            runs.clear()
            torch.testing.assert_close(fitted(given), twin(given), msg=name)
            assert len(runs) == (index in why), (name, index)
            assert attributes_of(model).keys() == attributes_of(twin).keys(), name


@torch.no_grad()
def test_what_a_first_call_keeps_of_its_input_is_not_the_samples(runs: list[Schedule]) -> None:
    fitted, x = graph_of(Keeps(with_first), torch.randn(2, 3, 6, 5)), torch.randn(2, 3, 6, 5)
    twin = copy.deepcopy(fitted.untuned_model)
    torch.testing.assert_close(fitted(x), twin(x))
    with pytest.warns(RuntimeWarning, match="what it keeps of a call depends on the input"):
        torch.testing.assert_close(fitted(x + 1), twin(x + 1))
    assert not runs


def test_what_a_graph_cannot_be() -> None:
    x = torch.randn(1, 3, 8, 8)
    with pytest.raises(NotCapturedError, match="a call changes the model: calls has changed"):
        capture(Counts(3, 4, 3).eval(), (x,))
    sparse = nn.Sequential(nn.Conv2d(3, 4, 3))
    sparse.register_buffer("mask", torch.eye(3).to_sparse())
    with pytest.raises(NotCapturedError, match=r"^mask is a tensor of a kind whose values cannot be watched"):
        capture(sparse.eval(), (x,))
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    with pytest.raises(NotCapturedError, match="hooks for all modules"):
        capture(nn.Sequential(nn.Conv2d(3, 4, 3)).eval(), (x,))
    hook.remove()
    model = nn.Sequential(nn.Conv2d(3, 8, 3)).eval()
    model[0].register_forward_hook(lambda *_: None)
    with pytest.raises(NotCapturedError, match="0 has hooks"):
        capture(model, (x,))
