"""Operators of torch that make images of other images, run on some frames of clips at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from mucudnn.graph.operators import Band, Operator


def frame_by_frame(function: fx.GraphModule, *images: Tensor) -> Tensor:
    """Return what a function makes of images, (N, C, H, W), or of each frame of clips, (N, C, D, H, W)."""
    if images[0].dim() == 4:
        return function(*images)  # type: ignore[no-any-return]
    made: Tensor = function(*(one.transpose(1, 2).flatten(0, 1) for one in images))
    return torch.unflatten(made, 0, (len(images[0]), -1)).transpose(1, 2)


@dataclass(kw_only=True)
class FrameByFrame(Operator):
    """``frame_by_frame`` of clips."""

    function: fx.GraphModule
    settings = ("function",)

    def compute(self, band: Band) -> None:
        band.out.copy_(frame_by_frame(self.function, *band.xs))
