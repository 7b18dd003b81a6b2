"""Torch's own convolution as one call: the baseline, and what runs where nothing is tuned."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mucudnn.words.problem import Operation


def torch_convolution(
    operation: Operation,
    x: Tensor,
    w: Tensor,
    y: Tensor | None,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Torch's own convolution, undivided: the baseline. Returns the tensor that the operation writes, newly allocated.

    x: (N, C, H, W), w: (K, C // groups, R, S), y: (N, K, P, Q) is dy of the backward operations. Of the tensor that
    is written only shape and memory format matter. bias: (K,), only in FORWARD.
    """
    if operation is Operation.FORWARD:  # conv2d says what is wrong with bad operands, as it says it to users
        return torch.conv2d(x, w, bias, stride, padding, dilation, groups)
    of_data = operation is Operation.BACKWARD_DATA
    gradients = torch.ops.aten.convolution_backward.default(
        y, x, w, None, stride, padding, dilation, False, (0, 0), groups, (of_data, not of_data, False)
    )
    gradient: Tensor = gradients[0] if of_data else gradients[1]
    return gradient
