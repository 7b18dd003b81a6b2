"""Norms with additions and activations as groups: what they keep, what takes them, and what leaves them alone."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
import weakref
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mucudnn.core.problem import Operation
from mucudnn.core.records import Configuration, MicroConfig
from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.running import norms
from mucudnn.running.choices import Choices
from mucudnn.running.groups import Group, Normalized, group_of
from mucudnn.running.modules import make_tunable
from mucudnn.running.norms import TunedNorm, make_groups, moments_from, why_not_grouped
from mucudnn.running.pending import ChangedError, Pending
from mucudnn.running.problems import problem_of_call

pytestmark = pytest.mark.skipif(loaded_build().library is None, reason="nothing is compiled")


class Block(nn.Module):
    """A convolution, a norm, and what a function does with the norm's result and the block's input."""

    def __init__(self, after: Callable[[Tensor, Tensor], Tensor], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)  # whose gradient is zero behind batch norm
        self.norm = norm or nn.BatchNorm2d(4)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.norm(self.conv(x)), x)


def seeded(after: Callable[[Tensor, Tensor], Tensor], norm: nn.Module | None = None) -> tuple[Block, Block, Tensor]:
    """Return a block, another one with its norm as a group, and an input."""
    torch.manual_seed(0)
    block, x = Block(after, norm), torch.randn(3, 4, 6, 5)
    grouped = copy.deepcopy(block)
    state = copy.deepcopy(grouped.state_dict())
    make_groups(grouped, lambda model: model(x))
    grouped.load_state_dict(state)
    return block, grouped, x


def gradients_of(block: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    block.zero_grad()
    y = block(x)
    assert type(y) is Tensor
    (y * torch.linspace(-1, 2, y.numel()).view_as(y)).sum().backward()
    return [y.detach(), *(part.grad for part in (x, *block.parameters()) if part.grad is not None)]


def require_alike(block: nn.Module, grouped: nn.Module, x: Tensor) -> None:
    for theirs, ours in zip(gradients_of(block, x), gradients_of(grouped, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for name, buffer in block.named_buffers():
        torch.testing.assert_close(grouped.get_buffer(name), buffer)


def activated(y: Tensor, x: Tensor) -> Tensor:
    return F.silu(y)


def in_place(y: Tensor, x: Tensor) -> Tensor:
    y += x
    return F.relu(y, inplace=True)


def on_two_ways(y: Tensor, x: Tensor) -> Tensor:
    return F.relu(y) + y.mul(2).add_(x)


GROUPS: list[tuple[Callable[[Tensor, Tensor], Tensor], str]] = [
    (lambda y, x: y, "batch norm"),
    (lambda y, x: F.relu(y), "batch norm + ReLU"),
    (lambda y, x: nn.ReLU(inplace=True)(y), "batch norm + ReLU"),
    (lambda y, x: torch.relu_(y), "batch norm + ReLU"),
    (lambda y, x: y.relu(), "batch norm + ReLU"),
    (lambda y, x: nn.ReLU6()(y), "batch norm + ReLU6"),
    (lambda y, x: F.leaky_relu(y, 0.2), "batch norm + leaky_relu"),
    (lambda y, x: F.silu(y, inplace=True), "batch norm + SiLU"),
    (lambda y, x: nn.Hardswish()(y), "batch norm + hardswish"),
    (lambda y, x: F.gelu(y), "batch norm + gelu"),
    (lambda y, x: nn.GELU(approximate="tanh")(y), "batch norm + gelu_tanh"),
    (lambda y, x: y + x, "batch norm + addition"),
    (lambda y, x: torch.relu(x + y), "batch norm + addition + ReLU"),
    (in_place, "batch norm + addition + ReLU"),
    (lambda y, x: F.silu(y.add_(x)), "batch norm + addition"),
    (lambda y, x: torch.sigmoid(y) * x, "batch norm"),
    (lambda y, x: F.relu(torch.add(y, x, alpha=2)), "batch norm"),
    (on_two_ways, "batch norm + ReLU"),
]


@pytest.mark.parametrize("extension", ["extension", "Python alone"])
def test_groups_compute_what_torch_computes_by_whatever_name_it_is_called(
    extension: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if extension == "Python alone":
        monkeypatch.setattr(norms, "batch_norm_key", lambda *_: None)
    for after, kind in GROUPS:
        block, grouped, x = seeded(after)
        assert isinstance(grouped.norm, TunedNorm)
        assert isinstance(grouped.norm, nn.BatchNorm2d)
        assert kind in map(str, grouped.norm.choices.calls)
        require_alike(block, grouped, x)
        require_alike(block.to(memory_format=torch.channels_last), grouped.to(memory_format=torch.channels_last), x)


class Tripled(torch.autograd.Function):
    """A function that PyTorch applies to pending tensors without asking them."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y * 3

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * 3


@pytest.mark.parametrize(
    "after",
    [
        lambda y, x: F.relu(y) + Tripled.apply(y),
        lambda y, x: Tripled.apply(y) + F.relu(y),
        lambda y, x: F.relu(y) + F.silu(y) + y,
        lambda y, x: F.relu(y + x) + Tripled.apply(y),
    ],
)
def test_a_norm_is_used_beside_its_activation(after: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Its node of autograd unpacks what it has saved once, as checkpoints demand."""
    block, grouped, x = seeded(after)
    require_alike(block, grouped, x)
    norm, grouped.norm = grouped.norm, nn.Sequential()
    grouped.after = lambda y, x: checkpoint(lambda y, x: after(norm(y), x), y, x, use_reentrant=False)
    for theirs, ours in zip(gradients_of(block, x)[:2], gradients_of(grouped, x)[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_running_statistics_of_two_dtypes_are_torchs() -> None:
    block, grouped, x = seeded(activated)
    for model in (block, grouped):
        model.bfloat16()
        model.norm.running_mean = torch.zeros(4)
    results: list[Any] = []
    for model in (block, grouped):
        try:
            results.append(model(x.bfloat16()))
        except RuntimeError as error:
            results.append(str(error))
    assert type(results[1]) is type(results[0])
    assert results[1] == results[0] if isinstance(results[0], str) else torch.equal(*results)


class Activated(nn.BatchNorm2d):
    """A norm of a user with an activation of its own, as timm's ``BatchNormAct2d``."""

    def forward(self, input: Tensor) -> Tensor:
        y = F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, True, 0.1, self.eps)
        return F.silu(y)


class OverChannels(nn.LayerNorm):
    """A layer norm over the channels of images, as ConvNeXt's."""

    def forward(self, input: Tensor) -> Tensor:
        y = F.layer_norm(
            input.permute(0, 2, 3, 1).contiguous(), self.normalized_shape, self.weight, self.bias, self.eps
        )
        return y.permute(0, 3, 1, 2)


def test_every_norm_runs_as_a_group_with_its_own_statistics() -> None:
    frozen = nn.BatchNorm2d(4).eval()
    frozen.running_mean = torch.arange(4.0)
    norms = [
        nn.BatchNorm2d(4, momentum=None),
        nn.BatchNorm2d(4, affine=False),
        nn.BatchNorm2d(4, track_running_stats=False, eps=0.1),
        frozen,
        nn.InstanceNorm2d(4, affine=True),
        nn.GroupNorm(2, 4),
        Activated(4),
        OverChannels(4),
    ]
    for norm in norms:
        block, grouped, x = seeded(lambda y, x: F.relu(y), norm)
        assert isinstance(grouped.norm, TunedNorm)
        assert grouped.norm.choices.calls.total() == 1, norm
        for _ in range(2):
            require_alike(block, grouped, x)
        assert block.state_dict().keys() == grouped.state_dict().keys()


def test_a_group_keeps_its_input_and_one_bit_an_element() -> None:
    _, grouped, x = seeded(in_place)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = grouped(x)
    sizes = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in kept if tensor is not y}
    assert sum(nbytes == y.nbytes for nbytes in sizes.values()) == 2  # the convolution's x and the norm's x
    assert y.untyped_storage().data_ptr() not in sizes
    assert sum(nbytes for nbytes in sizes.values() if nbytes != y.nbytes) < y.nbytes * 0.6


def test_gradients_of_gradients_are_torchs() -> None:
    norms = nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.BatchNorm2d(4).eval()
    for norm, after in itertools.product(norms, (activated, in_place)):
        results = []
        for block in seeded(after, norm)[:2]:
            block.zero_grad()
            x = torch.arange(3 * 4 * 6 * 5.0).square().cos().view(3, 4, 6, 5).requires_grad_()
            (dx,) = torch.autograd.grad(block(x).square().sum(), x, create_graph=True)
            dx.square().sum().backward()
            results.append([parameter.grad for parameter in (x, *block.parameters())])
        for theirs, ours in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


def test_gradients_of_a_single_sample_with_the_channels_last_can_be_differentiated() -> None:
    norm = nn.BatchNorm2d(4)
    x, dy, v = torch.randn(3, 1, 4, 6, 5)
    results = []
    for tuned in (norm, seeded(activated, copy.deepcopy(norm))[1].norm):
        z = x.contiguous(memory_format=torch.channels_last).requires_grad_()
        gradients = torch.autograd.grad(F.silu(tuned(z)), (z, *tuned.parameters()), dy, create_graph=True)
        results.append([*gradients, *torch.autograd.grad(gradients[0], z, v)])
    assert isinstance(tuned, TunedNorm)
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_results_have_the_memory_format_that_torchs_have() -> None:
    norms = nn.BatchNorm1d(4), nn.GroupNorm(2, 4)
    for norm, extent in (*itertools.product(norms, ((5,), ())), (nn.GroupNorm(2, 4), (2, 2, 2, 3))):
        x = torch.randn(3, *extent, 4).movedim(-1, 1)
        grouped = nn.Sequential(copy.deepcopy(norm), nn.ReLU())
        make_groups(grouped, lambda model, x=x: model(x))
        assert isinstance(grouped[0], TunedNorm)
        assert grouped(x).stride() == F.relu(norm(x)).stride()


def test_running_statistics_are_updated_once_a_step_under_checkpoints() -> None:
    for reentrant in (False, True):
        block, grouped, x = seeded(in_place)
        gradients_of(block, x)
        x = x.requires_grad_()
        checkpoint(grouped, x, use_reentrant=reentrant).square().sum().backward()
        for name, buffer in block.named_buffers():
            torch.testing.assert_close(grouped.get_buffer(name), buffer)


class Swish(torch.autograd.Function):
    """An activation of a user, of which autograd knows what the user wrote."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return 2 * g * s * (1 + x * (1 - s))  # not the derivative: it must be called


def test_functions_of_users_get_the_values_and_give_the_gradients() -> None:
    def after(y: Tensor, x: Tensor) -> Tensor:
        return F.relu(y) + Swish.apply(y)  # type: ignore[no-untyped-call]

    block, grouped, x = seeded(after)
    require_alike(block, grouped, x)


def test_hooks_see_plain_tensors_and_their_gradients() -> None:
    seen = []
    for block in seeded(lambda y, x: F.relu(y))[:2]:
        notes: list[Any] = []
        block.norm.register_forward_hook(lambda module, x, y, notes=notes: notes.append(type(y)))
        block.norm.register_full_backward_hook(lambda module, dx, dy, notes=notes: notes.append(dy[0].shape))
        gradients_of(block, torch.randn(2, 4, 5, 5))
        seen.append(notes)
    assert seen[0] == seen[1] == [Tensor, torch.Size([2, 4, 5, 5])]


def test_a_pending_tensor_whose_operand_changes_is_refused() -> None:
    def after(y: Tensor, x: Tensor) -> Tensor:
        z = y + x
        x.mul_(2)
        return F.relu(z)

    with pytest.raises(ChangedError, match=r"Config\(fuse=False\)"):
        seeded(after)


def test_pending_tensors_stay_within_norms_that_activations_take() -> None:
    for after, is_deferred in ((activated, True), (lambda y, x: y.sigmoid(), False)):
        _, grouped, x = seeded(after)
        assert isinstance(grouped.norm(x), Pending) is is_deferred


def test_convolutions_have_groups_computed_again_if_nothing_else_keeps_them() -> None:
    assert group_of(torch.zeros(1)) is None
    for after, is_again in ((lambda y, x: F.relu(y).sum(), True), (lambda y, x: F.relu(y).square(), False)):
        _, grouped, _ = seeded(after)
        assert grouped.norm.choices.computes_again is is_again


def test_groups_survive_copies_and_pickles_and_leave_eval_and_compiled_models_alone() -> None:
    block, grouped, x = seeded(in_place)
    file = io.BytesIO()
    torch.save(grouped, file)
    file.seek(0)
    for copied in (copy.deepcopy(grouped), torch.load(file, weights_only=False)):
        assert isinstance(copied.norm, TunedNorm)
        require_alike(copy.deepcopy(block), copied, x)
    require_alike(block, grouped, x)
    make_tunable(grouped.conv)  # without choices
    with pytest.raises(TypeError, match="conv2d"):
        grouped.conv(5)
    compiled = torch.compile(grouped, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), copy.deepcopy(block)(x))
    block.load_state_dict(grouped.state_dict())
    torch.testing.assert_close(grouped.eval()(x), block.eval()(x))


def test_what_cannot_run_as_a_group_says_why() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(self.conv(x), None, None, training=True)

    mixed, x = Mixed(), torch.randn(2, 4, 3, 3)
    assert make_groups(mixed, lambda model: model(x)) == []
    assert why_not_grouped(mixed) == "Mixed calls a norm in a forward that also computes convolutions"
    block = Block(activated).double()
    (norm,) = make_groups(block, lambda model: model(x.double()))
    assert norm.choices is not None
    assert "float64" in "".join(norm.choices.refusals)
    for layer, why in (
        (nn.InstanceNorm2d(4, track_running_stats=True), "an instance norm has running statistics"),
        (nn.LayerNorm([3, 3]), "a layer norm is over more than the last dimension, or its input is not contiguous"),
        (nn.BatchNorm1d(4), "its input is not a plain tensor with channels"),
    ):
        y = torch.randn(2, 4, 3, 3) if not isinstance(layer, nn.BatchNorm1d) else torch.randn(0, 4)
        (norm,) = make_groups(layer, lambda model, y=y: model(y))
        assert norm.choices is not None
        assert norm.choices.refusals == {why}


def test_norms_take_the_moments_that_convolutions_compute() -> None:
    block, grouped, x = seeded(in_place)
    x = x.contiguous(memory_format=torch.channels_last)
    make_tunable(grouped.conv)
    problem = problem_of_call(x, grouped.conv.weight, (1, 1), (1, 1), (1, 1), 1)
    assert problem is not None
    parts = (MicroConfig("implicit-gemm", 2), MicroConfig("implicit-gemm", 1))
    choices = Choices.of({problem: {3: Configuration(parts, 1.0, 10**6)}}, computes_moments=True)
    vars(grouped.conv)["choices"] = choices
    taken: list[Tensor] = []

    def take(moments: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        taken.append(moments)
        return moments_from(moments, *arguments)

    with mock.patch.object(norms, "moments_from", take):
        for _ in range(2):
            require_alike(block.to(memory_format=torch.channels_last), grouped, x)
    assert len(taken) == 2
    assert choices.fusing(computes_moments=False, normalizes=()) is not choices
    assert pickle.loads(pickle.dumps(choices)) is choices


def normalizing(after: nn.Module, x: Tensor, *operations: Operation) -> tuple[nn.Sequential, nn.Sequential]:
    """Return a norm, an activation and a convolution, and a copy whose convolution normalizes in these operations."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(8), after, nn.Conv2d(8, 8, 1))
    grouped = copy.deepcopy(model)
    convolution: Any = grouped[2]
    make_tunable(convolution)
    make_groups(grouped, lambda module: module(x))
    grouped.load_state_dict(model.state_dict())
    forward = problem_of_call(x, convolution.weight, (1, 1), (0, 0), (1, 1), 1)
    assert forward is not None
    parts = Configuration((MicroConfig("pointwise", 2), MicroConfig("pointwise", 1)), 1.0, 10**6)
    chosen = {forward.with_operation(operation): {3: parts} for operation in operations}
    vars(convolution)["choices"] = Choices.of(chosen, normalizes=operations)
    return model, grouped


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_backward_filter_normalizes_what_it_reads(memory_format: torch.memory_format) -> None:
    """dw of a convolution behind a group is that of its result, which is not computed again."""
    x = torch.randn(3, 8, 6, 5).contiguous(memory_format=memory_format)
    model, grouped = normalizing(nn.ReLU6(), x, Operation.BACKWARD_FILTER)
    with mock.patch.object(Group, "computed", side_effect=AssertionError("the result was computed again")):
        require_alike(model, grouped, x)
    choices: Any = grouped[2].choices
    assert choices.normalizing
    assert pickle.loads(pickle.dumps(choices)) is choices


@pytest.mark.parametrize("activation", [nn.ReLU6(), nn.ReLU(inplace=True), nn.SiLU(inplace=True), nn.GELU()])
def test_a_convolution_normalizes_what_no_activation_has_computed(activation: nn.Module) -> None:
    x = torch.randn(3, 8, 6, 5)
    model, grouped = normalizing(activation, x, Operation.FORWARD, Operation.BACKWARD_FILTER)
    norm: Any = grouped[0]
    assert norm.choices.has_one_reader
    norm.choices.defers_activations = True
    with mock.patch.object(Normalized, "values", side_effect=AssertionError("the result was computed")):
        require_alike(model, grouped, x)


class Elsewhere(nn.Sequential):
    """A norm, an activation and a convolution, and what else a function does with the activation's result."""

    def __init__(self, parts: Iterable[nn.Module], uses: Callable[[Tensor], Tensor]) -> None:
        super().__init__(*parts)
        self.uses = uses

    def forward(self, x: Tensor) -> Tensor:
        y = self[1](self[0](x))
        return self[2](y) + self.uses(y)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "uses",
    [lambda y: y, lambda y: y.relu(), lambda y: y.mean((2, 3), keepdim=True), lambda y: F.avg_pool2d(y, 3, 1, 1)],
)
def test_what_else_reads_an_activation_is_noticed_and_right(uses: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, 8, 6, 5)
    model, grouped = normalizing(nn.ReLU6(inplace=True), x, Operation.FORWARD, Operation.BACKWARD_FILTER)
    convolution: Any = grouped[2]
    choices = convolution.choices
    vars(convolution)["choices"] = None
    model, grouped = Elsewhere(model, uses), Elsewhere(grouped, uses)
    make_groups(grouped, lambda module: module(x))
    grouped.load_state_dict(model.state_dict())
    norm: Any = grouped[0]
    assert norm.choices.is_read_elsewhere
    assert not norm.choices.has_one_reader
    vars(convolution)["choices"] = choices
    norm.choices.defers_activations = True
    require_alike(model, grouped, x)


def test_nothing_keeps_a_pending_tensor_that_an_operation_in_place_has_replaced() -> None:
    x = torch.randn(3, 8, 6, 5)
    _, grouped = normalizing(nn.ReLU6(inplace=True), x, Operation.FORWARD, Operation.BACKWARD_FILTER)
    norm: Any = grouped[0]
    norm.choices.defers_activations = True
    seen: list[weakref.ref[Tensor]] = []
    grouped[1].register_forward_hook(lambda *args: seen.extend(map(weakref.ref, (*args[1], args[2]))))
    gc.disable()
    try:
        grouped(x)
        assert len(seen) == 2
        assert all(one() is None for one in seen)
    finally:
        gc.enable()
