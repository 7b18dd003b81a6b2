"""Loops that train a model within a budget: the bits of the loop without one, whatever is computed again."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import pytest
import torch
from support.always_ours import choose_always_ours
from support.keeping import Loop, X, accumulating, assert_same, keep, sgd, two_passes_before_one, within
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mucudnn
from mucudnn.core.config import Config
from mucudnn.running import tape
from mucudnn.running.eager import hot_path
from mucudnn.running.keeping import make_keeping
from mucudnn.running.modules import TunedConvolution
from mucudnn.running.norms import TunedNorm, make_groups
from mucudnn.running.tape import ChangedOperandError, Tape
from mucudnn.solver.keeping import Choice


class Net(nn.Module):
    """Norms, activations in place, dropout, a gate that gradients do not pass, and checkpoints of both kinds."""

    def __init__(self, *, has_checkpoints: bool = True, dropout: float = 0.3) -> None:
        super().__init__()
        self.has_checkpoints, self.dropout = has_checkpoints, dropout
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(4))
        self.gate = nn.Conv2d(16, 16, 1)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            z = F.relu(norm(conv(y)), inplace=number % 2 == 0)
            if number == 1:
                z = F.dropout(z, self.dropout, self.training)
            if number > 1 and self.has_checkpoints and z.requires_grad:
                z = checkpoint(torch.sin, z, use_reentrant=number == 2)
            y = z + y
        gated = self.gate(y)
        y = y * torch.sigmoid(gated).detach() + gated * (gated > 0)
        return self.last(y.mean((2, 3)))


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def two_passes_in_either_order(model: nn.Module) -> None:
    first, second = model(X), model(X + 1)
    first.sum().backward()
    second.sum().backward()


def in_bfloat16(model: nn.Module) -> list[Tensor]:
    optimizer, losses = sgd(model), []
    scaler = torch.amp.GradScaler("cpu")
    for is_shared in (False, True):  # one context, with its cache of weights, for two passes
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            losses += [model(X).float().square().mean() for _ in range(1 + is_shared)]
        scaler.scale(sum(losses[-1 - is_shared :])).backward()
        scaler.step(optimizer)
        scaler.update()
    return losses


def of_all_sizes(model: nn.Module) -> list[Tensor]:
    optimizer, outputs = sgd(model), []
    for batch in (X, X[:1], torch.cat((X, X)), X[:, :, :24, :], X):
        optimizer.zero_grad()
        outputs.append(model(batch))
        outputs[-1].square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            outputs += [model.eval()(X), model.train()(X)]
    return outputs


def twice_through_one_graph(model: nn.Module) -> None:
    y = model(X)
    y.sum().backward(retain_graph=True)
    y.square().sum().backward()


def frozen_at_last(model: nn.Module) -> None:
    model(X).sum().backward()
    model.zero_grad()
    for parameter in [*model.parameters()][::2]:
        parameter.requires_grad_(False)
    optimizer = sgd(model)
    model(X).sum().backward()
    optimizer.step()
    model(X.clone().requires_grad_()).sum().backward()


def under_checkpoints(model: nn.Module) -> None:
    for use_reentrant in (True, False):
        checkpoint(model, X.clone().requires_grad_(), use_reentrant=use_reentrant).sum().backward()


def under_hooks(model: nn.Module) -> list[int]:
    packed: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x.numel()) or x, lambda x: x):
        model(X).sum().backward()
    return packed


def test_loops_have_the_same_bits(net: Net) -> None:
    loops: list[Loop] = [accumulating, two_passes_before_one, two_passes_in_either_order, in_bfloat16, of_all_sizes]
    for loop in (*loops, frozen_at_last):
        assert_same(loop, net, seeds=3)
    for loop in (twice_through_one_graph, under_checkpoints, under_hooks):
        assert_same(loop, Net(has_checkpoints=False))


def test_groups_in_loops() -> None:
    torch.manual_seed(0)
    net = Net(has_checkpoints=False)
    make_groups(net, lambda model: model(X))
    assert any(isinstance(part, TunedNorm) and part.choices is not None for part in net.modules())
    for loop in (accumulating, two_passes_before_one, updated_in_backward, twice_through_one_graph):
        assert_same(loop, net)


def test_tuned_convolutions_in_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    choose_always_ours(monkeypatch)
    config = Config(database=":memory:", algorithms="gemm", confirm=False, fuse=False)
    net = mucudnn.optimize(Net(has_checkpoints=False), X, config, progress=False)
    assert sum(isinstance(part, TunedConvolution) and part.choices is not None for part in net.modules()) == 6
    for loop in (in_bfloat16, of_all_sizes, updated_in_backward):
        assert_same(loop, net, seeds=1)


def test_passes_with_one_cache_of_weights_have_the_same_values() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3), nn.Conv2d(64, 64, 3))
    names: list[list[str]] = []

    class Named(Tape):
        def _choice(self, name: str) -> Choice:
            names[-1].append(name)
            return Choice.ONCE

    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            names.append([])
            with Named():
                model(X)
    assert names[0] == names[1] == 3 * ["aten::convolution"]


def test_frozen_parameters(net: Net) -> None:
    for parameter in [*net.parameters()][: len([*net.parameters()]) // 2]:
        parameter.requires_grad_(False)
    assert_same(accumulating, net)


def updated_in_backward(model: nn.Module) -> None:
    """Have hooks update each parameter as soon as its gradient is there, and free the gradient."""

    def update(optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
        optimizer.step()
        parameter.grad = None

    handles = []
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        hook = lambda parameter, optimizer=optimizer: update(optimizer, parameter)  # noqa: E731
        handles.append(parameter.register_post_accumulate_grad_hook(hook))
    for batch in (X, X + 1, X[:2]):
        model(batch).square().mean().backward()
    for handle in handles:
        handle.remove()


def test_optimizers_in_the_backward_pass(net: Net) -> None:
    assert_same(updated_in_backward, net, seeds=12)


class ReadsDetached(nn.Module):
    """The last gradients need values of which autograd does not know that they are computed from a weight."""

    def __init__(self, gate: Callable[[Tensor, nn.Conv2d], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        z = y * self.gate(y, self.second)  # whose gradient is computed after that of the weight
        return z.sin() + self.second(y)


@torch.no_grad()
def without_gradients(y: Tensor, conv: nn.Conv2d) -> Tensor:
    return torch.sigmoid(conv(y) + 1)


class Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.round(8 * x)
        ctx.mark_non_differentiable(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


GATES: list[Callable[[Tensor, nn.Conv2d], Tensor]] = [
    without_gradients,
    lambda y, conv: torch.sigmoid(conv(y) + 1).detach(),
    lambda y, conv: torch.sigmoid(conv(y).detach() + 1),
    lambda y, conv: torch.exp(F.conv2d(y.detach(), conv.weight.detach(), padding=1) / 9),
    lambda y, conv: (conv(y) > 0) & (conv(y) < 1),
    lambda y, conv: Rounding.apply(conv(y)),
]


def test_what_autograd_does_not_order_is_computed_from_old_weights() -> None:
    for gate in GATES:
        torch.manual_seed(0)
        assert_same(updated_in_backward, ReadsDetached(gate), seeds=8)


def test_updates_of_which_no_hook_of_a_parameter_tells_are_an_error() -> None:
    torch.manual_seed(0)
    model = within(ReadsDetached(GATES[0]), 0)
    keep(model, [(name, Choice.ONCE) for name, _ in model.keeping.choices])
    weight = cast(nn.Conv2d, model.second).weight

    def update(*_: object) -> None:
        with torch.no_grad():
            weight.mul_(2)

    accumulation = cast(Any, weight.view_as(weight).grad_fn).next_functions[0][0]
    accumulation.register_hook(update)
    with pytest.raises(ChangedOperandError, match="changed in place"):
        model(X).sum().backward()


def gradients_alone(model: nn.Module) -> list[Tensor]:
    x = X.clone().requires_grad_()
    return [*torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])]


def penalized(model: nn.Module) -> list[Tensor]:
    x = X.clone().requires_grad_()
    y = model(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y.square().sum() + gradient.square().sum()).backward()
    return [gradient]


class Forces(nn.Module):
    """Its result is a gradient, which is computed in the forward pass."""

    def __init__(self, energy: nn.Module) -> None:
        super().__init__()
        self.energy = energy

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.energy(x).sum(), x, create_graph=self.training)[0]


def test_gradients_of_gradients() -> None:
    torch.manual_seed(0)
    net = Net(has_checkpoints=False)
    for loop in (gradients_alone, penalized):
        assert_same(loop, net)
    assert_same(accumulating, Forces(net))


def test_an_error_in_the_forward_pass_leaves_nothing_behind(net: Net) -> None:
    def with_errors(model: nn.Module) -> None:
        for failing in (model.get_submodule("convs.2"), model.get_submodule("last")):
            hook = failing.register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(X)
            assert tape.recording() is None
            assert torch._C._len_torch_dispatch_stack() == 0
            hook.remove()
            accumulating(model)

    assert_same(with_errors, net)


def in_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return the results of calls that run at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [call.result() for call in [pool.submit(call) for call in calls]]


def test_threads_record_tapes_of_their_own() -> None:
    torch.manual_seed(0)
    net = Net(has_checkpoints=False, dropout=0.0)  # draws of threads are in no order

    def trained(model: nn.Module) -> list[Tensor]:
        for _ in range(3):
            accumulating(model)
        return [*model.state_dict().values()]

    expected = trained(copy.deepcopy(net))
    found = in_threads([partial(trained, within(net, seed)) for seed in range(4)])
    torch.testing.assert_close(found, 4 * [expected], rtol=0, atol=0)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_threads_share_a_graph() -> None:
    torch.manual_seed(0)
    net = Net(has_checkpoints=False, dropout=0.0)
    expected = torch.autograd.grad(net(X).sum(), [*net.parameters()])
    for seed in range(4):
        model = within(net, seed)
        y, parameters = model(X).sum(), [*model.parameters()]
        found = in_threads(4 * [partial(torch.autograd.grad, y, parameters, retain_graph=True)])
        torch.testing.assert_close(found, 4 * [expected], rtol=0, atol=0)


def test_a_tape_is_seen_until_the_last_one_ends() -> None:
    """Convolutions and norms ask it how many modes there are beside tapes, in whatever order threads end theirs."""
    first, second = Tape(), Tape()
    counts = []
    with first:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: second.__enter__()).result()
            pool.submit(lambda: second.__exit__(None, None, None)).result()
        counts.append(hot_path._WATCHING[1]())
    assert counts == [0]
    assert hot_path._WATCHING[1] is torch._C._len_torch_dispatch_stack


def test_transforms_and_compiled_models_keep_all() -> None:
    torch.manual_seed(0)
    net = Net(has_checkpoints=False, dropout=0.0)
    net.norms = nn.ModuleList(nn.GroupNorm(4, 16) for _ in range(4))

    def transformed(model: nn.Module) -> Any:
        def loss(parameters: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(model, parameters, (X,)).square().sum()

        return torch.func.grad(loss)(dict(model.named_parameters()))

    assert_same(transformed, net)
    assert_same(lambda model: accumulating(torch.compile(model, backend="aot_eager", fullgraph=True)), net)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of torch.compile itself
def test_compiled_parts_run_uncompiled() -> None:
    """Tapes do not see what compiled code writes."""
    compiled: list[str] = []

    def backend(graph: Any, _: Any) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            compiled.append("ran")
            return graph(*arguments)

        return run

    torch.manual_seed(0)
    part = nn.Sequential(nn.Conv2d(16, 16, 3), nn.Tanh())
    model = make_keeping(nn.Sequential(nn.Conv2d(3, 16, 3), nn.Sigmoid(), torch.compile(part, backend=backend)))
    gradients = []
    for choices in ([], [("aten::convolution", Choice.ONCE)]):
        keep(model, choices)
        gradients.append(torch.autograd.grad(model(X).sum(), [*model.parameters()]))
    assert compiled == ["ran"]
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_copies_and_states_of_models(net: Net) -> None:
    def copied(model: nn.Module) -> list[Any]:
        accumulating(model)
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), Net()
        copies[2].load_state_dict(model.state_dict())
        draws = torch.get_rng_state()
        for one in copies:
            torch.set_rng_state(draws)
            accumulating(one)
        return [[*one.state_dict().values()] for one in copies]

    assert_same(copied, net)
