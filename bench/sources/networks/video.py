"""Parts of video and vision-language models: factories to name as SOURCE, as those of ``large_images``."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mucudnn.bench.sources.networks.blocks import Added

_LATENT = 16  # channels of a latent
_BLOCKS = 3  # residual blocks of a level


class QwenImageDecoder(nn.Module):
    """Decodes a latent of one frame, (N, 16, 1, H, W), to an image, (N, 3, 1, 8 H, 8 W): that of Qwen-Image and Wan.

    A clip of one frame goes through 3-D convolutions that are causal: two frames of zeros are before it. The layers
    that double the number of frames do not run for the first one, and are left out.

    width: channels of the last level.
    """

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        channels = 4 * width
        self.layers = nn.Sequential(
            _Causal(_LATENT, _LATENT, 1),
            _Causal(_LATENT, channels, 3),
            _block(channels, channels),
            _Attention(channels),
            _block(channels, channels),
        )
        for level, out_channels in enumerate((4 * width, 4 * width, 2 * width, width)):
            for _ in range(_BLOCKS):
                self.layers.append(_block(channels, out_channels))
                channels = out_channels
            if level < 3:
                self.layers.append(_Doubled(channels))
                channels //= 2
        self.layers.extend((_Norm(channels, 3), nn.SiLU(), _Causal(channels, 3, 3)))

    def forward(self, latent: Tensor) -> Tensor:
        image: Tensor = self.layers(latent)
        return image.clamp(-1, 1)


class _Causal(nn.Conv3d):
    """Pads with zeros: frames before the clip alone, and all sides of a frame."""

    def __init__(self, in_channels: int, channels: int, size: int) -> None:
        super().__init__(in_channels, channels, size)
        edge = size // 2
        self.sides = (edge, edge, edge, edge, size - 1, 0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, self.sides))


class _Norm(nn.Module):
    """Divides by the root mean square of the channels.

    dims: number of spatial ones.
    """

    def __init__(self, channels: int, dims: int) -> None:
        super().__init__()
        self.scale, self.gamma = channels**0.5, nn.Parameter(torch.ones(channels, *[1] * dims))

    def forward(self, x: Tensor) -> Tensor:
        narrow = x.dtype in (torch.float16, torch.bfloat16)
        normed = F.normalize(x.float() if narrow else x, dim=1).to(x.dtype)
        return torch.mul(normed * self.scale, self.gamma)


def _block(in_channels: int, channels: int) -> nn.Module:
    """Return a residual block."""
    return Added(
        body=nn.Sequential(
            _Norm(in_channels, 3),
            nn.SiLU(),
            _Causal(in_channels, channels, 3),
            _Norm(channels, 3),
            nn.SiLU(),
            _Causal(channels, channels, 3),
        ),
        shortcut=None if in_channels == channels else _Causal(in_channels, channels, 1),
    )


class _Attention(nn.Module):
    """Attention of every pixel to every other of its frame, with one head."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _Norm(channels, 2)
        self.parts, self.project = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, channels, frames, height, width = x.shape
        images = x.transpose(1, 2).reshape(n * frames, channels, height, width)
        query, key, value = self.parts(self.norm(images)).flatten(2).transpose(1, 2)[:, None].chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(query, key, value)[:, 0]
        y: Tensor = self.project(mixed.transpose(1, 2).reshape(images.shape))
        return x + y.view(n, frames, channels, height, width).transpose(1, 2)


class _Doubled(nn.Module):
    """Doubles height and width of each frame, and halves the channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels // 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        n, channels, frames, height, width = x.shape
        images = x.transpose(1, 2).reshape(n * frames, channels, height, width)
        y: Tensor = self.convolution(F.interpolate(images, scale_factor=2.0, mode="nearest-exact"))
        return y.view(n, frames, channels // 2, 2 * height, 2 * width).transpose(1, 2)


def qwen_patches() -> nn.Module:
    """Embed patches of two frames, (N, 3, 2, 14, 14), as 1,280 numbers each: the first layer of Qwen2-VL."""
    return nn.Conv3d(3, 1280, (2, 14, 14), stride=(2, 14, 14), bias=False)


qwen_image_decoder = QwenImageDecoder
