"""Networks of sequences, (N, C, L), in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_FEATURES, _CHANNELS, _HIDDEN = 512, 128, 512  # N, B = Sc, and H in the paper
_WINDOW, _STRIDE = 16, 8  # of the encoder and the decoder
_BLOCKS, _DILATIONS = 24, 8  # three stacks


class _Block(nn.Module):
    """Returns x with what a depthwise convolution in more channels adds, and what it gives to the mask.

    dilation: of the depthwise convolution.
    is_last: whether nothing reads x afterwards, so that nothing is added.
    """

    def __init__(self, dilation: int, *, is_last: bool) -> None:
        super().__init__()
        depthwise = nn.Conv1d(_HIDDEN, _HIDDEN, 3, padding=dilation, dilation=dilation, groups=_HIDDEN)
        self.body = nn.Sequential(
            nn.Conv1d(_CHANNELS, _HIDDEN, 1),
            nn.PReLU(),
            nn.GroupNorm(1, _HIDDEN, eps=1e-8),
            depthwise,
            nn.PReLU(),
            nn.GroupNorm(1, _HIDDEN, eps=1e-8),
        )
        self.residual = None if is_last else nn.Conv1d(_HIDDEN, _CHANNELS, 1)
        self.skip = nn.Conv1d(_HIDDEN, _CHANNELS, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return x if self.residual is None else x + self.residual(hidden), self.skip(hidden)


class ConvTasNet(nn.Module):
    """Separates the speakers of recordings, (N, 1, L), into (N, speakers, L): Luo and Mesgarani, 2019, non-causal.

    Up to 7 of the last values of a recording are left out, since L is rounded down to a multiple of 8.
    """

    def __init__(self, speakers: int = 2) -> None:
        super().__init__()
        self.encoder = nn.Conv1d(1, _FEATURES, _WINDOW, stride=_STRIDE, bias=False)
        self.narrow = nn.Sequential(nn.GroupNorm(1, _FEATURES, eps=1e-8), nn.Conv1d(_FEATURES, _CHANNELS, 1))
        self.blocks = nn.ModuleList(
            _Block(2 ** (index % _DILATIONS), is_last=index == _BLOCKS - 1) for index in range(_BLOCKS)
        )
        self.masks = nn.Sequential(nn.PReLU(), nn.Conv1d(_CHANNELS, speakers * _FEATURES, 1), nn.Sigmoid())
        self.decoder = nn.ConvTranspose1d(_FEATURES, 1, _WINDOW, stride=_STRIDE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        features = self.encoder(x)
        y = self.narrow(features)
        skipped = torch.zeros_like(y)
        for block in self.blocks:
            y, skip = block(y)
            skipped = skipped + skip
        masks = self.masks(skipped).unflatten(1, (-1, _FEATURES))  # (N, speakers, features, length)
        masked = masks * features.unsqueeze(1)
        voices: Tensor = self.decoder(masked.flatten(0, 1))
        return voices.view(len(x), -1, voices.shape[-1])


def conv_tasnet(num_classes: int) -> nn.Module:
    """Build the Conv-TasNet of ``torchaudio`` for so many speakers: 4,984,881 parameters for 2.

    The paper's 5.1 million count the residual path of the last block, too, which nothing reads.
    """
    return ConvTasNet(num_classes)
