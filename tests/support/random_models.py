"""Random models of images and volumes, from a seed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mucudnn.core.problem import MemoryFormat
from mucudnn.kernels.memory import format_of

Step = tuple[Callable[..., Tensor], tuple[int, ...]]  # a function, and which earlier results it takes


class RandomModel(nn.Module):
    """A model of random operators, each on the results of earlier ones; all results that nobody reads are returned.

    shape: of images, or of volumes.
    """

    def __init__(self, random: Random, shape: tuple[int, ...], operators: int) -> None:
        super().__init__()
        self.random, self.dims = random, len(shape) - 2
        self.layers = nn.ModuleList()
        self.steps: list[Step] = []
        self.shapes = [shape]
        while len(self.steps) < operators:
            index = len(self.shapes) - 1 if random.random() < 0.7 else random.randrange(len(self.shapes))
            self._add(index)
        read = {index for _, indices in self.steps for index in indices}
        self.results = [index for index in range(1, len(self.shapes)) if index not in read]
        for norm in self.modules():
            if isinstance(norm, (nn.BatchNorm2d, nn.BatchNorm3d)):
                norm.running_mean.normal_()
                norm.running_var.uniform_(0.5, 2)
        self.eval()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values = [x]
        for function, indices in self.steps:
            values.append(function(*(values[index] for index in indices)))
        return tuple(values[index] for index in self.results)

    def _add(self, index: int) -> None:
        """Add a random operator on an earlier result, unless it does not take this size."""
        kinds: dict[str, int] = {"convolution": 5, "transposed": 1, "layer": 3, "pointwise": 2, "resize": 1, "pair": 2}
        kind = self.random.choices([*kinds, "other"], [*kinds.values(), 2])[0]
        made = getattr(self, f"_{kind}")(index)
        if made is None:
            return
        function, indices = made
        try:
            with torch.no_grad():
                shape = function(*(torch.zeros(self.shapes[i]) for i in indices)).shape
        except (RuntimeError, ValueError):
            return
        if len(shape) == 2 + self.dims and 0 < shape.numel() < 60_000:
            self.steps.append((function, indices))
            self.shapes.append(tuple(shape))

    def _transposed(self, index: int) -> Step | None:
        random, (_, channels, *extent) = self.random, self.shapes[index]
        stride, kernel = random.randint(1, 3), random.randint(1, 4)
        padding, extra = min(random.randint(0, 1), kernel - 1), random.randint(0, stride - 1)
        if prod(extent) > 1300:
            return None
        transposed = nn.ConvTranspose2d if self.dims == 2 else nn.ConvTranspose3d
        return self._module(transposed(channels, random.randint(1, 9), kernel, stride, padding, extra)), (index,)

    def _layer(self, index: int) -> Step | None:
        random, (_, channels, *extent) = self.random, self.shapes[index]
        kernel, is_image = random.randint(1, 3), self.dims == 2
        pooling = kernel, random.randint(1, 3), random.randint(0, kernel // 2)
        groups = random.choice([g for g in range(1, channels + 1) if channels % g == 0])
        sizes = (1, *([1] if not is_image else []), random.choice([1, extent[-1]]))
        factors = [random.randint(1, 2) for _ in extent]
        norms = [(nn.BatchNorm2d if is_image else nn.BatchNorm3d)(channels), nn.GroupNorm(groups, channels)]
        layers: list[Callable[[Tensor], Tensor]] = [
            (nn.MaxPool2d if is_image else nn.MaxPool3d)(*pooling, ceil_mode=random.random() < 0.3),
            (nn.AvgPool2d if is_image else nn.AvgPool3d)(*pooling, count_include_pad=random.random() < 0.5),
            *(norms if prod(extent) > 1 else []),
            (nn.AdaptiveAvgPool2d if is_image else nn.AdaptiveAvgPool3d)(sizes),
            partial(_scaled_by_linear, *(self._module(nn.Linear(channels, channels)) for _ in range(2))),
            *([partial(_in_space, factors)] if channels % prod(factors) == 0 else []),
            *([nn.PixelShuffle(2)] if is_image and channels % 4 == 0 else []),
            *([nn.PixelUnshuffle(2)] if is_image and not any(size % 2 for size in extent) else []),
        ]
        layer = random.choice(layers)
        return self._module(layer) if isinstance(layer, nn.Module) else layer, (index,)

    def _resize(self, index: int) -> Step | None:
        random, (_, _, height, *others, width) = self.random, self.shapes[index]
        modes: list[dict[str, Any]] = [
            {"mode": "nearest"},
            {"mode": "bilinear" if self.dims == 2 else "trilinear", "align_corners": random.random() < 0.5},
        ]
        size: dict[str, Any] = {"size": (height + 3, *others, 2 * width - 1)}
        if random.random() < 0.5:
            size = {"scale_factor": 2.0}
        return partial(F.interpolate, **random.choice(modes), **size), (index,)

    def _pair(self, index: int) -> Step | None:
        shape, random = self.shapes[index], self.random
        kind = random.choice(["add", "add", "channels", "rows"])
        if kind == "add" and random.random() < 0.5:
            return self._two_convolutions(index)
        free = {"add": 0, "channels": 1, "rows": 2}[kind]  # the dimension along which shapes may differ
        same = [
            i
            for i, other in enumerate(self.shapes)
            if all(dim == free or a == b for dim, (a, b) in enumerate(zip(other, shape, strict=True)) if dim)
        ]
        return (partial(_concatenated, free) if free else torch.add), (index, random.choice(same))

    def _two_convolutions(self, index: int) -> Step:
        """Return the sum of two convolutions, of which a graph may compute the addition with either."""
        channels = self.shapes[index][1]
        conv = nn.Conv2d if self.dims == 2 else nn.Conv3d
        first, second = (self._module(conv(channels, 5, size, padding=size // 2)) for size in (1, 3))
        return partial(_sum_of_two, first, second), (index,)

    def _pointwise(self, index: int) -> Step | None:
        functions = [torch.relu, F.silu, F.relu6, torch.sigmoid, F.hardswish, F.hardsigmoid, F.gelu, _leaky]
        return self.random.choice([*functions, _line, _square, _scaled_by_mean, _normed, _scaled_rows]), (index,)

    def _other(self, index: int) -> Step | None:
        if self.random.random() < 0.5:
            return self.random.choice([_half, _some_rows, _middle_columns, _twice]), (index,)
        sides = [self.random.randint(0, 2) for _ in range(2 * self.dims)]
        return partial(F.pad, pad=sides, mode=self.random.choice(["constant", "reflect", "replicate"])), (index,)

    def _convolution(self, index: int) -> Step | None:
        random, (_, channels, *extent) = self.random, self.shapes[index]
        kernel = random.choice([1, 1, 2, 3, 3, 3, 5]), *(random.choice([1, 3, 3]) for _ in extent[1:])
        if random.random() < 0.5:
            kernel = (3,) * self.dims
        padding = [random.randint(0, size) for size in kernel]
        dilation = random.choice([1, 1, 1, 2])
        if any(dilation * (k - 1) + 1 > size + 2 * p for k, size, p in zip(kernel, extent, padding, strict=True)):
            return None
        groups = random.choice([1, 1, channels])
        made = (nn.Conv2d if self.dims == 2 else nn.Conv3d)(
            *(channels, groups * random.randint(1, 8), kernel, random.choice([1, 1, 2, 3]), padding, dilation, groups),
            bias=random.random() < 0.5,
        )
        if random.random() < 0.2:  # of rows, or frames, more before than behind
            behind = random.randint(0, 2)
            sides = [*(1, 1) * (self.dims - 1), behind + random.randint(0, 2), behind]
            return partial(_padded, sides, self._module(made)), (index,)
        return self._module(made), (index,)

    def _module(self, layer: nn.Module) -> Callable[[Tensor], Tensor]:
        self.layers.append(layer)
        return layer


def _concatenated(dim: int, *tensors: Tensor) -> Tensor:
    return torch.cat(tensors, dim)


def _padded(sides: list[int], convolution: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return convolution(F.pad(x, sides))


def _sum_of_two(first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return first(x) + second(x)


def _scaled_by_linear(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
    scale = torch.sigmoid(second(torch.relu(first(x.mean([*range(2, x.dim())])))))
    return x * scale.view(*scale.shape, *(1,) * (x.dim() - 2))


def _in_space(factors: list[int], x: Tensor) -> Tensor:
    n, channels, *extent = x.shape
    split = x.reshape(n, channels // prod(factors), *factors, *extent)
    behind, before = range(2 + len(extent), split.dim()), range(2, 2 + len(extent))
    order = [0, 1, *(dim for pair in zip(behind, before, strict=True) for dim in pair)]
    return split.permute(order).reshape(n, -1, *(size * factor for size, factor in zip(extent, factors, strict=True)))


def _leaky(x: Tensor) -> Tensor:
    return F.leaky_relu(x, 0.2)


def _square(x: Tensor) -> Tensor:
    return x * x


def _half(x: Tensor) -> Tensor:
    return x[:, : x.shape[1] // 2]


def _some_rows(x: Tensor) -> Tensor:
    return x[:, :, x.shape[2] // 3 :: 2]


def _middle_columns(x: Tensor) -> Tensor:
    return x[..., 1:-1]


def _twice(x: Tensor) -> Tensor:
    return torch.cat((x[:, :, :1], x[:, :, :1], x), 2)


def _normed(x: Tensor) -> Tensor:
    return F.normalize(x, dim=1) * x.square().mean(1, keepdim=True)


def _scaled_rows(x: Tensor) -> Tensor:
    return x * torch.linspace(1, 2, x.shape[2]).view(-1, *(1,) * (x.dim() - 3))


def _line(x: Tensor) -> Tensor:
    return 0.5 * x + 1


def _scaled_by_mean(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x.mean([*range(2, x.dim())], keepdim=True))


def random_model(seed: int) -> tuple[RandomModel, Tensor]:
    """Return a random model, and an input."""
    torch.manual_seed(seed)
    random = Random(seed)
    shape: tuple[int, ...] = random.choice([1, 1, 1, 2, 3]), random.randint(1, 6)
    if seed % 2:
        shape = *shape, random.randint(1, 12), random.randint(3, 9), random.randint(3, 9)
    else:
        shape = *shape, random.randint(5, 40), random.randint(3, 24)
    x = torch.randn(shape)
    if random.random() < 0.3:
        x = x.contiguous(memory_format=format_of(MemoryFormat.CHANNELS_LAST, x.dim()))
    return RandomModel(random, shape, random.randint(2, 12)), x
