"""Networks for large images: factories to name as SOURCE, as ``mucudnn.bench.sources.networks.large_images:dncnn``.

``unet_groupnorm`` has a name of its own, ``unet-groupnorm``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mucudnn.bench.sources.networks.blocks import named

_UNET_WIDTHS = (64, 128, 256, 512)


class DnCNN(nn.Module):
    """Removes noise from grey images, (N, 1, H, W): 17 layers of 64 channels (Zhang et al., 2017)."""

    def __init__(self, layers: int = 17, width: int = 64) -> None:
        super().__init__()
        self.noise = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(inplace=True))
        for _ in range(layers - 2):
            self.noise.append(nn.Conv2d(width, width, 3, padding=1, bias=False))
            self.noise.extend((nn.BatchNorm2d(width), nn.ReLU(inplace=True)))
        self.noise.append(nn.Conv2d(width, 1, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sub(x, self.noise(x))


class EDSR(nn.Module):
    """Doubles height and width of images, (N, 3, H, W): the baseline of Lim et al., 2017, 16 blocks of 64 channels."""

    def __init__(self, blocks: int = 16, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(width, width, 3, padding=1)
            )
            for _ in range(blocks)
        )
        self.after = nn.Conv2d(width, width, 3, padding=1)
        self.last = nn.Sequential(
            nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(width, 3, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        first = y = self.first(x)
        for block in self.blocks:
            y = y + block(y)
        doubled: Tensor = self.last(first + self.after(y))
        return doubled


class SegmentingUNet(nn.Module):
    """Scores classes of each pixel of images, (N, 3, H, W): Ronneberger et al., 2015, with norms and padding.

    H and W: multiples of 8.
    widths: channels of the levels, from the largest images to the smallest.
    norm: makes a norm of that many channels.
    """

    def __init__(
        self,
        classes: int = 2,
        widths: Sequence[int] = _UNET_WIDTHS,
        norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        self.down = nn.ModuleList(_convolved_twice(*pair, norm) for pair in pairwise((3, *widths)))
        self.pool = nn.MaxPool2d(2)
        pairs = [*pairwise(reversed(widths))]
        self.enlarge = nn.ModuleList(nn.ConvTranspose2d(*pair, 2, stride=2) for pair in pairs)
        self.up = nn.ModuleList(_convolved_twice(*pair, norm) for pair in pairs)
        self.last = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else self.pool(x))
            skipped.append(x)
        skipped.pop()
        for enlarge, block in zip(self.enlarge, self.up, strict=True):
            x = block(torch.cat((skipped.pop(), enlarge(x)), dim=1))
        scores: Tensor = self.last(x)
        return scores


def unet_groupnorm(num_classes: int) -> nn.Module:
    """Build a U-Net of widths 32 to 256 with group norm of 8 groups, 1,927,042 parameters for 2 classes."""
    return SegmentingUNet(num_classes, (32, 64, 128, 256), partial(nn.GroupNorm, 8))


def _convolved_twice(channels: int, width: int, norm: Callable[[int], nn.Module]) -> nn.Sequential:
    """Return two convolutions, each with a norm and ReLU."""
    layers = nn.Sequential()
    for in_channels in (channels, width):
        layers.append(nn.Conv2d(in_channels, width, 3, padding=1, bias=False))
        layers.extend((norm(width), nn.ReLU(inplace=True)))
    return layers


_WIDTHS = (128, 256, 512, 512)  # of the levels, from the largest images to the smallest
_LATENT = 4  # number of channels of a latent
_BLOCKS = 3  # residual blocks per level


class VAEDecoder(nn.Module):
    """Decodes latents, (N, 4, H, W), to images 8 times as high and wide: that of Stable Diffusion."""

    def __init__(self) -> None:
        super().__init__()
        channels = _WIDTHS[-1]
        self.from_latent = nn.Conv2d(_LATENT, _LATENT, 1)
        self.decoder = nn.Sequential(
            nn.Conv2d(_LATENT, channels, 3, padding=1),
            nn.Sequential(_Level(channels, channels, attends=True), _Level(channels, channels)),
        )
        for level, width in reversed([*enumerate(_WIDTHS)]):
            for _ in range(_BLOCKS):
                self.decoder.append(_Level(channels, width))
                channels = width
            if level > 0:
                self.decoder.append(
                    nn.Sequential(
                        nn.Upsample(scale_factor=2.0, mode="nearest"), nn.Conv2d(channels, channels, 3, padding=1)
                    )
                )
        self.decoder.append(named(norm=_norm(channels), act=nn.SiLU(), conv=nn.Conv2d(channels, 3, 3, padding=1)))

    def forward(self, latent: Tensor) -> Tensor:
        image: Tensor = self.decoder(self.from_latent(latent))
        return image


class _Level(nn.Module):
    """A residual block, followed by attention if ``attends``."""

    def __init__(self, in_channels: int, channels: int, *, attends: bool = False) -> None:
        super().__init__()
        self.before = nn.Sequential(_norm(in_channels), nn.SiLU(), nn.Conv2d(in_channels, channels, 3, padding=1))
        self.after = nn.Sequential(_norm(channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, padding=1))
        self.shortcut = nn.Identity() if in_channels == channels else nn.Conv2d(in_channels, channels, 1)
        self.attention = _Attention(channels) if attends else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = self.attention(self.shortcut(x) + self.after(self.before(x)))
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
        return torch.add(x, self.project(mixed.transpose(1, 2).reshape(x.shape)))


def _norm(channels: int) -> nn.Module:
    return nn.GroupNorm(32, channels, eps=1e-6)


dncnn, edsr, segmenting_unet, vae_decoder = DnCNN, EDSR, SegmentingUNet, VAEDecoder
