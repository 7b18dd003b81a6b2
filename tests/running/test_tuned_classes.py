"""Classes of tuned modules: subclasses of torch's stay what they are, in copies and pickles too."""

from __future__ import annotations

import copy
import io
import pickle
import re
from abc import ABCMeta
from collections.abc import Callable
from types import MethodType
from typing import Any, cast
from unittest import mock

import pytest
import torch
from support.problems.tuned_by_hand import assert_exact, ran, tune_by_hand
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.utils import parametrizations, parametrize

import mucudnn
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import Operation
from mucudnn.running.modules import OURS, TunedModule, make_tunable, why_left_alone
from mucudnn.tuning.trace import trace


class Named(nn.Conv2d):
    """With an argument, a method, an attribute and a buffer of its own."""

    def __init__(self, *args: Any, label: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.label = label
        self.register_buffer("calls", torch.zeros(()))

    def greeting(self) -> str:
        return f"I am {self.label}"


class NamedTwice(Named, metaclass=ABCMeta):
    pass


class Rebuilt(nn.Conv2d):
    """With pickling of its own: only sizes travel."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.in_channels, self.out_channels, self.kernel_size)


class Up(nn.ConvTranspose2d):
    pass


class Along(nn.Conv1d):
    pass


class Shifted(nn.Conv2d):
    def forward(self, x: Tensor, by: float = 1) -> Tensor:  # type: ignore[override]
        return super().forward(input=x) + by


class Sliced(nn.Conv1d):
    """With the first filters alone, as slimmable networks have it."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self._conv_forward(x, weight=self.weight[:3], bias=self.bias[:3])  # type: ignore[no-any-return, index]


class Causal(nn.Conv3d):
    """As in the decoders of video models: frames before the clip are zeros, or those of the call before."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        depth, height, width = cast(tuple[int, ...], self.padding)
        self.sides = (width, width, height, height, 2 * depth, 0)
        self.padding = (0, 0, 0)

    def forward(self, x: Tensor, before: Tensor | None = None) -> Tensor:  # type: ignore[override]
        *sides, earlier, later = self.sides
        if before is not None:
            x, earlier = torch.cat([before, x], dim=2), earlier - before.shape[2]
        return super().forward(F.pad(x, [*sides, earlier, later]))


class FrameByFrame(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.causal = Causal(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        frames = x.split(1, dim=2)
        ys = [self.causal(frame, before) for frame, before in zip(frames, (None, *frames), strict=False)]
        return torch.cat(ys, dim=2)


class Functional(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(input, self.weight)


class OwnConvForward(nn.Conv1d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight * 2, bias)  # type: ignore[no-any-return]


class OwnUp(nn.ConvTranspose2d):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        return super().forward(input, output_size).relu()


IMAGES = torch.randn(2, 3, 7, 7)


def named(cls: type[Named] = Named) -> Named:
    return cls(3, 4, 3, label="x")


@pytest.mark.parametrize("cls", [Named, NamedTwice])
def test_a_swapped_module_stays_an_instance_of_its_class(cls: type[Named]) -> None:
    torchs = named(cls)
    ours = tune_by_hand(copy.deepcopy(torchs), IMAGES)
    assert isinstance(ours, cls)
    assert isinstance(ours, mucudnn.Conv2d)
    assert type(ours).__name__ == f"Tuned{cls.__name__}"
    assert ours.greeting() == "I am x"
    assert list(ours.state_dict()) == list(torchs.state_dict())
    assert_exact(ours, torchs, IMAGES)
    assert ran(ours) == set(Operation)


def through_a_file(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, copy.copy, through_a_file, *(lambda m, p=p: pickle.loads(pickle.dumps(m, p)) for p in range(6))],
)
def test_copies_are_of_the_same_class_and_tuned(copied: Callable[[Any], Any]) -> None:
    torchs = named()
    ours = tune_by_hand(copy.deepcopy(torchs), IMAGES)
    other = copied(ours)
    assert type(other) is type(ours)
    assert other.greeting() == "I am x"
    assert_exact(other, torchs, IMAGES)
    assert ran(other) == set(Operation)


def test_pickling_of_the_users_own_stays() -> None:
    module = Rebuilt(2, 3, 3)
    make_tunable(module)
    again = pickle.loads(pickle.dumps(module))
    assert isinstance(again, Rebuilt)
    assert again.weight.shape == module.weight.shape


@pytest.mark.parametrize(
    ("module", "ours"),
    [
        (nn.Conv2d(3, 4, 3), mucudnn.Conv2d),
        (nn.Conv1d(3, 4, 3), mucudnn.Conv1d),
        (nn.ConvTranspose2d(3, 4, 3), mucudnn.ConvTranspose2d),
        (nn.ConvTranspose1d(3, 4, 3), mucudnn.ConvTranspose1d),
        (nn.ConvTranspose3d(3, 4, 3), mucudnn.ConvTranspose3d),
    ],
    ids=str,
)
def test_torchs_own_classes_become_ours_and_theirs_again(module: Any, ours: type) -> None:
    before = type(module)
    make_tunable(module)
    assert type(module) is ours
    make_tunable(module)
    assert type(module) is ours
    module.__class__ = module.untuned_class
    assert type(module) is before


@pytest.mark.parametrize("cls", [Up, Along])
def test_subclasses_of_every_kind(cls: type[nn.Module]) -> None:
    module = cls(3, 4, 3)
    make_tunable(module)
    assert isinstance(module, cls)
    assert type(pickle.loads(pickle.dumps(module))) is type(module)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (OwnConvForward(3, 4, 3), "OwnConvForward has a _conv_forward of its own"),
        (OwnUp(3, 4, 3), "OwnUp has a forward of its own"),
        (nn.Linear(3, 4), f"Linear is not among {', '.join(kind.__name__ for kind in OURS)}"),
    ],
    ids=str,
)
def test_what_computes_in_its_own_way_is_left_alone(module: nn.Module, reason: str) -> None:
    assert why_left_alone(module) == reason
    with pytest.raises(InvalidInputError, match=reason):
        make_tunable(module)


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (Shifted(3, 4, 3, padding=1), IMAGES),
        (Shifted(3, 4, 3, padding=2, padding_mode="reflect"), IMAGES),
        (Sliced(3, 4, 3), torch.randn(2, 3, 9)),
        (Causal(3, 4, 3, padding=1), torch.randn(2, 3, 4, 6, 5)),
        (FrameByFrame(), torch.randn(2, 3, 3, 6, 5)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_forward_of_their_own_gets_the_tuned_convolution(model: Any, x: Tensor) -> None:
    before = copy.deepcopy(vars(model))
    trace(model, x)
    assert vars(model).keys() == before.keys()
    ours = tune_by_hand(copy.deepcopy(model), x, "frames-native" if x.dim() == 5 else "gemm")
    for other in (ours, copy.deepcopy(ours), through_a_file(ours)):
        assert_exact(other, model, x)
        assert ran(other) == set(Operation)
        assert list(other.state_dict()) == list(model.state_dict())
    for torchs, module in zip(model.modules(), ours.modules(), strict=True):
        assert isinstance(module, type(torchs))
        if isinstance(module, TunedModule):
            module.__class__ = module.untuned_class
            assert type(module) is type(torchs)
    assert torch.equal(ours(x), model(x))


def test_methods_of_an_instance_are_as_before_once_it_is_traced() -> None:
    class Past(nn.Module):
        """Calls a bound ``forward``, past the module's hooks."""

        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.compute = self.conv.forward

        def forward(self, x: Tensor) -> Tensor:
            return self.compute(x)

    model = Past()
    model.conv._conv_forward = patched = MethodType(Shifted._conv_forward, model.conv)  # type: ignore[method-assign]
    (call,) = trace(model, IMAGES)
    assert (call.name, call.problem.x_shape(2)) == ("conv", IMAGES.shape)
    assert model.conv._conv_forward is patched
    del model.conv._conv_forward
    assert_exact(tune_by_hand(copy.deepcopy(model), IMAGES), model, IMAGES)


def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    def replaced(*arguments: Any, **named: Any) -> Any:
        return 2 * function(*arguments, **named)

    return replaced


@pytest.mark.filterwarnings("ignore:.* has been replaced")
def test_what_users_put_in_place_of_torchs_functions_is_called() -> None:
    """As tracers, quantizers and seamless textures do, before the module is tuned or afterwards."""
    signal, volume = torch.randn(2, 3, 9), torch.randn(2, 3, 4, 6, 5)
    for module, x, owner, name in (
        (nn.Conv2d(3, 4, 3), IMAGES, F, "conv2d"),
        (nn.Conv2d(3, 4, 3), IMAGES, nn.Conv2d, "_conv_forward"),
        (nn.Conv2d(3, 4, 3), IMAGES, nn.Conv2d, "forward"),
        (nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), IMAGES, F, "pad"),
        (named(), IMAGES, Named, "_conv_forward"),
        (nn.Conv1d(3, 4, 3), signal, F, "conv1d"),
        (nn.Conv1d(3, 4, 3), signal, nn.Conv1d, "_conv_forward"),
        (nn.Conv3d(3, 4, 3), volume, F, "conv3d"),
        (nn.Conv3d(3, 4, 3), volume, nn.Conv3d, "_conv_forward"),
        (nn.ConvTranspose2d(3, 4, 3), IMAGES, F, "conv_transpose2d"),
        (nn.ConvTranspose2d(3, 4, 3), IMAGES, nn.ConvTranspose2d, "forward"),
        (nn.ConvTranspose1d(3, 4, 3), signal, F, "conv_transpose1d"),
        (nn.ConvTranspose3d(3, 4, 3), volume, F, "conv_transpose3d"),
    ):
        ours = tune_by_hand(copy.deepcopy(module), x, "frames-native" if x is volume else "gemm")
        callers: list[nn.Module] = [ours]
        if name == "conv2d":
            callers.append(cast(nn.Module, torch.compile(ours, backend="aot_eager", fullgraph=True)))
        for called in callers:
            torch.testing.assert_close(called(x), module(x), rtol=1e-4, atol=1e-4)
        assert ran(ours), name
        with mock.patch.object(owner, name, doubled(getattr(owner, name))):
            for called in callers:
                torch.testing.assert_close(called(x), module(x), rtol=1e-4, atol=1e-4, msg=f"{owner}.{name}")
            if name not in ("pad", "forward") or isinstance(module, _ConvTransposeNd):
                assert re.search("has been replaced|of its own", why_left_alone(module) or ""), name
        torch.testing.assert_close(ours(x), module(x), rtol=1e-4, atol=1e-4)
        method = "forward" if isinstance(module, _ConvTransposeNd) else "_conv_forward"
        for called in (module, ours):
            setattr(called, method, doubled(getattr(called, method)))
        torch.testing.assert_close(ours(x), module(x), rtol=1e-4, atol=1e-4)
        assert why_left_alone(module) == f"it has a {method} of its own"


def test_a_forward_that_computes_by_itself_is_told() -> None:
    model = mucudnn.optimize(nn.Sequential(Functional(3, 4, 3), nn.Conv2d(4, 4, 1)), IMAGES)
    assert type(model[0]) is Functional  # type: ignore[index]
    (reason,) = [reason for name, reason in mucudnn.report(model).untuned if name == "0"]
    assert reason == "not reached by the sample input, or Functional.forward does not call super().forward"


NORMS = [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("make", [named, lambda: nn.Conv2d(3, 4, 3)], ids=["subclass", "torchs"])
def test_parametrized_modules(make: Callable[[], nn.Module], norm: Any) -> None:
    torchs = norm(make()).eval()
    ours = tune_by_hand(copy.deepcopy(torchs), IMAGES)
    assert isinstance(ours, mucudnn.Conv2d)
    assert parametrize.is_parametrized(ours, "weight")
    assert list(ours.state_dict()) == list(torchs.state_dict())
    for module in (ours, copy.deepcopy(ours)):
        torch.testing.assert_close(module(IMAGES), torchs(IMAGES), rtol=1e-4, atol=1e-5)
    gradients = [torch.autograd.grad(m(IMAGES).square().sum(), list(m.parameters())) for m in (ours, torchs)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)
    assert ran(ours) == {Operation.FORWARD, Operation.BACKWARD_FILTER}
    with pytest.raises(RuntimeError, match="Serialization of parametrized modules"):
        pickle.dumps(ours)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_scripting_names_the_way_out() -> None:
    with pytest.raises(InvalidInputError, match=r"mucudnn\.Conv2d.*module\.untuned_class"):
        torch.jit.script(nn.Sequential(tune_by_hand(named(), IMAGES)))
