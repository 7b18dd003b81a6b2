"""Building blocks shared by several families of networks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Added(nn.Module):
    """A module that computes body(x) + shortcut(x), where the shortcut is x itself if none is given."""

    def __init__(self, body: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(self.body(x), self.shortcut(x))


class Residual(Added):
    """A module that computes relu(body(x) + shortcut(x))."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Branches(nn.Module):
    """A module that applies all branches to the same x and concatenates their outputs along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


class StochasticDepth(nn.Module):
    """Stochastic depth: in training, zeroes random samples and scales up the others (Huang et al., 2016)."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.kept = 1.0 - probability  # share of the samples

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.kept == 1.0:
            return x
        mask = torch.empty((len(x), *(1,) * (x.dim() - 1)), dtype=x.dtype, device=x.device).bernoulli_(self.kept)
        return x * mask / self.kept


class SqueezeExcitation(nn.Module):
    """Squeeze-and-excitation: scales channels by factors computed from the channels' means (Hu et al., 2018)."""

    def __init__(self, channels: int, squeezed: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, squeezed, 1)
        self.activation = activation()
        self.expand = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        means = F.adaptive_avg_pool2d(x, 1)
        return x * torch.sigmoid(self.expand(self.activation(self.reduce(means))))


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of x, (N, C, H, W), separately at each pixel."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def normalised(
    in_channels: int, channels: int, size: int, *, stride: int = 1, padding: int = 0, groups: int = 1
) -> nn.Sequential:
    """Return a convolution without bias, followed by batch norm."""
    return named(
        conv=nn.Conv2d(in_channels, channels, size, stride, padding, groups=groups, bias=False),
        norm=nn.BatchNorm2d(channels),
    )


def activated(in_channels: int, channels: int, size: int, *, stride: int = 1, padding: int = 0) -> nn.Sequential:
    """Return a convolution without bias, followed by batch norm and ReLU."""
    return normalised(in_channels, channels, size, stride=stride, padding=padding).append(nn.ReLU())


def named(**modules: nn.Module) -> nn.Sequential:
    """Return a sequential module that contains these modules under their argument names."""
    return nn.Sequential(OrderedDict(modules))
