"""Calls in eager code past the registered operators: values and gradients of every order, and what torch lets users do.

Each behaviour is asked of both ways there are to make a call: by the extension, and in Python alone.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mucudnn
from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.modules import conv2d as module
from mucudnn.running import eager, hot_path, operators
from mucudnn.running.hot_path import is_eager_in_python
from mucudnn.running.operators import Choices
from mucudnn.running.workspace import release_workspaces
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.words.results import Configuration, MicroConfig

N, C, K = 3, 4, 6
GEOMETRY: tuple[Any, ...] = ((1, 1), (1, 1), (1, 1), 1)
COMPILED = "implicit-gemm" if loaded_build().library is not None else "gemm"
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True, params=["native", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The extension, or what runs where it was not built."""
    if request.param == "native" and not hot_path.is_built:
        pytest.skip("the extension was not built")
    if request.param == "python":
        monkeypatch.setattr(hot_path, "is_built", False)
        monkeypatch.setattr(operators, "run_known", lambda *_: NotImplemented)
        monkeypatch.setattr(eager, "_compiled", None)
        monkeypatch.setattr(eager, "_values", eager._values_of_rest)
        for user in (eager, module):
            monkeypatch.setattr(user, "is_eager", is_eager_in_python)
    yield request.param
    release_workspaces()


def choices_of(*algorithms: str, memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS, n: int = N) -> Choices:
    """All three operations, each sample by one of these in turn, or all by the only one."""
    names = [algorithms[i % len(algorithms)] for i in range(n)]
    parts = tuple(MicroConfig(name, 1) for name in names) if len(algorithms) > 1 else (MicroConfig(names[0], n),)
    problem = ConvProblem(Operation.FORWARD, C, 9, 8, K, 3, 3, padding=(1, 1), memory_format=memory_format)
    chosen = Choices.of({problem.with_operation(o): {n: Configuration(parts, 1.0, 0)} for o in Operation})
    chosen.recipes.clear()
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
    return {recipe.problem.operation for recipe in chosen.recipes.values() if recipe is not None}


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[Operation]:
    """Which registered operators were called, and how often."""
    called: list[Operation] = []

    def noting(operation: Operation, operator: Any) -> Callable[..., Any]:
        return lambda *given: called.append(operation) or operator(*given)

    monkeypatch.setattr(eager, "_OPERATORS", {o: noting(o, operator) for o, operator in eager._OPERATORS.items()})
    forward = operators.conv2d
    monkeypatch.setattr(operators, "conv2d", noting(Operation.FORWARD, forward))
    return called


# ---- values and gradients -------------------------------------------------------------------------------------------


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
        return eager.convolve(Operation.FORWARD, x, w, bias, *GEOMETRY, chosen)

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


def test_nothing_is_recorded_where_nothing_wants_a_gradient() -> None:
    ours, x = layer(), images()
    ours.requires_grad_(False)
    assert ours(x).grad_fn is None
    ours.requires_grad_(True)
    with torch.no_grad():
        assert not ours(x).requires_grad
    with torch.inference_mode():
        y = ours(x)
    assert y.is_inference()
    torch.testing.assert_close(y, torchs(ours)(x).detach(), **TOLERANCE)
    assert ran(ours.choices) == {Operation.FORWARD}


def test_an_inference_tensor_is_not_saved_as_with_torch() -> None:
    with torch.inference_mode():
        x = images()
    for each in (layer(), torchs(layer())):
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            each(x)


# ---- operands as they come ------------------------------------------------------------------------------------------


def views() -> dict[str, Tensor]:
    """Tensors of the shape of ``images`` that are not dense, or begin somewhere."""
    wide = torch.randn(N + 1, C, 9, 16)
    return {
        "strided": wide[:N, :, :, ::2],
        "part": wide[1:, :, :, :8],
        "transposed": torch.randn(N, C, 8, 9).transpose(2, 3),
        "expanded": torch.randn(1, C, 9, 8).expand(N, -1, -1, -1),
        "other format": torch.randn(N, C, 9, 8).contiguous(memory_format=torch.channels_last),
        "later": torch.randn(2 * N * C * 72 + 1)[1 : N * C * 72 + 1].view(N, C, 9, 8),
    }


@pytest.mark.parametrize("name", views())
def test_views_and_tensors_that_are_not_dense(name: str) -> None:
    ours, x = layer(), views()[name]
    theirs = torchs(ours)
    y, expected = ours(x), theirs(x)
    torch.testing.assert_close(y, expected, **TOLERANCE)
    assert y.stride() == expected.stride()
    dy = torch.randn(K, N, 8, 9).permute(1, 0, 3, 2)
    mine, wanted = (torch.autograd.grad(r, list(m.parameters()), dy) for r, m in ((y, ours), (expected, theirs)))
    for gradient, of_torch in zip(mine, wanted, strict=True):
        torch.testing.assert_close(gradient, of_torch, **TOLERANCE)


def test_values_that_torch_only_remembers_are_seen(registered: list[Operation]) -> None:
    """A negation that is pending, and zeros that are nowhere, lie in no memory."""
    ours = layer()
    imaginary = torch.complex(torch.randn(N, C, 9, 8), images()).conj().imag
    assert imaginary.is_neg()
    torch.testing.assert_close(ours(imaginary), torchs(ours)(imaginary), **TOLERANCE)
    nowhere = torch._efficientzerotensor((N, C, 9, 8))
    torch.testing.assert_close(ours(nowhere), torchs(ours)(nowhere), **TOLERANCE)


def test_a_gradient_that_is_expanded_or_undefined() -> None:
    ours, x = layer(), images(True)
    theirs = torchs(ours)
    (mine,), (wanted,) = (torch.autograd.grad(each(x).sum(), x) for each in (ours, theirs))
    torch.testing.assert_close(mine, wanted, **TOLERANCE)


def test_a_subclass_sees_the_operator() -> None:
    seen = []

    class Watching(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    layer()(images().as_subclass(Watching))
    assert operators.conv2d in seen


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

    torch._dynamo.reset()
    y = torch.compile(ours, backend=keep, fullgraph=True)(x)
    torch.testing.assert_close(y, ours(x))
    assert [node.target for graph in graphs for node in graph.graph.nodes].count(operators.conv2d) == 1


# ---- what users do --------------------------------------------------------------------------------------------------


def test_threads_compute_beside_each_other() -> None:
    ours = layer()
    expected = torch.autograd.grad(ours(images()).square().sum(), list(ours.parameters()))

    def gradients(_: int) -> tuple[Tensor, ...]:
        torch.set_num_threads(1)
        return torch.autograd.grad(ours(images()).square().sum(), list(ours.parameters()))

    torch.manual_seed(1)
    x = images()
    with ThreadPoolExecutor(4) as pool:
        every = list(pool.map(lambda _: ours(x).detach(), range(40)))
    assert all(torch.equal(y, every[0]) for y in every)
    assert len(expected) == 2


def test_hooks_of_modules_and_tensors_run() -> None:
    ours, x = layer(), images(True)
    seen = []
    ours.register_forward_hook(lambda *_: seen.append("forward"))
    ours.register_full_backward_hook(lambda *_: seen.append("backward"))
    ours.weight.register_hook(lambda g: seen.append("weight"))
    ours(x).sum().backward()
    assert seen == ["forward", "weight", "backward"] or seen == ["forward", "backward", "weight"]


def test_saved_tensors_go_through_hooks() -> None:
    ours, x = layer(), images(True)
    packed = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = ours(x)
    y.sum().backward()
    assert packed == [x.shape, ours.weight.shape]


def test_checkpointed_layers_are_computed_again() -> None:
    ours, x = layer(), images(True)
    (expected,) = torch.autograd.grad(ours(x).square().sum(), x)
    for use_reentrant in (True, False):
        y = checkpoint(ours, x, use_reentrant=use_reentrant)
        y.square().sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, expected)
        x.grad = None


def test_a_graph_can_be_kept_and_is_gone_otherwise() -> None:
    ours = layer()
    y = ours(images()).sum()
    first = torch.autograd.grad(y, ours.weight, retain_graph=True)
    assert torch.equal(*first, *torch.autograd.grad(y, ours.weight))
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(y, ours.weight)


@pytest.mark.parametrize("changed", ["x", "weight"])
def test_operands_that_were_changed_in_place_are_noticed(changed: str) -> None:
    ours, x = layer(), images()
    y = ours(x)
    with torch.no_grad():
        (x if changed == "x" else ours.weight).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_bias_may_change_in_place_and_a_result_be_written_to() -> None:
    ours, x = layer(), images()
    y = F.relu(ours(x), inplace=True)
    assert ours.bias is not None
    with torch.no_grad():
        ours.bias.zero_()
    y.sum().backward()
    assert ours.weight.grad is not None


def test_copies_and_pickles_compute_the_same() -> None:
    ours, x = layer(), images()
    y = ours(x)
    for other in (copy.deepcopy(ours), copy.copy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(other(x), y)


def test_gradients_add_up_also_where_anomalies_are_looked_for() -> None:
    ours, x = layer(), images()
    for _ in range(2):
        ours(x).sum().backward()
    (once,) = torch.autograd.grad(ours(x).sum(), ours.weight)
    torch.testing.assert_close(ours.weight.grad, 2 * once)
    with torch.autograd.set_detect_anomaly(True):
        ours(x).sum().backward()
    torch.testing.assert_close(ours.weight.grad, 3 * once)


def test_gradients_of_many_directions_at_once_are_those_of_each() -> None:
    ours, x = layer(), images()
    y = ours(x)
    directions = torch.randn(2, *y.shape)
    try:
        (both,) = torch.autograd.grad(y, ours.weight, directions, is_grads_batched=True, retain_graph=True)
    except RuntimeError:
        pytest.skip("the operators have no rule for it")
    for of_both, direction in zip(both, directions, strict=True):
        torch.testing.assert_close(of_both, *torch.autograd.grad(y, ours.weight, direction, retain_graph=True))


# ---- what else runs -------------------------------------------------------------------------------------------------


def test_what_is_not_tuned_is_torchs_own() -> None:
    ours = layer()
    assert ours.choices is not None
    x, w = images()[:2], ours.weight
    y = eager.convolve(Operation.FORWARD, x, w, None, *GEOMETRY, ours.choices)
    assert torch.equal(y, F.conv2d(x, w, padding=1))
    assert y.grad_fn is not None
    y.sum().backward()
    assert ran(ours.choices) == set()
    for geometry in (((1,), (1,), (1,), 1), ((1, 1, 1), (0, 0, 0), (1, 1, 1), 1)):
        dimensions = 2 + len(geometry[0])
        x, w = torch.randn([2] * dimensions), torch.randn([2] * dimensions)
        assert operators.computed(Operation.FORWARD, x, w, None, *geometry, ours.choices) is None


def test_a_call_computes_without_autograd_and_takes_lists() -> None:
    ours, x = layer(), images()
    assert ours.choices is not None
    lists: tuple[Any, ...] = ([1, 1], [1, 1], [1, 1], 1)
    for _ in range(2):
        y = operators.computed(Operation.FORWARD, x, ours.weight.detach(), ours.bias, *lists, ours.choices)
        torch.testing.assert_close(y, ours(x).detach())
    assert len(ours.choices.recipes) == 1


def test_a_workspace_that_was_given_back_is_made_again() -> None:
    ours, x = layer(), images()
    y = ours(x)
    release_workspaces()
    assert torch.equal(ours(x), y)
    larger = layer(choices_of("winograd-2x2"))
    release_workspaces()
    assert torch.equal(ours(x), y)
    torch.testing.assert_close(larger(x), y, **TOLERANCE)


def test_operands_that_are_no_convolution_get_torchs_error() -> None:
    ours = layer()
    for x in (torch.randn(N, C + 1, 9, 8), images().double(), torch.randn(2, 2)):
        messages = []
        for each in (ours, torchs(ours)):
            with pytest.raises(RuntimeError) as raised:
                each(x)
            messages.append(str(raised.value))
        assert messages[0] == messages[1]
