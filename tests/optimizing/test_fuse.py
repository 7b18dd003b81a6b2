"""Convolutions fused with what follows them: the same function in float64, and left alone where that is not sure."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

import mucudnn
from mucudnn.bench.sources.networks import arguments_for, build
from mucudnn.database.configuration_keys import whole_run_from
from mucudnn.database.database import Database
from mucudnn.modules.fused import FusedConvolution
from mucudnn.optimizing.fuse import fuse
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.results import WithEpilogue


class Calls(nn.Module):
    """A model whose forward is a function of the modules ``conv``, ``norm`` and ``other``, and x."""

    def __init__(self, forward: Callable[..., Tensor], conv: nn.Module | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1, bias=False) if conv is None else conv
        self.norm, self.other, self.relu = nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), nn.ReLU()
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def learned(model: nn.Module) -> nn.Module:
    """In float64 and in ``eval()``, with statistics as after a training."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            for tensor in (module.running_mean, module.weight, module.bias):
                if tensor is not None:
                    tensor.data.normal_(generator=generator)
            module.running_var.uniform_(0.5, 2.0, generator=generator)
    return model.double().eval()


def parts_of(model: nn.Module) -> list[tuple[str, ...]]:
    return [module.parts for module in model.modules() if isinstance(module, FusedConvolution)]


def fused_as_before(model: nn.Module, x: Tensor | None = None) -> list[tuple[str, ...]]:
    """Fuse, compare both in float64, and return what is fused."""
    model, x = learned(model), torch.randn(2, 3, 6, 6, dtype=torch.float64) if x is None else x
    state = copy.deepcopy(model.state_dict())
    fused = fuse(model, x)
    with torch.no_grad():
        torch.testing.assert_close(fused(x.clone()), model(x.clone()), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    return parts_of(fused)


FUSED: dict[str, tuple[Callable[..., Tensor], list[tuple[str, ...]]]] = {
    "batch norm": (lambda m, x: m.norm(m.conv(x)), [("batch norm",)]),
    "batch norm and ReLU": (lambda m, x: m.relu(m.norm(m.conv(x))), [("batch norm", "ReLU")]),
    "ReLU": (lambda m, x: F.relu(m.conv(x)), [("ReLU",)]),
    "ReLU in place": (lambda m, x: F.relu(m.conv(x), inplace=True), [("ReLU",)]),
    "a method": (lambda m, x: m.conv(x).relu_(), [("ReLU",)]),
    "ReLU6": (lambda m, x: F.relu6(8 * m.conv(x)) + F.relu6(m.other(x)), [("ReLU6",)]),
    "SiLU": (lambda m, x: F.silu(m.norm(m.conv(x))), [("batch norm", "SiLU")]),
    "a residual": (lambda m, x: m.relu(x + m.norm(m.conv(x))), [("batch norm", "addition", "ReLU")]),
    "a residual in place": (lambda m, x: m.norm(m.conv(x)).add_(x), [("batch norm", "addition")]),
    "two branches": (
        lambda m, x: m.relu(m.norm(m.conv(x)) + m.other(x)),
        [("batch norm",), ("addition", "ReLU")],
    ),
    "a module that is used twice after others": (
        lambda m, x: m.relu(m.other(m.relu(m.conv(x)))),
        [("ReLU",), ("ReLU",)],
    ),
    "a sum that is wider than the result": (
        lambda m, x: m.relu(m.conv(x[:1]) + x),
        [("addition", "ReLU")],
    ),
}


def test_what_follows_a_convolution_is_fused() -> None:
    for name, (forward, parts) in FUSED.items():
        assert sorted(fused_as_before(Calls(forward))) == sorted(parts), name


LEFT_ALONE: dict[str, Callable[..., Tensor]] = {
    "the result is used twice": lambda m, x: (y := m.conv(x)) + m.norm(y),
    "the convolution is called twice": lambda m, x: m.norm(m.conv(m.conv(x))),
    "the filter is used elsewhere": lambda m, x: m.norm(m.conv(x)) * m.conv.weight.sum(),
    "batch norm comes before": lambda m, x: m.conv(m.norm(x)),
    "something lies between": lambda m, x: m.norm(m.conv(x) * 2),
    "the input changes in between": lambda m, x: (lambda y, z: m.norm(y) + z)(m.conv(x), x.relu_()),
    "the other summand is written to": lambda m, x: (lambda z: z.add_(m.conv(x)) + z)(x * 1),
    "a sum of a scaled result": lambda m, x: torch.add(m.conv(x), x, alpha=2),
    "a number is added": lambda m, x: m.conv(x) + 1,
    "it is added to itself": lambda m, x: (y := m.conv(x)) + y,
}


def test_what_may_not_be_fused_is_left_alone() -> None:
    for name, forward in LEFT_ALONE.items():
        assert fused_as_before(Calls(forward)) == [], name


def test_every_kind_of_convolution() -> None:
    for convolution, norm, shape in (
        (nn.Conv1d(4, 6, 3, groups=2), nn.BatchNorm1d(6), (2, 4, 9)),
        (nn.Conv2d(4, 6, 3, stride=2, padding="valid", dilation=2), nn.BatchNorm2d(6, affine=False), (2, 4, 9, 8)),
        (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d(6, eps=0.1), (2, 4, 5, 8)),
        (nn.Conv3d(4, 6, 2, bias=False), nn.BatchNorm3d(6), (1, 4, 4, 5, 6)),
        (nn.ConvTranspose2d(4, 6, 4, stride=2), nn.BatchNorm2d(6), (2, 4, 5, 5)),
        (mucudnn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), (2, 4, 5, 5)),
    ):
        model = nn.Sequential(convolution, norm, nn.ReLU())
        assert fused_as_before(model, torch.randn(shape, dtype=torch.float64)) == [("batch norm", "ReLU")], model


class Shifted(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


def test_what_cannot_be_folded_is_left_alone() -> None:
    for convolution, norm in (
        (nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, track_running_stats=False)),
        (Shifted(3, 3, 1), nn.BatchNorm2d(3)),
        (weight_norm(nn.Conv2d(3, 3, 1)), nn.BatchNorm2d(3)),
        (nn.ConvTranspose2d(3, 3, 1, groups=3), nn.BatchNorm2d(3)),
        (nn.Conv2d(3, 3, 1), nn.InstanceNorm2d(3)),
    ):
        assert fused_as_before(nn.Sequential(convolution, norm)) == [], norm
    overflowing = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).eval()
    for tensor, value in (
        (overflowing[0].weight, 10.0),
        (overflowing[1].weight, 1e38),
        (overflowing[1].running_var, 0),
    ):
        tensor.data.fill_(value)
    assert fuse(overflowing, torch.zeros(1, 3, 4, 4)) is overflowing


def test_folding_is_rounded_once() -> None:
    x, model = torch.zeros(1, 64, 4, 4), learned(nn.Sequential(nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64))).float()
    exact = fuse(copy.deepcopy(model).double(), x.double()).state_dict()
    folded = fuse(model, x).state_dict()
    torch.testing.assert_close(folded, {name: tensor.float() for name, tensor in exact.items()}, rtol=0, atol=0)


def test_memory_formats_stay_and_tensors_are_shared_but_the_folded_ones() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(128, 2))
    model.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(2, 8, 6, 6).contiguous(memory_format=torch.channels_last)
    fused: Any = fuse(model, x)
    assert fused.get_submodule("0.convolution").weight.is_contiguous(memory_format=torch.channels_last)
    assert fused.get_submodule("0")(x).is_contiguous(memory_format=torch.channels_last)
    assert fused.get_submodule("3").weight is model[3].weight
    assert type(model[0]) is nn.Conv2d
    assert [name for name, _ in fused.named_modules() if "1" in name] == []  # nothing is left of the batch norm


def test_training_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    with pytest.raises(InvalidInputError, match=r"the model is in training mode: call model.eval\(\) before"):
        fuse(model, torch.zeros(1, 3, 2, 2))
    model.eval()[1].train()
    with pytest.raises(InvalidInputError, match="fuse is for inference, and 1 is in training mode"):
        fuse(model, torch.zeros(1, 3, 2, 2))
    fused = fuse(model.eval(), torch.zeros(1, 3, 2, 2))
    with pytest.raises(InvalidInputError, match="fused with batch norm, and is for inference only"):
        fused.train()


class Branching(nn.Module):
    """Adds a mask, if there is one, and looks at the values of x if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor, mask: Tensor | None = None, look: bool = False) -> Tensor:
        y: Tensor = self.norm(self.conv(x))
        if mask is not None:
            y = y * mask
        return -y if look and x.sum() > 0 else y


def test_arguments_that_decide_are_part_of_the_graph() -> None:
    model, x = learned(Branching()), torch.randn(1, 3, 4, 4, dtype=torch.float64)
    fused = fuse(model, x)
    torch.testing.assert_close(fused(x), model(x))
    with pytest.raises(AssertionError, match="mask has been specialized to have value None"):
        fused(x, x)
    masked = fuse(model, (x, x))
    torch.testing.assert_close(masked(x, x), model(x, x))


class Asking(nn.Module):
    """Takes another way where x is no tensor, as tracing has it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x).relu()
        return y + 1 if isinstance(x, Tensor) else y


def test_what_has_no_equal_graph_is_left_alone_with_a_warning() -> None:
    hooked, x = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())).eval(), torch.randn(1, 3, 4, 4)
    hooked[0].register_forward_hook(lambda *_: None)
    for model, arguments, words in (
        (Branching().eval(), (x, None, True), "TraceError"),
        (Asking().eval(), x, "its graph and the model give different results on the sample input"),
        (hooked, x, "0 has hooks"),
    ):
        with pytest.warns(UserWarning, match=f"nothing is fused, the model runs as it is: {words}"):
            assert fuse(model, arguments) is model


@pytest.mark.parametrize("index", [0, 1])
def test_hooks_of_layers_are_called(index: int) -> None:
    """They see what their layer computes, and so it is not fused."""
    model, seen = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.ReLU()).eval(), []
    model[index].register_forward_hook(lambda *_: seen.append(1))
    fused = fuse(model, torch.zeros(1, 3, 2, 2))
    assert parts_of(fused) == [("ReLU",)]
    seen.clear()
    fused(torch.zeros(1, 3, 2, 2))
    assert seen == [1]


def test_gradients_copies_pickles_and_compiled_graphs_are_those_of_the_model() -> None:
    x, whole = torch.randn(1, 3, 4, 4, dtype=torch.float64, requires_grad=True), Calls(lambda m, x: x)
    model = learned(nn.Sequential(whole.conv, whole.norm, nn.ReLU()))
    fused, (expected,) = fuse(model, x), torch.autograd.grad(model(x).square().sum(), x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(fused, backend="eager", fullgraph=True)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-12, atol=1e-12)
    for again in (fused, copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert parts_of(again) == [("batch norm", "ReLU")]
        (found,) = torch.autograd.grad(again(x).square().sum(), x)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("network", "size"), [("resnet18", 64), ("mobilenetv2", 64), ("efficientnet-b0", 64)])
def test_networks_are_fused_whole(network: str, size: int) -> None:
    model = learned(build(network, 10))
    x = torch.randn(1, 3, size, size, dtype=torch.float64)
    (expected,), fused = arguments_for(network, model(x)), fuse(model, x)
    torch.testing.assert_close(fused(x), expected, rtol=1e-10, atol=1e-10)
    assert isinstance(fused, fx.GraphModule)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in fused.modules())


def test_optimize_tunes_what_is_fused(tmp_path: Path) -> None:
    model, x = learned(Calls(lambda m, x: m.relu(m.norm(m.conv(x)) + x))).float(), torch.randn(2, 3, 6, 6)
    database = tmp_path / "m.sqlite"
    config = mucudnn.Config(operations="forward", time_limit="10ms", database=database, cache_budget="1MiB")
    ours: Any = mucudnn.optimize(fuse(model, x), x, config)
    assert type(ours.conv.convolution) is mucudnn.Conv2d
    assert type(model.conv) is nn.Conv2d
    assert [tuned.problem.operation for tuned in ours.conv.convolution.tuned] == [mucudnn.Operation.FORWARD]
    with torch.no_grad():
        torch.testing.assert_close(ours(x), model(x), rtol=1e-4, atol=1e-5)
    report = mucudnn.report(ours)
    assert report.fused == (("conv", ("batch norm", "addition", "ReLU")),)
    assert "fused for inference: 1 convolutions; batch norm in 1, addition in 1, ReLU in 1" in str(report)
    assert "conv: fused with batch norm, addition, ReLU" in report.details()


class Alike(nn.Module):
    """Five equal convolutions, which unlike things follow, and one whose batch norm alone is fused with it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three, self.four, self.five = (nn.Conv2d(3, 3, 1) for _ in range(5))
        self.normed, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.two(F.relu(self.one(x))))
        x = F.relu6(self.three(x) + x)
        return self.norm(self.normed(self.five(F.relu6(self.four(x)))))


def test_equal_convolutions_are_tuned_apart_where_unlike_things_follow_them(tmp_path: Path) -> None:
    config = mucudnn.Config(operations="forward", time_limit="10ms", database=tmp_path / "m.sqlite")
    x = torch.randn(2, 3, 6, 6)
    ours = mucudnn.optimize(fuse(Alike().eval(), x), x, config)
    report = mucudnn.report(ours)
    assert {name: tuned.epilogue for name, tuned in report.layers} == {
        "one.convolution": WithEpilogue("ReLU"),
        "two.convolution": WithEpilogue("ReLU"),
        "three.convolution": WithEpilogue("ReLU6", adds=True),
        "four.convolution": WithEpilogue("ReLU6"),
        "five": None,
        "normed.convolution": None,
    }
    assert f"three.convolution: {report.layers[2][1].problem}, batch 2, with addition and ReLU6" in report.details()
    with Database(tmp_path / "m.sqlite") as database:
        keys = [row["configuration"] for row in database.every_row() if row["configuration"]]
    assert {whole_run_from(key)[2] for key in keys} == {tuned.epilogue for _, tuned in report.layers}


def test_gradients_of_a_fused_model_are_tuned_without_what_follows(tmp_path: Path) -> None:
    fused = fuse(Alike().eval(), torch.randn(2, 3, 6, 6))
    config = mucudnn.Config(time_limit="10ms", database=tmp_path / "m.sqlite", confirm=False)
    ours = mucudnn.optimize(fused, torch.randn(2, 3, 6, 6), config)
    followed = [tuned.epilogue is not None for name, tuned in mucudnn.report(ours).layers if name == "one.convolution"]
    assert followed == [True, False]


def test_optimize_goes_on_where_nothing_can_be_fused(tmp_path: Path) -> None:
    model, x = Asking().eval(), torch.randn(1, 3, 4, 4)
    config = mucudnn.Config(fuse=True, time_limit="10ms", database=tmp_path / "m.sqlite")
    with pytest.warns(UserWarning, match="nothing is fused"):
        ours: Any = mucudnn.optimize(model, x, config)
    assert ours is model
    assert type(ours.conv) is mucudnn.Conv2d
