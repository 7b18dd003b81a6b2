"""A graph runs in place of its model only while the model is as it was, and its results share the same memory."""

from __future__ import annotations

import copy
import ctypes
import multiprocessing
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
from support.graphs import graph_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode

from mucudnn.graph import guards
from mucudnn.graph.capture import NotCapturedError, capture
from mucudnn.graph.guards import Guards
from mucudnn.graph.model import BandedModel
from mucudnn.graph.schedule import Schedule


def step_of(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[nn.Conv2d], None]:
    def change(module: nn.Conv2d) -> None:
        optimizer = make(module.parameters(), lr=0.1, **options)
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()

    return change


def without_gradient(change: Callable[[Tensor], object], mode: Any = torch.no_grad) -> Callable[[nn.Conv2d], None]:
    def changed(module: nn.Conv2d) -> None:
        with mode():
            change(module.weight)

    return changed


def load(module: nn.Conv2d, assign: bool = False) -> None:
    module.load_state_dict(nn.Conv2d(4, 6, 3).state_dict(), assign=assign)


def assign_data(module: nn.Conv2d) -> None:
    module.weight.data = torch.randn_like(module.weight)


def assign_parameter(module: nn.Conv2d) -> None:
    module.weight = nn.Parameter(torch.randn_like(module.weight))


def parametrized_and_changed(module: nn.Conv2d) -> None:
    parametrizations.weight_norm(module)
    with torch.no_grad():
        cast(Any, module).parametrizations.weight.original0.mul_(3)


def through_the_address(module: nn.Conv2d) -> None:
    ctypes.c_float.from_address(module.weight.data_ptr() + 40).value = 7.5


def by_another_process(module: nn.Conv2d) -> None:
    module.share_memory()
    array = module.weight.detach().numpy()
    process = multiprocessing.get_context("fork").Process(target=array.fill, args=(0.5,))
    process.start()
    process.join()
    assert process.exitcode == 0


def by_one_ulp(weight: Tensor) -> None:
    weight.view(torch.int32)[5, 3, 2, 2] += 1


WEIGHT_CHANGES: dict[str, Callable[[nn.Conv2d], object]] = {
    "SGD": step_of(torch.optim.SGD, foreach=False),
    "SGD fused": step_of(torch.optim.SGD, fused=True),
    "Adam": step_of(torch.optim.Adam, foreach=False),
    "load_state_dict": load,
    "load_state_dict assign": lambda module: load(module, assign=True),
    "copy_": without_gradient(lambda w: w.copy_(torch.randn_like(w))),
    "in place under no_grad": without_gradient(lambda w: w.mul_(2)),
    "in place in inference mode": without_gradient(lambda w: w.mul_(2), torch.inference_mode),
    "one element": without_gradient(lambda w: w[1, 2, 0, 1].add_(1e-3)),
    "one ulp": without_gradient(by_one_ulp),
    "two elements exchanged": without_gradient(lambda w: w[0, 0, 0, :2].copy_(w[0, 0, 0, :2].flip(0))),
    ".data in place": lambda module: module.weight.data.mul_(2),
    ".data =": assign_data,
    "set_": without_gradient(lambda w: w.set_(torch.randn_like(w))),
    "weight = Parameter": assign_parameter,
    "view": lambda module: module.weight.detach().view(-1)[3:9].fill_(0.25),
    "storage": lambda module: module.weight.untyped_storage().fill_(63),
    "NumPy": lambda module: np.multiply(module.weight.detach().numpy(), 2, out=module.weight.detach().numpy()),
    "DLPack": lambda module: torch.from_dlpack(module.weight.detach()).mul_(2),
    "address": through_the_address,
    "another process": by_another_process,
    "parametrization changed": parametrized_and_changed,
    "spectral_norm": parametrizations.spectral_norm,
    "channels_last": lambda module: module.to(memory_format=torch.channels_last),  # type: ignore[call-overload]
}


@pytest.fixture(params=["C++", "Python"])
def language(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "Python":
        monkeypatch.setattr(guards, "_guards", None)
    elif guards._guards is None:
        pytest.skip("the extension was not built")
    return str(request.param)


@dataclass(slots=True)
class Slot:
    last: Any = None


class Settings:
    def __init__(self) -> None:
        self.scale = 2.0


class Block(nn.Module):
    """A model that reads all kinds of state."""

    offset = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU()
        self.rest = nn.Sequential(nn.Conv2d(6, 4, 1), nn.Dropout(0.5))
        self.scale, self.factors, self.settings = 1.0, [1.0, 2.0], SimpleNamespace(power=1.0)
        self.own, self.table, self.constant = Settings(), np.ones(1, np.float32), torch.ones(4, 1, 1)
        self.slot, self.queue = Slot(1.0), deque([1.0])
        self.hidden = [nn.Conv2d(4, 4, 1)]
        self.register_buffer("shift", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.rest(self.act(self.norm(self.conv(x)))) * self.scale * self.factors[1] + self.settings.power
        y = self.hidden[0](y * self.own.scale + self.constant) + self.shift * self.slot.last * self.queue[0]
        return y + self.offset + torch.from_numpy(self.table)


@cache
def graph_of_block() -> BandedModel:
    """Return the graph of a block that no test changes: capturing takes most of the time of a test."""
    return graph_of(Block(), torch.randn(2, 4, 9, 8))


@cache
def graph_of_layers() -> BandedModel:
    layers = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 1))
    return graph_of(layers, torch.randn(2, 4, 9, 8))


def set_item(container: Any, key: Any, value: Any) -> None:
    container[key] = value


def no_gradient(change: Callable[[Block], object]) -> Callable[[Block], object]:
    return torch.no_grad()(change)


CHANGES: dict[str, Callable[[Block], object]] = {
    "layer": lambda model: setattr(model, "conv", nn.Conv2d(4, 6, 3)),
    "layer of a Sequential": lambda model: set_item(model.rest, 0, nn.Conv2d(6, 4, 1)),
    "wrapped layer": lambda model: setattr(model, "act", nn.Sequential(model.act, nn.Tanh())),
    "appended layer": lambda model: model.rest.append(nn.Tanh()),
    "stride": lambda model: setattr(model.conv, "stride", (2, 2)),
    "number": lambda model: setattr(model, "scale", 3.0),
    "number in a list": lambda model: set_item(model.factors, 1, 3.0),
    "number of a namespace": lambda model: setattr(model.settings, "power", 2.0),
    "number of an object": lambda model: setattr(model.own, "scale", 5.0),
    "number in a slot": lambda model: setattr(model.slot, "last", 3.0),
    "number in a deque": lambda model: model.queue.appendleft(3.0),
    "attribute of the class": lambda model: setattr(type(model), "offset", 1.5),
    "array": lambda model: set_item(model.table, 0, 7.0),
    "constant": lambda model: model.constant.add_(1),
    "constant by .data": lambda model: model.constant.data.mul_(3),
    "hidden layer": no_gradient(lambda model: model.hidden[0].weight.add_(1)),
    "buffer of one number": lambda model: setattr(model, "shift", torch.ones(1)),
    "running mean": lambda model: cast(Tensor, model.norm.running_mean).data.add_(1),
    "eps": lambda model: setattr(model.norm, "eps", 0.5),
    "forward": lambda model: setattr(model.act, "forward", torch.tanh),
    "class": lambda model: setattr(model.act, "__class__", nn.Tanh),
    "forward hook": lambda model: model.act.register_forward_hook(lambda module, given, y: y + 1),
    "pre-hook": lambda model: model.register_forward_pre_hook(lambda module, given: (given[0] + 1,)),
    "dropout": lambda model: model.rest[1].train(),
    "bias": lambda model: setattr(model.conv, "bias", None),
    "half": lambda model: model.double().float(),
}


@torch.no_grad()
def test_each_change_of_a_model_is_noticed_and_said_once(language: str) -> None:
    x = torch.randn(2, 4, 9, 8)
    for name, change in CHANGES.items():
        fitted = copy.deepcopy(graph_of_block())
        model = cast(Block, fitted.untuned_model)
        torch.testing.assert_close(fitted(x), model(x))
        change(model)
        for number in range(3):
            seeded = partial(torch.manual_seed, number)
            seeded()
            expected = model(x)
            seeded()
            if number == 0:
                with pytest.warns(RuntimeWarning, match="runs as it was, not as a tuned graph"):
                    assert torch.equal(fitted(x), expected), name
            else:
                assert torch.equal(fitted(x), expected), name
        Block.offset = 0.5


def without_writing(array: Any) -> Any:
    array.flags.writeable = False
    return array


ARRAYS: dict[str, Callable[[Any], Any]] = {
    "reversed": lambda array: array[::-1],
    "reversed in two directions": lambda array: array.reshape(4, 6)[::-1, ::-2],
    "of another byte order": lambda array: array.view(">f8"),
    "long double": lambda array: array.view(np.longdouble),
    "packed": lambda array: array.view([("first", "u1"), ("second", "f4"), ("third", "u1", 3)])["second"],
    "records": lambda array: array.view([("first", "f4"), ("second", "f4")]),
    "complex": lambda array: array.view(complex),
    "text": lambda array: array.view("U2"),
    "dates": lambda array: array.view("M8[s]"),
    "repeated": lambda array: np.broadcast_to(array[:1], (3, 1)),
    "without writing": lambda array: without_writing(array.view()),
    "a number": lambda array: array[:1].reshape(()),
    "empty": lambda array: array[:0],
}


def test_arrays_of_every_kind_are_watched(language: str) -> None:
    for name, view in ARRAYS.items():
        memory = np.arange(24.0)
        model = nn.ReLU()
        model.table = view(memory)
        watching = Guards(model)
        assert watching.check() is None, name
        assert not watching.unguarded
        if name != "empty":
            memory.view(np.uint8)[:] += 1
            assert watching.check() == "the values of table have changed", name
    model.table = np.array([None])
    assert Guards(model).unguarded == ["table"]


@torch.no_grad()
def test_what_users_put_in_place_of_torchs_functions_is_called(language: str, runs: list[Schedule]) -> None:
    def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(*arguments: Any, **named: Any) -> Any:
            return 2 * function(*arguments, **named)

        return replaced

    fitted, x = copy.deepcopy(graph_of_block()), torch.randn(2, 4, 9, 8)
    model = cast(Block, fitted.untuned_model)
    captured = next(iter(fitted.tuned_graphs.schedules.values())).captured
    for owner, name in (
        *((F, "conv2d"), (F, "relu"), (F, "batch_norm"), (torch, "from_numpy"), (Tensor, "__add__")),
        *((nn.Conv2d, "_conv_forward"), (nn.ReLU, "forward"), (nn.Module, "__call__"), (nn.Module, "_call_impl")),
    ):
        runs.clear()
        with mock.patch.object(owner, name, doubled(getattr(owner, name))):
            expected = model(x)
            with pytest.warns(RuntimeWarning, match=rf"{name} has (changed|been replaced)"):
                assert torch.equal(fitted(x), expected), name
            assert torch.equal(fitted(x), expected), name
            assert not runs
            if owner is Tensor:
                continue
            if name in ("_conv_forward", "forward"):
                torch.testing.assert_close(graph_of(model, x)(x), expected, msg=name)
            else:
                with pytest.raises(NotCapturedError, match=rf"{name} has been replaced"):
                    capture(model, (x,))
        torch.testing.assert_close(fitted(x), model(x))
        assert runs.pop().captured is captured, "the graph runs again"
    with mock.patch.object(torch, "save", doubled(torch.save)):  # as ultralytics does
        torch.testing.assert_close(fitted(x), model(x))
        assert runs.pop().captured is captured
        capture(model, (x,))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*runs as it was")
def test_every_way_to_change_a_weight_is_noticed(language: str) -> None:
    x = torch.randn(2, 4, 9, 8)
    for name, change in WEIGHT_CHANGES.items():
        fitted = copy.deepcopy(graph_of_layers())
        model = cast(nn.Sequential, fitted.untuned_model)
        layer = cast(nn.Conv2d, model[0])
        before = fitted(x)
        with torch.enable_grad():
            change(layer)
        model.eval()
        for _ in range(2):
            y = fitted(x)
            torch.testing.assert_close(y, model(x), msg=name)
        assert name in ("channels_last", "one ulp", "spectral_norm") or not torch.equal(y, before), name


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*runs as it was")
def test_the_graph_runs_again_once_the_model_is_as_it_was(language: str, runs: list[Schedule]) -> None:
    fitted, x = copy.deepcopy(graph_of_block()), torch.randn(2, 4, 9, 8)
    model = cast(Block, fitted.untuned_model)
    weight, act = model.conv.weight, model.act
    for change, restore in (
        (lambda: weight.mul_(2), lambda: weight.div_(2)),
        (lambda: weight.data.mul_(2), lambda: weight.data.div_(2)),
        (lambda: setattr(model, "act", nn.Tanh()), lambda: setattr(model, "act", act)),
        (lambda: model.rest[1].train(), lambda: model.eval()),
        (lambda: model.factors.append(1.0), lambda: model.factors.pop()),
    ):
        cast(Callable[[], object], change)()
        runs.clear()
        fitted(x)
        assert not runs
        cast(Callable[[], object], restore)()
        torch.testing.assert_close(fitted(x), model(x))
        assert len(runs) == 1


@torch.no_grad()
def test_a_single_number_is_noticed_soon(language: str) -> None:
    """Within as many calls as there are parts of a tensor, wherever it is, and the change is remembered."""
    layer = nn.Conv2d(32, 64, 3)
    for place in (0, layer.weight.numel() - 1):
        noted = Guards(layer)
        layer.weight.data.view(-1)[place] += 1
        found = [noted.check() for _ in range(guards._PARTS)]
        first = next(number for number, why in enumerate(found) if why)
        assert found[first:] == ["the values of weight have changed"] * (len(found) - first)
        layer.weight.data.view(-1)[place] -= 1
    noted = Guards(layer)
    layer.weight.view(-1)[12_345] += 1
    assert noted.check(), "a write that torch counts is noticed at once"


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*runs as it was")
def test_inputs_and_modes_that_a_graph_does_not_know(runs: list[Schedule]) -> None:
    class Image(Tensor):
        pass

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    layers, x = [nn.Conv2d(4, 6, 3), nn.ReflectionPad2d(2), nn.UpsamplingNearest2d(2)], torch.randn(2, 4, 9, 8)
    model = nn.Sequential(*layers)
    fitted = graph_of(model, x)
    image = x.as_subclass(Image)
    with pytest.warns(RuntimeWarning, match=r"of a subclass of Tensor, or a view that is negated"):
        assert type(fitted(image)) is type(model(image)) is Image
    negated, conjugated = torch._neg_view(x), torch.complex(x, x).conj().imag
    for given in (negated, conjugated):
        assert given.is_neg()
        assert torch.equal(fitted(given), model(given))
    with Watching():
        assert torch.equal(fitted(x), model(x))
    assert torch.equal(torch.vmap(fitted)(x[None]), torch.vmap(model)(x[None]))
    with pytest.warns(DeprecationWarning, match="jit.trace"):
        traced = torch.jit.trace(fitted, x, check_trace=False)
    assert torch.equal(traced(x + 1), model(x + 1))
    doubled = nn.modules.module.register_module_forward_hook(
        lambda module, given, y: 2 * y if isinstance(module, nn.Conv2d) else y
    )
    assert torch.equal(fitted(x), model(x))
    doubled.remove()
    assert not runs
    for device in ("cpu", "meta"):
        with torch.device(device):
            torch.testing.assert_close(fitted(x), model(x))
    torch.set_default_dtype(torch.float64)
    try:
        torch.testing.assert_close(fitted(x), model(x))
    finally:
        torch.set_default_dtype(torch.float32)
    assert not runs
    torch.testing.assert_close(fitted(x), model(x))
    assert len(runs) == 1
    with torch.device("meta"):
        fitted = graph_of(model, x)
        torch.testing.assert_close(fitted(x), model(x))
    assert len(runs) == 2, "a default device that was there before is no reason"


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*runs as it was")
def test_a_copy_has_guards_of_its_own(runs: list[Schedule]) -> None:
    fitted, x = copy.deepcopy(graph_of_block()), torch.randn(2, 4, 9, 8)
    model, copied = cast(Block, fitted.untuned_model), copy.deepcopy(fitted)
    model.scale = 3.0
    torch.testing.assert_close(copied(x), cast(nn.Module, copied.untuned_model)(x))
    assert len(runs) == 1
    assert torch.equal(copy.deepcopy(fitted)(x), model(x)), "copied after it had changed"
    assert len(runs) == 1
