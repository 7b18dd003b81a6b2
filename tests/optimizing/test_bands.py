"""Bands of rows: results and gradients computed in them are those of the whole, or there are none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mucudnn.optimizing.bands import bands_of
from mucudnn.running.segments import Segment, in_micro_batches


class Function(nn.Module):
    """A function with some layers, which it gets before its inputs."""

    def __init__(self, function: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, *inputs: Tensor) -> Tensor:
        y: Tensor = self.function(*self.layers, *inputs)
        return y


def conv(c: int, k: int, size: int = 3, stride: int = 1, padding: int | None = None, dilation: int = 1) -> nn.Conv2d:
    padding = size // 2 * dilation if padding is None else padding
    return nn.Conv2d(c, k, size, stride, padding, dilation)


def down_and_up(first: nn.Module, inner: nn.Module, up: nn.Module, last: nn.Module, x: Tensor) -> Tensor:
    skip = torch.relu(first(x))
    y: Tensor = last(torch.cat([skip, up(torch.relu(inner(F.max_pool2d(skip, 2))))], 1))
    return y


def gated(gate: nn.Module, x: Tensor) -> Tensor:
    return x * torch.sigmoid(gate(x.mean((2, 3), keepdim=True)))


def joined(up: nn.Module, last: nn.Module, x: Tensor, skip: Tensor) -> Tensor:
    y: Tensor = last(torch.cat([up(x), skip], 1))
    return y


IN_BANDS = {
    "convolutions": nn.Sequential(conv(4, 8), nn.ReLU(), conv(8, 4)),
    "strides": nn.Sequential(conv(4, 8, 7, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)),
    "no padding": nn.Sequential(conv(4, 4, padding=0), nn.AvgPool2d(2, ceil_mode=True)),
    "dilation": conv(4, 4, dilation=3),
    "patches": conv(4, 8, 4, stride=4, padding=0),
    "padding by reflection": nn.Sequential(nn.ReflectionPad2d(1), conv(4, 4, padding=0)),
    "residual block": Function(lambda conv, x: x + torch.sigmoid(conv(x)), conv(4, 4)),
    "frozen norm": nn.Sequential(conv(4, 4), nn.BatchNorm2d(4).eval()),
    "nearest": nn.Sequential(nn.Upsample(scale_factor=2), conv(4, 4)),
    "bilinear": nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), conv(4, 4)),
    "pixel shuffle": nn.Sequential(conv(4, 16), nn.PixelShuffle(2)),
    "down and up": Function(down_and_up, conv(4, 8), conv(8, 8), nn.ConvTranspose2d(8, 8, 2, 2), conv(16, 4)),
    "norm of channels": Function(
        lambda norm, x: norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), nn.LayerNorm(4)
    ),
    "volume": nn.Sequential(nn.Conv3d(4, 4, 3, padding=1), nn.ReLU()),
}  # fmt: skip

WHOLE = {
    "group norm": nn.Sequential(conv(4, 4), nn.GroupNorm(2, 4)),
    "softmax over rows": nn.Softmax(2),
    "squeeze and excitation": Function(gated, conv(4, 4, 1)),
    "corners aligned": nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
    "upside down": Function(lambda x: x.flip(2)),
    "a row as such": Function(lambda x: x * torch.arange(x.shape[2]).unsqueeze(1)),
    "a little of the first row": Function(lambda x: x + 1e-6 * x[:, :, :1]),
    "a fixed size": nn.Upsample(size=(48, 48)),
    "dropout": Function(F.dropout),
    "far rows": conv(4, 4, dilation=20),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_BANDS)
def test_results_and_gradients_in_bands_are_those_of_the_whole(name: str) -> None:
    torch.manual_seed(0)
    function = IN_BANDS[name].double()
    for rows in (48, 50):
        x = torch.randn(2, 4, rows, *((8, 8) if name == "volume" else (20,)), dtype=torch.float64)
        require_equal(function, [x], 4)
        require_equal(function, [x], 3)


def test_inputs_may_have_other_numbers_of_rows() -> None:
    torch.manual_seed(0)
    function = Function(joined, nn.ConvTranspose2d(6, 4, 2, 2), conv(8, 4)).double()
    require_equal(function, [torch.randn(2, c, h, h, dtype=torch.float64) for c, h in ((6, 20), (4, 40))], 4)


def require_equal(function: nn.Module, inputs: list[Tensor], count: int) -> None:
    segment = Segment("", None, None, 1, bands_of(function, inputs, count))
    assert 1 < len(segment.bands) <= count
    parameters = list(function.parameters())
    found = []
    for is_whole in (True, False):
        leaves = [x.clone().requires_grad_() for x in inputs]
        copies = [x.clone() for x in leaves]
        y = function(*copies) if is_whole else in_micro_batches(function, parameters, segment, copies)
        found.append([y, *torch.autograd.grad(y.square().sum(), [*leaves, *parameters])])
    for whole, in_bands in zip(*found, strict=True):
        torch.testing.assert_close(in_bands, whole, rtol=1e-10, atol=1e-12)
    assert found[0][0].stride() == found[1][0].stride()


def test_what_mixes_rows_has_no_bands() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 4, 48, 20)
    for name, function in WHOLE.items():
        assert bands_of(function, [x], 4) == (), name


def test_other_numbers_of_rows_are_computed_whole() -> None:
    function, x = conv(4, 4), torch.randn(2, 4, 48, 20)
    segment = Segment("", None, None, 1, bands_of(function, [x], 4))
    calls: list[tuple[int, ...]] = []
    function.register_forward_hook(lambda module, inputs, y: calls.append(tuple(y.shape[::2])))
    y = in_micro_batches(function, list(function.parameters()), segment, [x[:, :, :40]])
    torch.testing.assert_close(y, function(x[:, :, :40]))
    assert calls[:2] == [(1, 40), (1, 40)]
