"""Calls of layers past the registered operators: values, gradients of every order, and what users do with layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import mucudnn
from mucudnn.core.config import DEFAULT_MAX_RELATIVE_ERROR
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.core.records import Configuration, MicroConfig
from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.kernels.torch_convolution import relative_l2_error
from mucudnn.running import operators
from mucudnn.running.choices import Choices
from mucudnn.running.eager import hot_path

N, C, K = 3, 4, 6
GEOMETRY: tuple[Any, ...] = ((1, 1), (1, 1), (1, 1), 1)
COMPILED = "implicit-gemm" if loaded_build().library is not None else "gemm"
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def choices_of(
    *algorithms: str, memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS, n: int = N, dtype: str = "float32"
) -> Choices:
    """All three operations, each sample by one of these in turn, or all by the only one."""
    names = [algorithms[i % len(algorithms)] for i in range(n)]
    parts = tuple(MicroConfig(name, 1) for name in names) if len(algorithms) > 1 else (MicroConfig(names[0], n),)
    shape = (C, 9, 8, K, 3, 3)
    problem = ConvProblem(Operation.FORWARD, *shape, padding=(1, 1), dtype=dtype, memory_format=memory_format)
    chosen = Choices.of({problem.with_operation(o): {n: Configuration(parts, 1.0, 0)} for o in Operation})
    chosen.executables.clear()
    return chosen


def layer(chosen: Choices | None = None, bias: bool = True) -> mucudnn.Conv2d:
    torch.manual_seed(0)
    made = mucudnn.Conv2d(C, K, 3, padding=1, bias=bias)
    made.choices = choices_of(COMPILED) if chosen is None else chosen
    return made


def torchs(ours: mucudnn.Conv2d) -> nn.Conv2d:
    """Torch's layer with the same values."""
    theirs = nn.Conv2d(C, K, 3, padding=1, bias=ours.bias is not None)
    theirs.load_state_dict(ours.state_dict())
    return theirs


def images(requires_grad: bool = False) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(N, C, 9, 8, requires_grad=requires_grad)


def ran(chosen: Choices | None) -> set[Operation]:
    assert chosen is not None
    return {executable.problem.operation for executable in chosen.executables.values() if executable is not None}


def derivatives(
    convolve: Callable[[Tensor, Tensor, Tensor], Tensor], operands: list[Tensor], directions: list[Tensor]
) -> list[Tensor]:
    """y, and what is left when it is differentiated once, twice and three times, by all operands that can be."""
    leaves = [t.clone().requires_grad_() for t in operands]
    y = convolve(*leaves)
    found = [y]
    scalar = (y * y.sigmoid() * directions[0]).sum()
    for _ in range(3):
        gradients = torch.autograd.grad(scalar, leaves, create_graph=True)
        found += gradients
        scalar = sum(((g * g.sigmoid()).sum() for g in gradients), torch.zeros((), dtype=y.dtype))
    return found


@pytest.mark.parametrize("memory_format", MemoryFormat)
@pytest.mark.parametrize("algorithms", [(COMPILED,), ("winograd-2x2",), ("winograd-2x2", COMPILED), ("gemm",)], ids=str)
def test_derivatives_of_three_orders_are_those_of_float64(
    algorithms: tuple[str, ...], memory_format: MemoryFormat, registered: list[Operation]
) -> None:
    chosen = choices_of(*algorithms, memory_format=memory_format)
    made = layer(chosen)
    assert made.bias is not None
    x = images()
    if memory_format is MemoryFormat.CHANNELS_LAST:
        x = x.contiguous(memory_format=torch.channels_last)
    operands = [x, made.weight.detach(), made.bias.detach()]
    directions = [torch.randn(N, K, 9, 8)]

    def ours(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return operators.convolve(Operation.FORWARD, x, w, bias, *GEOMETRY, chosen)

    def definition(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(x, w, bias, padding=1)

    found = derivatives(ours, operands, directions)
    wanted = derivatives(definition, [t.double() for t in operands], [t.double() for t in directions])
    for ours_one, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours_one.double(), exact, rtol=1e-3, atol=1e-3 * float(exact.detach().abs().max()))
    assert ran(chosen) == set(Operation)
    assert registered == []


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_and_its_gradients_are_torchs(bias: bool) -> None:
    ours = layer(bias=bias)
    theirs, x, dy = torchs(ours), images(True), torch.randn(N, K, 9, 8)
    results = []
    for each in (ours, theirs):
        y = each(x)
        results.append([y, *torch.autograd.grad(y, [x, *each.parameters()], dy)])
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, **TOLERANCE)
        assert mine.stride() == expected.stride()
    assert ran(ours.choices) == set(Operation)


@pytest.mark.parametrize("wanting", ["x", "weight", "bias"])
def test_only_the_gradient_that_is_asked_for_is_computed(wanting: str) -> None:
    ours, x = layer(), images()
    ours.requires_grad_(False)
    tensor = x if wanting == "x" else ours.get_parameter(wanting)
    tensor.requires_grad_()
    y = ours(x)
    y.sum().backward()
    assert [t is tensor for t in (x, *ours.parameters()) if t.grad is not None] == [True]
    expected = {"x": {Operation.BACKWARD_DATA}, "weight": {Operation.BACKWARD_FILTER}, "bias": set()}[wanting]
    assert ran(ours.choices) == {Operation.FORWARD} | expected


def test_nothing_is_recorded_where_nothing_wants_a_gradient(registered: list[Operation]) -> None:
    ours, x = layer(), images()
    ours.requires_grad_(False)
    assert ours(x).grad_fn is None
    ours.requires_grad_(True)
    with torch.no_grad():
        assert not ours(x).requires_grad
    with torch.inference_mode():
        y = ours(x.clone())  # a tensor made in inference mode is as plain as any
    assert y.is_inference()
    torch.testing.assert_close(y, torchs(ours)(x).detach(), **TOLERANCE)
    assert ran(ours.choices) == {Operation.FORWARD}
    assert registered == []


@pytest.mark.skipif(loaded_build().library is None, reason="nothing is compiled")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("algorithms", [(COMPILED,), ("winograd-4x4",), ("winograd-6x6", COMPILED)], ids=str)
def test_a_layer_in_half_precision_wholly_or_by_autocast(
    algorithms: tuple[str, ...], dtype: str, registered: list[Operation]
) -> None:
    """Torch's autocast rounds operands to the type; so the definition is of rounded operands."""
    of_dtype: torch.dtype = getattr(torch, dtype)
    for is_cast in (False, True):
        ours, dy = layer(choices_of(*algorithms, dtype=dtype)), torch.randn(N, K, 9, 8).to(of_dtype)
        x = images(True) if is_cast else images().to(of_dtype).requires_grad_()
        rounded = torchs(ours).to(of_dtype).double()
        ours = ours if is_cast else ours.to(of_dtype)
        with torch.autocast("cpu", of_dtype, enabled=is_cast):
            y = ours(x)
        found = [y, *torch.autograd.grad(y, [x, *ours.parameters()], dy)]
        x = x.detach().to(of_dtype).double().requires_grad_()
        y = rounded(x)
        exact = [y, *torch.autograd.grad(y, [x, *rounded.parameters()], dy.double())]
        assert [t.dtype for t in found] == [of_dtype, *[torch.float32 if is_cast else of_dtype] * 3]
        for ours_one, wanted in zip(found, exact, strict=True):
            assert relative_l2_error(ours_one.detach(), wanted.detach()) < DEFAULT_MAX_RELATIVE_ERROR[dtype]
        assert ours.choices is not None
        assert ran(ours.choices) == set(Operation)
        assert all(one is not None and one.bound is not None for one in ours.choices.executables.values())
        assert is_cast or registered == []


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
