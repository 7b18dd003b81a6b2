"""Random models of operators that run in bands: branches, strides, dilations, paddings, odd sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Step = tuple[Callable[..., Tensor], tuple[int, ...]]  # a function, and which earlier results it takes


class RandomModel(nn.Module):
    """A model of random operators, each on the results of earlier ones; all results that nobody reads are returned."""

    def __init__(self, random: Random, shape: tuple[int, int, int, int], operators: int) -> None:
        super().__init__()
        self.random = random
        self.layers = nn.ModuleList()
        self.steps: list[Step] = []
        self.shapes = [shape]
        while len(self.steps) < operators:
            index = len(self.shapes) - 1 if random.random() < 0.7 else random.randrange(len(self.shapes))
            self._add(index)
        read = {index for _, indices in self.steps for index in indices}
        self.results = [index for index in range(1, len(self.shapes)) if index not in read]
        for norm in self.modules():
            if isinstance(norm, nn.BatchNorm2d):
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
        if len(shape) == 4 and 0 < shape.numel() < 60_000:
            self.steps.append((function, indices))
            self.shapes.append(tuple(shape))

    def _transposed(self, index: int) -> Step | None:
        random, (_, channels, height, width) = self.random, self.shapes[index]
        stride, kernel = random.randint(1, 3), random.randint(1, 4)
        padding, extra = min(random.randint(0, 1), kernel - 1), random.randint(0, stride - 1)
        if height * width > 1300:
            return None
        layer = nn.ConvTranspose2d(channels, random.randint(1, 9), kernel, stride, padding, extra)
        return self._module(layer), (index,)

    def _layer(self, index: int) -> Step | None:
        random, (_, channels, height, width) = self.random, self.shapes[index]
        kernel = random.randint(1, 3)
        pooling = kernel, random.randint(1, 3), random.randint(0, kernel // 2)
        groups = random.choice([g for g in range(1, channels + 1) if channels % g == 0])
        layers: list[Callable[[Tensor], Tensor]] = [
            nn.MaxPool2d(*pooling, ceil_mode=random.random() < 0.3),
            nn.AvgPool2d(*pooling, count_include_pad=random.random() < 0.5),
            *([nn.BatchNorm2d(channels), nn.GroupNorm(groups, channels)] if height * width > 1 else []),
            nn.AdaptiveAvgPool2d((1, random.choice([1, width]))),
            partial(_scaled_by_linear, *(self._module(nn.Linear(channels, channels)) for _ in range(2))),
            *([nn.PixelShuffle(2)] if channels % 4 == 0 else []),
            *([nn.PixelUnshuffle(2)] if height % 2 == width % 2 == 0 else []),
        ]
        layer = random.choice(layers)
        return self._module(layer) if isinstance(layer, nn.Module) else layer, (index,)

    def _resize(self, index: int) -> Step | None:
        random, (_, _, height, width) = self.random, self.shapes[index]
        modes: list[dict[str, Any]] = [
            {"mode": "nearest"},
            {"mode": "bilinear", "align_corners": random.random() < 0.5},
        ]
        size: dict[str, Any] = {"scale_factor": 2.0} if random.random() < 0.5 else {"size": (height + 3, 2 * width - 1)}
        return partial(F.interpolate, **random.choice(modes), **size), (index,)

    def _pair(self, index: int) -> Step | None:
        size, channels = self.shapes[index][2:], self.shapes[index][1]
        adds = self.random.random() < 0.5
        if adds and self.random.random() < 0.5:
            return self._two_convolutions(index)
        same = [i for i, s in enumerate(self.shapes) if s[2:] == size and (s[1] == channels or not adds)]
        return torch.add if adds else _concatenated, (index, self.random.choice(same))

    def _two_convolutions(self, index: int) -> Step:
        """Return the sum of two convolutions, of which a graph may compute the addition with either."""
        channels = self.shapes[index][1]
        first, second = (self._module(nn.Conv2d(channels, 5, size, padding=size // 2)) for size in (1, 3))
        return partial(_sum_of_two, first, second), (index,)

    def _pointwise(self, index: int) -> Step | None:
        functions = [torch.relu, F.silu, F.relu6, torch.sigmoid, F.hardswish, F.hardsigmoid, F.gelu, _leaky]
        return self.random.choice([*functions, _line, _square, _scaled_by_mean]), (index,)

    def _other(self, index: int) -> Step | None:
        if self.random.random() < 0.3:
            return _half, (index,)
        sides = [self.random.randint(0, 2) for _ in range(4)]
        return partial(F.pad, pad=sides, mode=self.random.choice(["constant", "reflect", "replicate"])), (index,)

    def _convolution(self, index: int) -> Step | None:
        random, (_, channels, height, width) = self.random, self.shapes[index]
        kernel = random.choice([1, 1, 2, 3, 3, 3, 5]), random.choice([1, 3, 3])
        if random.random() < 0.5:
            kernel = (3, 3)
        padding = random.randint(0, kernel[0]), random.randint(0, kernel[1])
        dilation = random.choice([1, 1, 1, 2])
        if any(
            dilation * (k - 1) + 1 > size + 2 * p for k, size, p in zip(kernel, (height, width), padding, strict=True)
        ):
            return None
        groups = random.choice([1, 1, channels])
        made = nn.Conv2d(
            *(channels, groups * random.randint(1, 8), kernel, random.choice([1, 1, 2, 3]), padding, dilation, groups),
            bias=random.random() < 0.5,
        )
        return self._module(made), (index,)

    def _module(self, layer: nn.Module) -> Callable[[Tensor], Tensor]:
        self.layers.append(layer)
        return layer


def _concatenated(*tensors: Tensor) -> Tensor:
    return torch.cat(tensors, 1)


def _sum_of_two(first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return first(x) + second(x)


def _scaled_by_linear(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
    return x * torch.sigmoid(second(torch.relu(first(x.mean((2, 3))))))[:, :, None, None]


def _leaky(x: Tensor) -> Tensor:
    return F.leaky_relu(x, 0.2)


def _square(x: Tensor) -> Tensor:
    return x * x


def _half(x: Tensor) -> Tensor:
    return x[:, : x.shape[1] // 2]


def _line(x: Tensor) -> Tensor:
    return 0.5 * x + 1


def _scaled_by_mean(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x.mean((2, 3), keepdim=True))


def random_model(seed: int) -> tuple[RandomModel, Tensor]:
    """Return a random model, and an input."""
    torch.manual_seed(seed)
    random = Random(seed)
    shape = random.choice([1, 1, 1, 2, 3]), random.randint(1, 6), random.randint(5, 40), random.randint(3, 24)
    x = torch.randn(shape)
    if random.random() < 0.3:
        x = x.contiguous(memory_format=torch.channels_last)
    return RandomModel(random, shape, random.randint(2, 12)), x
