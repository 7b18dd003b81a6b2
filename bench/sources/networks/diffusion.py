"""The decoder of the autoencoder of latent diffusion (Rombach et al., 2022)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from mucudnn.bench.sources.networks.blocks import named

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
                self.decoder.append(_Double(channels))
        self.decoder.append(named(norm=_norm(channels), act=nn.SiLU(), conv=nn.Conv2d(channels, 3, 3, padding=1)))

    def forward(self, latent: Tensor) -> Tensor:
        image: Tensor = self.decoder(self.from_latent(latent))
        return image


class _Level(nn.Module):
    """A residual block, followed by attention if ``attends``."""

    def __init__(self, in_channels: int, channels: int, attends: bool = False) -> None:
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
        y: Tensor = x + self.project(mixed.transpose(1, 2).reshape(x.shape))
        return y


class _Double(nn.Module):
    """Doubles height and width by repeating pixels, then applies a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        y: Tensor = self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return y


def _norm(channels: int) -> nn.Module:
    return nn.GroupNorm(32, channels, eps=1e-6)
