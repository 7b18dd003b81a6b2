"""Torch's own convolution: the baseline and fallback, and in float64 the reference of all results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mucudnn.core.problem import ConvProblem, Operation

Geometry = Sequence[Any]  # stride, padding, dilation, groups

# What torch and torch.nn.functional have as conv2d and its relatives, unless users have replaced it there.
if TYPE_CHECKING:
    functions = torch
else:
    functions = torch._C._VariableFunctions


def torch_convolution(operation: Operation, x: Tensor, w: Tensor, third: Tensor | None, geometry: Geometry) -> Tensor:
    """Compute torch's own convolution of a whole batch, and return the operation's newly allocated output.

    x: (N, C, H, W), w: (K, C // groups, R, S), third: the bias, (K,) or None, in FORWARD; else dy, (N, K, P, Q); of
    volumes all with a depth. In the backward operations, only the shape and the memory format of x (for dx) or w (for
    dw) are used.
    """
    stride, padding, dilation, groups = geometry
    if operation is Operation.FORWARD:  # Public functions are called for their error messages.
        convolve = functions.conv2d if x.dim() < 5 else functions.conv3d
        return convolve(x, w, third, stride, padding, dilation, groups)
    is_of_data = operation is Operation.BACKWARD_DATA
    settings = stride, padding, dilation, False, (0,) * len(stride), groups, (is_of_data, not is_of_data, False)
    gradients = torch.ops.aten.convolution_backward.default(third, x, w, None, *settings)
    gradient: Tensor = gradients[0] if is_of_data else gradients[1]
    return gradient


def reference(problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute an operation's result in float64, contiguous, by torch's convolution, which has no fast path for float64.

    x: (N, C, H, W), w: (K, C // groups, R, S), y: (N, K, P, Q), of volumes with a depth, bias: (K,), in any dtype. Only
    the shape of the operation's output tensor is used.
    """
    geometry = (problem.stride, problem.padding, problem.dilation, problem.groups)
    x, w, y = (tensor.double().contiguous() for tensor in (x, w, y))
    third = y if problem.operation is not Operation.FORWARD else None if bias is None else bias.double()
    return torch_convolution(problem.operation, x, w, third, geometry)


def relative_l2_error(actual: Tensor, expected: Tensor) -> float:
    """Return ``|actual - expected| / |expected|`` in the L2 norm and float64; infinite if ``actual`` is not finite.

    >>> relative_l2_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
    0.1
    """
    difference = torch.linalg.vector_norm(actual.double() - expected.double())
    norm = torch.linalg.vector_norm(expected.double())
    if not torch.isfinite(difference):
        return float("inf")
    if difference == 0:
        return 0.0
    return float(difference / norm)
