"""Convolutions that are tuned as they come, by algorithms of ours, against torch's own in float64."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support.made_up_workshop import MadeUpWorkshop, enabled
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from mucudnn.core.config import Config
from mucudnn.core.problem import Operation
from mucudnn.enabling.session import Session
from mucudnn.running.dispatcher import untouched
from mucudnn.running.workspace import kept_by_each_thread, release_workspaces, workspace_of


@pytest.fixture
def workshop() -> MadeUpWorkshop:
    return MadeUpWorkshop()


@pytest.fixture
def session(workshop: MadeUpWorkshop) -> Iterator[Session]:
    with enabled(workshop) as session:
        yield session


class Standardized(nn.Conv2d):
    """As models of other packages have it: a subclass with a forward pass of its own."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, 3, 3) / 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.conv2d(x, self.weight, padding="same")


class Block(nn.Module):
    """A block of an inverted residual, as hubs of models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.norm = nn.Conv2d(4, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.gate, self.project = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(F.relu(self.norm(self.expand(x))))
        gate = torch.sigmoid(self.gate(F.adaptive_avg_pool2d(y, 1)))
        return x + self.project(y * gate)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "module": lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1),
    "subclass": lambda: Standardized(4, 6, 3, padding=(2, 1), dilation=2),
    "functional": Functional,
    "circular padding": lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"),
    "weight norm": lambda: parametrizations.weight_norm(nn.Conv2d(4, 6, 3)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Conv2d(4, 6, 3)),
    "block of a hub": Block,
}


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The result, and the gradients of the input and of all parameters."""
    x = x.detach().clone().requires_grad_()
    y: Tensor = model(x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return [y, *torch.autograd.grad((y * weights).sum(), [x, *model.parameters()])]


def assert_right(model: nn.Module, x: Tensor) -> None:
    """Compare with torch's own in float64."""
    given = gradients(model, x)
    with untouched:
        double = gradients(model.double(), x.double())
    model.float()
    for ours, exact in zip(given, double, strict=True):
        torch.testing.assert_close(ours, exact.float(), rtol=1e-4, atol=1e-4)


def test_models_are_right_and_computed_by_what_was_chosen() -> None:
    for name, make in MODELS.items():
        with enabled(MadeUpWorkshop()) as session:
            assert_right(make().eval(), torch.randn(2, 4, 6, 5))
        single = [met for met in session.status().problems if met.problem.dtype == "float32"]
        assert {met.problem.operation for met in single} == set(Operation), name
        assert all(met.ours == met.calls for met in single), name


TRANSPOSED: tuple[dict[str, Any], ...] = (
    {},
    {"stride": 2, "output_padding": 1},
    {"stride": 3, "padding": 2, "output_padding": 2, "groups": 2},
    {"dilation": 2, "padding": 1, "bias": False},
    {"stride": 2, "dilation": 3, "output_padding": 2},  # more than the stride: no convolution undoes it
)


@pytest.mark.parametrize(("dimensions", "torch_format"), [(1, None), (2, None), (2, torch.channels_last), (3, None)])
def test_transposed_convolutions(dimensions: int, torch_format: torch.memory_format | None) -> None:
    kind = getattr(nn, f"ConvTranspose{dimensions}d")
    algorithm = "frames-implicit-gemm" if dimensions == 3 else "gemm"
    for arguments in TRANSPOSED:
        model, x = kind(4, 6, 3, **arguments), torch.randn(2, 4, *(5, 4, 3)[:dimensions])
        if torch_format is not None:
            model, x = model.to(memory_format=torch_format), x.to(memory_format=torch_format)  # type: ignore[call-overload]
        with enabled(MadeUpWorkshop("native")):
            strides = model(x).stride()
        with enabled(MadeUpWorkshop(algorithm)) as session:
            assert model(x).stride() == strides
            assert_right(model, x)
        ran = {met.problem.operation for met in session.status().problems if met.ours}
        is_undone = arguments.get("output_padding", 0) < arguments.get("stride", 1)
        assert ran == (set(Operation) if is_undone else set()), arguments


def test_volumes_are_computed(workshop: MadeUpWorkshop, session: Session) -> None:
    workshop.algorithm = "frames-implicit-gemm"
    for layer in (nn.Conv3d(2, 3, 3, padding=1), nn.ConvTranspose3d(2, 3, 2, stride=2)):
        assert_right(layer, torch.randn(1, 2, 4, 4, 4))
    assert all(met.problem.is_volume and met.ours for met in session.sizes.values())
    assert {met.problem.operation for met in session.sizes.values()} == {*Operation}
    assert not session.passed_by


def test_what_is_no_convolutions_gradient_empty_batches_and_wrong_operands_are_torchs(session: Session) -> None:
    assert_right(nn.ConvTranspose2d(4, 6, 3, dilation=2, output_padding=1), torch.randn(1, 4, 5, 5))
    assert session.passed_by == {"torch.float32 on cpu, or not a convolution of images or volumes": 1}
    assert F.conv2d(torch.zeros(0, 4, 5, 5), torch.zeros(6, 4, 3, 3)).shape == (0, 6, 3, 3)
    for x, w in (
        (torch.zeros(1, 4, 5, 5), torch.zeros(6, 3, 3, 3)),
        (torch.zeros(1, 4, 2, 2), torch.zeros(6, 4, 3, 3)),
        (torch.zeros(1, 4, 5, 5), torch.zeros(6, 4, 3, 3).double()),
    ):
        with pytest.raises(RuntimeError):
            F.conv2d(x, w)
    assert not session.sizes


def test_what_is_not_wanted_or_not_tuned_is_not_computed() -> None:
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 6, 6)
    for operation in Operation:
        workshop = MadeUpWorkshop()
        with enabled(workshop, Config(workspace_limit=None, operations=operation)):  # type: ignore[arg-type]
            assert_right(layer, x)
        assert set(workshop.operations) == {operation}
    layer.weight.requires_grad_(False)
    with enabled(workshop := MadeUpWorkshop()):
        layer(x).sum().backward()
    assert workshop.operations == ["forward"]
    assert layer.bias is not None
    torch.testing.assert_close(layer.bias.grad, torch.full((6,), 32.0))


def test_autocast(session: Session) -> None:
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert {met.problem.dtype for met in session.status().problems} == {"bfloat16"}
    assert all(met.ours for met in session.status().problems)
    assert layer.weight.grad is not None
    expected = torch.autograd.grad(F.conv2d(x, layer.weight, layer.bias).sum(), layer.weight)
    torch.testing.assert_close(layer.weight.grad, *expected, rtol=2e-2, atol=0.5)


def test_a_compiled_model(session: Session) -> None:
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3))
    compiled = torch.compile(model, backend="aot_eager")
    assert_right(compiled, torch.randn(2, 4, 6, 6))  # type: ignore[arg-type]
    assert any(met.ours for met in session.status().problems)


def test_threads_share_what_is_tuned(session: Session, workshop: MadeUpWorkshop) -> None:
    model, x, wrong = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 6, 6), []
    expected = F.conv2d(x.double(), model.weight.double(), model.bias.double()).float()  # type: ignore[union-attr]
    workshop.tuned.clear()

    def infer() -> None:
        for _ in range(20):
            with torch.no_grad():
                if not torch.allclose(model(x), expected, rtol=1e-4, atol=1e-4):
                    wrong.append(1)

    threads = [threading.Thread(target=infer) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(workshop.tuned) == 1
    assert sum(met.calls for met in session.status().problems if met.problem.dtype == "float32") == 80


def test_torchs_own_within_a_limit_has_the_kept_workspace_given_back_that_would_exceed_it() -> None:
    """Torch's own was chosen, with no byte of its own; a limit that does not hold it leaves what is kept alone."""

    def stays(call: Callable[[], object], kept_bytes: int) -> bool:
        release_workspaces()
        workspace_of(kept_bytes, torch.device("cpu"), keeps=True)
        call()
        return kept_by_each_thread.workspace.buffer is not None

    for config, is_held in ((Config(workspace_limit=1000), True), (Config(), False)):
        with enabled(MadeUpWorkshop("native"), config):
            layer, x = nn.Conv2d(2, 3, 3), torch.randn(1, 2, 6, 6, requires_grad=True)
            y = layer(x)
            backward = partial(y.backward, torch.ones_like(y), retain_graph=True)
            for call in (lambda: layer(x), backward):  # noqa: B023
                call()  # what is chosen is known from now on
                assert stays(call, 1000)
                assert stays(call, 1001) is not is_held
    release_workspaces()
