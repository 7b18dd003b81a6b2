"""A graph runs in place of its model only while the model is as it was, and its results share the same memory."""

from __future__ import annotations

import copy
import ctypes
import gc
import inspect
import multiprocessing
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode

import mucudnn
from mucudnn.graph import guards
from mucudnn.graph.capture import NotCapturedError, capture
from mucudnn.graph.convolution_choices import each_by_itself
from mucudnn.graph.guards import Guards
from mucudnn.graph.model import BandedModel, Graphs, banded, signature_of
from mucudnn.graph.schedule import Schedule, solver_graph
from mucudnn.kernels.memory import peak_allocated_bytes
from mucudnn.running.workspace import borrowed_workspace, release_workspaces, workspace_of
from mucudnn.tuning.model_state import reachable


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


@pytest.fixture
def runs() -> Iterator[list[Schedule]]:
    """The schedules that have run."""
    found: list[Schedule] = []
    run = Schedule.run

    def spy(self: Schedule, arguments: tuple[Any, ...]) -> Any:
        found.append(self)
        return run(self, arguments)

    with mock.patch.object(Schedule, "run", spy):
        yield found


def graph_of(model: nn.Module, *arguments: Any) -> BandedModel:
    """Return a model that runs as a graph, without being tuned."""
    captured = capture(model.eval(), arguments)
    graph = solver_graph(captured)
    return banded(Graphs(model, {signature_of(arguments): Schedule(captured, graph, each_by_itself(graph))}))


class Settings:
    def __init__(self) -> None:
        self.scale = 2.0


@dataclass(slots=True)
class Slot:
    last: Any = None


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
        assert watching.why_not() is None, name
        assert not watching.unguarded
        if name != "empty":
            memory.view(np.uint8)[:] += 1
            assert watching.why_not() == "the values of table have changed", name
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
                with pytest.raises(NotCapturedError, match=rf"{name} has been replaced|cannot trace it"):
                    capture(model, (x,))
        torch.testing.assert_close(fitted(x), model(x))
        assert runs.pop().captured is captured, "the graph runs again"


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
        found = [noted.why_not() for _ in range(guards._PARTS)]
        first = next(number for number, why in enumerate(found) if why)
        assert found[first:] == ["the values of weight have changed"] * (len(found) - first)
        layer.weight.data.view(-1)[place] -= 1
    noted = Guards(layer)
    layer.weight.view(-1)[12_345] += 1
    assert noted.why_not(), "a write that torch counts is noticed at once"


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


class Returns(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.conv, self.function = nn.Conv2d(3, 4, 3, padding=1), function
        self.register_buffer("known", torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.function(self, x)


def with_y(made: Callable[[Tensor], tuple[Tensor, ...]]) -> Callable[[Any, Tensor], tuple[Tensor, ...]]:
    return lambda model, x: made(model.conv(x))


RESULTS: dict[str, Callable[[Any, Tensor], tuple[Tensor, ...]]] = {
    "clone of the input": lambda model, x: (model.conv(x), x.clone()),
    "input": lambda model, x: (model.conv(x), x, x.contiguous(), x.detach()),
    "dropout of the input": lambda model, x: (model.conv(x), F.dropout(x, 0.5, False)),
    "channels of the input": lambda model, x: (model.conv(x), x[:, :2], x.flatten(2)),
    "bits of the input": lambda model, x: (model.conv(x), x.view(torch.int32)),
    "buffer": lambda model, x: (model.conv(x), model.known),
    "product of a buffer": lambda model, x: (model.conv(x), model.known * 3),
    "copies of a buffer": lambda model, x: (model.conv(x), model.known.clone(), model.known.clone()),
    "weight": lambda model, x: (model.conv(x), model.conv.weight, model.conv.weight.flatten(1)),
    "same twice": with_y(lambda y: (y, y)),
    "result and its copy": with_y(lambda y: (y, y.clone(), y.clone())),
    "parts": with_y(lambda y: tuple(y.chunk(2, 1))),
    "overlapping views": with_y(lambda y: (y[:, :3], y[:, 1:], y.flatten(2))),
    "copies of parts": with_y(lambda y: (y[:, :3].clone(), y[:, 1:].clone(), y.relu())),
}


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*runs as it was")
def test_results_share_memory_exactly_where_the_models_do() -> None:
    for (name, function), memory_format in zip(RESULTS.items(), cycle((torch.channels_last, torch.contiguous_format))):
        x = torch.randn(2, 3, 8, 7).contiguous(memory_format=memory_format)
        model = Returns(function)
        fitted = graph_of(model, x)
        fitted(x)
        for changed in range(len(model(x))):
            found = []
            for ours in (model, fitted):
                own, given = copy.deepcopy(model.state_dict()), x.clone()
                results = ours(given)
                if results[changed].is_floating_point():
                    results[changed].add_(1)
                else:
                    results[changed].fill_(1)
                again = [one.clone() for one in ours(given)]
                found.append([*results, given, *(one.clone() for one in model.state_dict().values()), *again])
                model.load_state_dict(own)
            for theirs, mine in zip(*found, strict=True):
                torch.testing.assert_close(mine, theirs, msg=f"{name}, {changed}")
            for theirs, mine in zip(model(x), fitted(x), strict=True):
                assert mine.stride() == theirs.stride(), name


@torch.no_grad()
def test_every_result_has_the_strides_of_the_models_for_arguments_of_any_strides(runs: list[Schedule]) -> None:
    def results(y: Tensor) -> tuple[Tensor, ...]:
        mean = y.mean(1, keepdim=True)
        of_images = (y > 0, y.sort(1)[1], F.max_pool2d(y, 2, return_indices=True)[1], y.long(), y.double(), mean)
        of_parts = (y[:, ::2] + 1, (y > 0)[:, ::2], (y > 0)[0], torch.cat((y, y)), (y > 0).permute(0, 2, 3, 1))
        of_views = (mean.expand_as(y), (mean + 1).expand_as(y), y.unfold(2, 3, 1), (y > 0).flatten(2), y[:, ::2])
        return *of_images, *of_parts, *of_views, y.sum(1, keepdim=True), torch.complex(y, y)

    x = torch.randn(2, 3, 8, 7)
    formats = torch.contiguous_format, torch.channels_last
    for memory_format in formats:
        model = Returns(lambda model, x: (*results(model.conv(x)), x[:, 1:]))
        fitted = graph_of(model, x.contiguous(memory_format=memory_format))
        for other in formats:
            given = x.contiguous(memory_format=other)
            for _ in range(2):
                for number, (mine, theirs) in enumerate(zip(fitted(given), model(given), strict=True)):
                    assert mine.stride() == theirs.stride(), (memory_format, other, number)
                    torch.testing.assert_close(mine, theirs)
    assert len(runs) == 8


@torch.no_grad()
def test_nobody_else_gets_the_memory_of_a_call() -> None:
    cpu = torch.device("cpu")
    with borrowed_workspace(10_000, cpu) as arena:
        inside = workspace_of(5_000, cpu, keeps=True)
        assert inside.data_ptr() != arena.data_ptr()
        with borrowed_workspace(5_000, cpu) as nested:
            assert nested.data_ptr() == inside.data_ptr()
            assert workspace_of(5_000, cpu, keeps=True).data_ptr() not in (nested.data_ptr(), arena.data_ptr())
    assert workspace_of(5_000, cpu, keeps=True).data_ptr() == arena.data_ptr()


class ComputedFilter(nn.Module):
    """A convolution that is a barrier, since its filter is computed in the call, between others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(y + F.conv2d(y, self.inner.weight * y.mean(), self.inner.bias, padding=1))


@torch.no_grad()
def test_operators_of_ours_inside_a_graph(tmp_path: Path) -> None:
    config = mucudnn.Config(database=tmp_path / "m.sqlite", time_limit="200ms", confirm=False)
    model, x = ComputedFilter().eval(), torch.randn(2, 8, 30, 28).contiguous(memory_format=torch.channels_last)
    expected = model(x)
    fitted = graph_of(model, x)
    with mucudnn.tuned(config):
        for _ in range(3):
            torch.testing.assert_close(fitted(x), expected)
    layers = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), mucudnn.Conv2d(8, 8, 5), nn.Conv2d(8, 4, 3)).eval()
    expected = layers(x)
    mucudnn.optimize(layers[2], torch.randn(2, 8, 28, 26).contiguous(memory_format=torch.channels_last), config)
    fitted = graph_of(layers, x)
    (schedule,) = fitted.tuned_graphs.schedules.values()
    assert schedule is not None
    schedule.count((x,))
    for _ in range(2):
        torch.testing.assert_close(fitted(x), expected)
    release_workspaces()
    gc.collect()
    found: list[Tensor] = []
    peak = peak_allocated_bytes(lambda: found.append(fitted(x)))
    assert peak - found[0].nbytes <= schedule.needed_bytes, "the budget counts what they allocate"


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


def with_first(model: Any, y: Tensor, x: Tensor) -> Tensor:
    if model.last is None:
        model.last = y
    return y + model.last


def from_tables(model: Any, y: Tensor, x: Tensor) -> Tensor:
    for table in (model.table, TAPPED):
        y = y + table.setdefault(y.shape, torch.full(y.shape[2:], 0.5))
    return y + kept_grid(*y.shape[2:])


# Why it cannot be a graph, or the calls of the test below that one runs
KEPT: dict[str, tuple[Callable[[Any, Tensor, Tensor], Tensor], str | tuple[int, ...]]] = {
    "everywhere": (keeping(keep_everywhere), "a call changes mean"),
    "tensor in place": (keeping(lambda model, y: model.grid.add_(1)), "grid is mutated"),
    "weight": (keeping(lambda model, y: model.conv.weight.data.mul_(0.5)), "cannot trace it"),
    "global": (keeping(lambda model, y: TAPPED.update(y=y)), "a global keeps"),
    "anchors of each call": (partial(anchored, always=True), "has changed"),
    "anchors": (anchored, (1, 2, 5)),
    "tables": (from_tables, (1, 2)),
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
