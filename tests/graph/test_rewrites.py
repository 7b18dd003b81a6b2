"""Exact rewrites of captured graphs: clips of one frame as images, layers and norms of pixels."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from graph.test_programs import Calls, schedule_of
from torch import Tensor, nn
from torch.nn import functional as F

from mucudnn.graph.operators.convolution import Convolution
from mucudnn.graph.operators.operator import Barrier, Scale
from mucudnn.graph.schedule import Schedule


class Net(nn.Module):
    """A function of a clip and of layers: three convolutions 3x3x3, one of 2x3x3, a group norm and a batch norm."""

    def __init__(self, function: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first, self.second = nn.Conv3d(4, 6, 3), nn.Conv3d(6, 6, 3, padding=1)
        self.dilated = nn.Conv3d(4, 6, 3, padding=(2, 1, 1), dilation=(2, 1, 1), stride=(2, 1, 2), groups=2)
        self.short = nn.Conv3d(4, 6, (2, 3, 3), bias=False)
        self.group_norm, self.norm = nn.GroupNorm(2, 6), nn.BatchNorm3d(6)
        self.scale = nn.Parameter(torch.randn(6, 1, 1, 1))
        for one in self.parameters():
            nn.init.normal_(one)
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def _in_frames(x: Tensor) -> Tensor:
    n, c, d, h, w = x.shape
    images = x.permute(0, 2, 1, 3, 4).reshape(n * d, c, h, w)
    resized = F.interpolate(images, scale_factor=2.0, mode="nearest-exact")
    return resized.view(n, d, c, 2 * h, 2 * w).permute(0, 2, 1, 3, 4)


ONE_FRAME: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "causal": lambda net, x: net.second(F.silu(net.first(F.pad(x, (1, 1, 1, 1, 2, 0))))),
    "symmetric": lambda net, x: net.first(F.pad(x, (1, 1, 1, 1, 1, 1))),
    "uneven sides": lambda net, x: net.first(F.pad(x, (0, 2, 1, 3, 0, 2))),
    "padded twice": lambda net, x: net.first(F.pad(F.pad(x, (0, 1, 1, 0)), (1, 0, 0, 1, 2, 0))),
    "replicated": lambda net, x: net.first(F.pad(x, (1, 1, 1, 1, 2, 0), mode="replicate")),
    "zeros and copies": lambda net, x: net.first(
        F.pad(F.pad(x, (0, 0, 0, 0, 1, 0), mode="replicate"), (1, 1, 1, 1, 1, 0))
    ),
    "first frame before": lambda net, x: net.first(torch.cat([x[:, :, :1]] * 2 + [x], 2)),
    "repeated": lambda net, x: net.first(torch.concatenate((x[:, :, :1].repeat(1, 1, 2, 1, 1), x), 2)),
    "a part of a clip": lambda net, x: net.short(torch.cat((x, x, F.pad(x, (0, 0, 0, 0, 1, 0))), 2)[:, :, 1:3]),
    "dilated": lambda net, x: net.dilated(x),
    "norms": lambda net, x: F.relu(net.norm(net.group_norm(net.second(net.norm(net.second(net.second(_six(x)))))))),
    "pixels": lambda net, x: net.second(F.silu(F.normalize(_six(x), dim=1) * 2.5 * net.scale + 0.0)),
    "sums": lambda net, x: net.second(_six(x)) + _six(x) * net.scale[None] - x.mean(1, keepdim=True).sigmoid(),
    "channels": lambda net, x: net.second(torch.cat((x[:, 1:3], *x.split(2, 1)), 1)),
    "resized": lambda net, x: net.first(F.pad(F.interpolate(x, scale_factor=(1, 2, 3)), (1, 1, 1, 1, 2, 0))),
    "as images": lambda net, x: net.first(
        F.pad(_in_frames(net.first(F.pad(x, (1, 1, 1, 1, 2, 0)))[:, :4]), (1, 1, 1, 1, 2, 0))
    ),
}


def _six(x: Tensor) -> Tensor:
    return torch.cat((x, x[:, :2]), 1)


def check(functions: dict[str, Callable[[Net, Tensor], Tensor]], x: Tensor) -> tuple[Net, Schedule]:
    """Require the values in float64, of a model that returns those of all functions: it is captured once."""
    net = Net(lambda net, x: tuple(function(net, x) for function in functions.values()))
    schedule, expected = schedule_of(net, x), copy.deepcopy(net).double()(x.double())
    for name, own, exact in zip(functions, schedule.run((x,)), expected, strict=True):
        torch.testing.assert_close(own, exact.float(), rtol=1e-4, atol=1e-4, msg=lambda text, of=name: f"{of}: {text}")
    return net, schedule


def test_clips_of_one_frame_become_images() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 1, 7, 8)
    for given in (x, x.contiguous(memory_format=torch.channels_last_3d)):
        net, schedule = check(ONE_FRAME, given)
        if given is x:
            assert [y.stride() for y in schedule.run((x,))] == [y.stride() for y in net(x)]
        operators = schedule.operators
        assert {len(one.shape) for one in operators if isinstance(one, Convolution)} == {4}
        clips = [one for one in operators if isinstance(one, Barrier) and len(one.shape) == 5]
        assert all("view" in one.name for one in clips), [one.name for one in clips]


def test_other_clips_are_computed_as_they_are() -> None:
    torch.manual_seed(1)
    longer = {name: one for name, one in ONE_FRAME.items() if name not in ("as images", "a part of a clip")}
    check(longer, torch.randn(2, 4, 3, 7, 8))
    circular = {
        "circular": lambda net, x: net.first(F.pad(x, (1, 1, 1, 1, 1, 1), mode="circular")),
        "ones": lambda net, x: net.first(F.pad(x, (1, 1, 1, 1, 2, 0), value=1.0)),
        "two images": lambda net, x: net.first(torch.cat((x, x.flip(3), x), 2)),
        "nothing but padding": lambda net, x: net.first(F.pad(x, (1, 1, 1, 1, 4, 0)))[:, :, :1],
        "exchanged": lambda net, x: net.second(_six(x.permute(0, 1, 2, 4, 3).reshape(x.shape))),
    }
    check(circular, torch.randn(2, 4, 1, 7, 8))


def test_the_norm_of_pixels_takes_in_what_follows_unless_it_is_read_twice() -> None:
    scale = torch.randn(5, 1, 1)

    def once(x: Tensor) -> Tensor:
        return F.silu(2.0 * F.normalize(x, dim=1) * scale + 1)

    def twice(x: Tensor) -> Tensor:
        normed = F.normalize(x, dim=1) * scale
        return F.silu(normed * 3) + normed

    x = torch.randn(2, 5, 6, 7)
    x[:, :, 0] = 0
    for dtype, error in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        for function, count in ((once, 1), (twice, 4)):
            given = x.to(dtype)
            scale = scale.to(dtype)
            schedule = schedule_of(Calls(function), given)
            expected = function(given)
            torch.testing.assert_close(schedule.run((given,)), expected, rtol=error, atol=error)
            operators = [one for one in schedule.operators if one.rows]
            assert sum(isinstance(one, Scale) for one in operators) == 1
            assert sum(not one.name.endswith(("channels_last", "result")) for one in operators) == count


class Pixels(nn.Module):
    """A block of ConvNeXt. function: what comes between its linear layers."""

    def __init__(self, function: Callable[[Tensor], Tensor], *, affine: bool = True) -> None:
        super().__init__()
        self.function = function
        self.conv, self.norm = nn.Conv2d(7, 7, 3, padding=1), nn.LayerNorm(7, 1e-6, elementwise_affine=affine)
        self.first, self.second = nn.Linear(7, 20, bias=affine), nn.Linear(20, 7)
        self.scale = nn.Parameter(torch.randn(7, 1, 1))
        for one in self.parameters():
            nn.init.normal_(one)
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        y = self.norm(x.permute(0, 2, 3, 1))
        return x + self.scale * self.second(self.function(self.first(y))).permute(0, 3, 1, 2)


def _means_added(y: Tensor) -> Tensor:
    return F.gelu(y) + y.mean((1, 2), keepdim=True)


def test_layers_of_pixels_become_layers_of_images() -> None:
    torch.manual_seed(2)
    x = torch.randn(2, 7, 9, 8)
    for function, affine, has_rows in ((F.gelu, True, True), (F.silu, False, True), (_means_added, True, False)):
        model = Pixels(function, affine=affine)
        schedule, exact = schedule_of(model, x), copy.deepcopy(model).double()(x.double())
        torch.testing.assert_close(schedule.run((x,)), exact.float(), rtol=1e-4, atol=1e-4)
        if has_rows:
            assert [one.name for one in schedule.operators if isinstance(one, Barrier)] == []
            *_, last = (one for one in schedule.operators if isinstance(one, Convolution))
            assert len(last.sources) == 2, "the factor and the addition are computed with the second linear layer"
    for dtype in (torch.bfloat16, torch.float16):
        norm = nn.LayerNorm(7, 1e-3, dtype=dtype).requires_grad_(False)
        torch.nn.init.normal_(norm.weight)
        y = 30 + x.to(dtype)  # whose variance is small beside the mean
        layers = Calls(lambda x, norm=norm: F.relu(norm(F.relu(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)), norm)
        expected = copy.deepcopy(norm).double()(y.double().permute(0, 2, 3, 1)).relu().permute(0, 3, 1, 2)
        found, error = schedule_of(layers, y).run((y,)), 16 * torch.finfo(dtype).eps
        torch.testing.assert_close(found.double(), expected, rtol=error, atol=error)


def test_factors_are_folded_and_rounded_once() -> None:
    x, factors = torch.randn(1, 4, 5, 5, dtype=torch.bfloat16), torch.rand(3, 1, 1, dtype=torch.bfloat16)
    conv = nn.Conv2d(4, 3, 3).to(torch.bfloat16).requires_grad_(False)
    transposed = nn.ConvTranspose2d(4, 3, 3).to(torch.bfloat16).requires_grad_(False)
    for layer, factor, is_folded in (
        *((conv, 0.3, True), (conv, factors, True), (conv, factors[None], True), (transposed, 0.3, True)),
        *((transposed, factors, False), (conv, factors[0], False), (conv, factors.expand(3, 3, 3), False)),
        (conv, 1e45, False),  # the filter would be infinite
    ):
        model = Calls(lambda x, layer=layer, factor=factor: layer(x) * factor, layer)
        (found,) = (one for one in schedule_of(model, x).operators if isinstance(one, Convolution))
        expected = layer.weight
        if is_folded:
            of_filters = factor if isinstance(factor, float) else factor.double().view(3, 1, 1, 1)
            expected = (layer.weight.double() * of_filters).to(torch.bfloat16)
        assert torch.equal(found.weight, expected), (layer, factor)
