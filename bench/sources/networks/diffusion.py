"""Networks of diffusion models: the UNet of DDPM (Ho et al., 2020) and the autoencoder of latent diffusion.

The UNet is the one for CIFAR-10, and the autoencoder is that of Rombach et al., 2022 (latents 8 times smaller, with 4
channels). Here the UNet has three quarters, and the autoencoder half, of the published width, 128. At full width the
networks have the published 35,746,307 and 83,653,863 parameters.
"""

from __future__ import annotations

from math import log

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mucudnn.bench.sources.networks.blocks import named

_UNET_WIDTHS = (1, 2, 2, 2)  # width of each level, as a multiple of the UNet's width
_ATTENDED = 1  # index of the level with attention, 16x16 pixels for images of 32x32
_VAE_WIDTHS = (1, 2, 4, 4)
_LATENT = 4  # number of channels of a latent
_BLOCKS = 2  # residual blocks per level


class UNet(nn.Module):
    """Predicts the noise in x, (N, 3, H, W), at time steps t, (N,), below 1,000. H and W: multiples of 8."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.width = width
        time_width = 4 * width
        self.time = nn.Sequential(nn.Linear(width, time_width), nn.SiLU(), nn.Linear(time_width, time_width))
        self.first = nn.Conv2d(3, width, 3, padding=1)
        skipped = [width]
        self.down = nn.ModuleList()
        for level, factor in enumerate(_UNET_WIDTHS):
            for _ in range(_BLOCKS):
                self.down.append(_Level(skipped[-1], factor * width, time_width, attends=level == _ATTENDED))
                skipped.append(factor * width)
            if level + 1 < len(_UNET_WIDTHS):
                self.down.append(_Halve(factor * width))
                skipped.append(factor * width)
        channels = skipped[-1]
        self.middle = _Middle(channels, time_width)
        self.up = nn.ModuleList()
        for level, factor in reversed([*enumerate(_UNET_WIDTHS)]):
            for _ in range(_BLOCKS + 1):
                block = _Level(channels + skipped.pop(), factor * width, time_width, attends=level == _ATTENDED)
                self.up.append(block)
                channels = factor * width
            if level > 0:
                self.up.append(_Double(channels))
        self.last = _last(channels, 3)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        time = self.time(_waves(t, self.width).to(x.dtype))
        x = self.first(x)
        skipped = [x]
        for block in self.down:
            x = block(x, time)
            skipped.append(x)
        x = self.middle(x, time)
        for block in self.up:
            x = block(x if isinstance(block, _Double) else torch.cat((x, skipped.pop()), dim=1), time)
        noise: Tensor = self.last(x)
        return noise


class VAE(nn.Module):
    """Encodes images x, (N, 3, H, W), samples a latent (in evaluation mode, takes its mean), and decodes it.

    Returns the decoded images, (N, 3, H, W), and mean and log-variance of the latents, (N, 4, H / 8, W / 8). H and W:
    multiples of 8.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        widths = [factor * width for factor in _VAE_WIDTHS]
        self.encoder = _encoder(widths)
        self.to_moments = nn.Conv2d(2 * _LATENT, 2 * _LATENT, 1)
        self.from_latent = nn.Conv2d(_LATENT, _LATENT, 1)
        self.decoder = _decoder(widths)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.to_moments(self.encoder(x)).chunk(2, dim=1)
        latent = mean
        if self.training:
            latent = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        return self.decoder(self.from_latent(latent)), mean, log_variance


def unet(num_classes: int) -> nn.Module:
    """Return the UNet at three quarters of the published width; ``num_classes`` is ignored."""
    return UNet()


def vae(num_classes: int) -> nn.Module:
    """Return the autoencoder at half the published width; ``num_classes`` is ignored."""
    return VAE()


def _encoder(widths: list[int]) -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(3, widths[0], 3, padding=1))
    channels = widths[0]
    for level, width in enumerate(widths):
        for _ in range(_BLOCKS):
            layers.append(_Level(channels, width))
            channels = width
        if level + 1 < len(widths):
            layers.append(_Halve(channels))
    return layers.extend((_Middle(channels), _last(channels, 2 * _LATENT)))


def _decoder(widths: list[int]) -> nn.Module:
    channels = widths[-1]
    layers = nn.Sequential(nn.Conv2d(_LATENT, channels, 3, padding=1), _Middle(channels))
    for level, width in reversed([*enumerate(widths)]):
        for _ in range(_BLOCKS + 1):
            layers.append(_Level(channels, width))
            channels = width
        if level > 0:
            layers.append(_Double(channels))
    return layers.append(_last(channels, 3))


class _Level(nn.Module):
    """A residual block, which adds the embedded time step if there is one, followed by attention if ``attends``."""

    def __init__(self, in_channels: int, channels: int, time_width: int | None = None, attends: bool = False) -> None:
        super().__init__()
        dropout = 0.0 if time_width is None else 0.1
        self.before = nn.Sequential(_norm(in_channels), nn.SiLU(), nn.Conv2d(in_channels, channels, 3, padding=1))
        self.time = None if time_width is None else nn.Sequential(nn.SiLU(), nn.Linear(time_width, channels))
        self.after = nn.Sequential(
            *(_norm(channels), nn.SiLU(), nn.Dropout(dropout), nn.Conv2d(channels, channels, 3, padding=1))
        )
        self.shortcut = nn.Identity() if in_channels == channels else nn.Conv2d(in_channels, channels, 1)
        self.attention = _Attention(channels) if attends else nn.Identity()

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        y = self.before(x)
        if self.time is not None:
            y = y + self.time(time)[:, :, None, None]
        attended: Tensor = self.attention(self.shortcut(x) + self.after(y))
        return attended


class _Attention(nn.Module):
    """Attention of every pixel to every other; queries, keys and values are pointwise convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _norm(channels)
        self.query, self.key, self.value, self.project = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        query, key, value = (
            part(normed).flatten(2).transpose(1, 2)[:, None] for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value)[:, 0]
        y: Tensor = x + self.project(mixed.transpose(1, 2).reshape(x.shape))
        return y


class _Middle(nn.Module):
    def __init__(self, channels: int, time_width: int | None = None) -> None:
        super().__init__()
        self.first = _Level(channels, channels, time_width, attends=True)
        self.second = _Level(channels, channels, time_width)

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        y: Tensor = self.second(self.first(x, time), time)
        return y


class _Halve(nn.Module):
    """Halves height and width by a strided convolution, after padding a row and a column of zeros at the end."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        y: Tensor = self.conv(F.pad(x, (0, 1, 0, 1)))
        return y


class _Double(nn.Module):
    """Doubles height and width by repeating pixels, then applies a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        y: Tensor = self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return y


def _last(channels: int, out_channels: int) -> nn.Sequential:
    return named(norm=_norm(channels), act=nn.SiLU(), conv=nn.Conv2d(channels, out_channels, 3, padding=1))


def _norm(channels: int) -> nn.Module:
    return nn.GroupNorm(32, channels, eps=1e-6)


def _waves(t: Tensor, width: int) -> Tensor:
    """Embed time steps t, (N,), as sines and cosines of wavelengths from 2 pi to 20,000 pi: (N, width)."""
    exponents = torch.arange(width // 2, device=t.device) / (width // 2 - 1)
    angles = t[:, None] * torch.exp(-log(10_000) * exponents)
    return torch.cat((angles.sin(), angles.cos()), dim=1)
