"""SegFormer-B0 (Xie et al., 2021): an encoder of overlapping patches (MiT-B0) and a head of linear layers.

It has 3,752,694 parameters for the 150 classes of ADE20K (3.8 million in the paper).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mucudnn.bench.sources.networks.blocks import StochasticDepth, activated

_STAGES = ((32, 1, 8), (64, 2, 4), (160, 5, 2), (256, 8, 1))  # (channels, heads, reduction) of each stage
_BLOCKS = 2  # number of blocks per stage
_DECODED = 256  # number of channels in the head
_DROPPED = 0.1  # drop probability of the last block; it grows linearly with depth
_EPSILON = 1e-6


class SegFormer(nn.Module):
    """Computes class scores of images x, (N, 3, H, W), at every fourth pixel: (N, num_classes, H / 4, W / 4)."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        in_channels = (3, *(channels for channels, _, _ in _STAGES[:-1]))
        self.stages = nn.ModuleList(map(_Stage, range(len(_STAGES)), in_channels))
        self.head = _Head(num_classes)

    def forward(self, x: Tensor) -> Tensor:
        features = []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        scores: Tensor = self.head(features)
        return scores


class _Stage(nn.Module):
    """A stage of the encoder, which embeds overlapping patches as tokens and runs transformer blocks on them."""

    def __init__(self, index: int, in_channels: int) -> None:
        super().__init__()
        channels, heads, reduction = _STAGES[index]
        size, stride = (7, 4) if index == 0 else (3, 2)
        self.embed = nn.Conv2d(in_channels, channels, size, stride, size // 2)
        self.embed_norm = nn.LayerNorm(channels, eps=_EPSILON)
        last = len(_STAGES) * _BLOCKS - 1
        dropped = (_DROPPED * (index * _BLOCKS + block) / last for block in range(_BLOCKS))
        self.blocks = nn.ModuleList(_Block(channels, heads, reduction, each) for each in dropped)
        self.norm = nn.LayerNorm(channels, eps=_EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        size = (x.shape[2], x.shape[3])
        tokens = self.embed_norm(_tokens(x))
        for block in self.blocks:
            tokens = block(tokens, size)
        return _image(self.norm(tokens), size)


class _Block(nn.Module):
    """A transformer block: attention, then a feed-forward part of linear, depthwise convolution and linear layers.

    The outputs of attention and of the feed-forward part are added to their inputs.
    """

    def __init__(self, channels: int, heads: int, reduction: int, dropped: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(channels, eps=_EPSILON)
        self.attention = _Attention(channels, heads, reduction)
        self.norm2 = nn.LayerNorm(channels, eps=_EPSILON)
        self.mixed = _MixedFeedForward(channels)
        self.drop = StochasticDepth(dropped)

    def forward(self, tokens: Tensor, size: tuple[int, int]) -> Tensor:
        tokens = tokens + self.drop(self.attention(self.norm1(tokens), size))
        added: Tensor = tokens + self.drop(self.mixed(self.norm2(tokens), size))
        return added


class _Attention(nn.Module):
    """Attention between tokens; keys and values come from the tokens' image, downsampled by a convolution."""

    def __init__(self, channels: int, heads: int, reduction: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(channels, channels)
        self.key_value = nn.Linear(channels, 2 * channels)
        self.project = nn.Linear(channels, channels)
        self.reduce = nn.Conv2d(channels, channels, reduction, stride=reduction) if reduction > 1 else None
        self.norm = nn.LayerNorm(channels, eps=_EPSILON) if reduction > 1 else None

    def forward(self, tokens: Tensor, size: tuple[int, int]) -> Tensor:
        fewer = tokens
        if self.reduce is not None and self.norm is not None:
            fewer = self.norm(_tokens(self.reduce(_image(tokens, size))))
        key, value = self.key_value(fewer).chunk(2, dim=-1)
        query, key, value = (self._of_heads(part) for part in (self.query(tokens), key, value))
        mixed: Tensor = self.project(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return mixed

    def _of_heads(self, tokens: Tensor) -> Tensor:
        """Split tokens, (N, L, C), among the attention heads: (N, heads, L, C / heads)."""
        return tokens.view(*tokens.shape[:2], self.heads, -1).transpose(1, 2)


class _MixedFeedForward(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 4 * channels
        self.expand = nn.Linear(channels, wide)
        self.depthwise = nn.Conv2d(wide, wide, 3, padding=1, groups=wide)
        self.reduce = nn.Linear(wide, channels)

    def forward(self, tokens: Tensor, size: tuple[int, int]) -> Tensor:
        mixed = self.depthwise(_image(self.expand(tokens), size))
        reduced: Tensor = self.reduce(F.gelu(_tokens(mixed)))
        return reduced


class _Head(nn.Module):
    """The head, which resizes the features of all stages to one size and computes the class scores of each pixel."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.ModuleList(nn.Linear(channels, _DECODED) for channels, _, _ in _STAGES)
        self.fuse = activated(len(_STAGES) * _DECODED, _DECODED, 1)
        self.dropout = nn.Dropout(0.1)
        self.scores = nn.Conv2d(_DECODED, num_classes, 1)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        size = (features[0].shape[2], features[0].shape[3])
        images = [
            _image(linear(_tokens(x)), (x.shape[2], x.shape[3]))
            for linear, x in zip(self.linear, features, strict=True)
        ]
        resized = [F.interpolate(image, size, mode="bilinear", align_corners=False) for image in images]
        scores: Tensor = self.scores(self.dropout(self.fuse(torch.cat(resized[::-1], dim=1))))
        return scores


def _tokens(x: Tensor) -> Tensor:
    """Reshape an image, (N, C, H, W), to tokens, one for each pixel: (N, H W, C)."""
    return x.flatten(2).transpose(1, 2)


def _image(tokens: Tensor, size: tuple[int, int]) -> Tensor:
    """Reshape tokens, (N, H W, C), to an image, (N, C, H, W), with a pixel for each token. size: (H, W)."""
    return tokens.transpose(1, 2).reshape(*tokens.shape[::2], *size)
