"""Torch's own convolution in one call, which is the baseline, and the fallback for problems that are not tuned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mucudnn.core.problem import Operation

Geometry = Sequence[Any]  # stride, padding, dilation, groups


def torch_convolution(operation: Operation, x: Tensor, w: Tensor, third: Tensor | None, geometry: Geometry) -> Tensor:
    """Compute torch's own convolution of a whole batch, and return the operation's newly allocated output.

    x: (N, C, H, W), w: (K, C // groups, R, S), third: the bias, (K,) or None, in FORWARD; else dy, (N, K, P, Q).
    In the backward operations, only the shape and the memory format of x (for dx) or w (for
    dw) are used.
    """
    stride, padding, dilation, groups = geometry
    if operation is Operation.FORWARD:  # Public functions are called for their error messages.
        return torch.conv2d(x, w, third, stride, padding, dilation, groups)
    of_data = operation is Operation.BACKWARD_DATA
    rest = stride, padding, dilation, False, (0, 0), groups, (of_data, not of_data, False)
    gradients = torch.ops.aten.convolution_backward.default(third, x, w, None, *rest)
    gradient: Tensor = gradients[0] if of_data else gradients[1]
    return gradient
