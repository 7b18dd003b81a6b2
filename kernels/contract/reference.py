"""The reference: the convolution in float64, and how far a result is from it."""

from __future__ import annotations

import torch
from torch import Tensor

from mucudnn.words.problem import ConvProblem, Operation


def reference(problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute the operation in float64, contiguous, by torch's own convolution, which has no fast path for float64.

    x: (N, C, H, W), w: (K, C // groups, R, S), y: (N, K, P, Q), bias: (K,), in any dtype. The tensor that the operation
    writes gives only its shape; its values are not read.
    """
    geometry = (problem.stride, problem.padding, problem.dilation)
    x, w, y = (tensor.double().contiguous() for tensor in (x, w, y))
    if problem.operation is Operation.FORWARD:
        return torch.nn.functional.conv2d(x, w, None if bias is None else bias.double(), *geometry, problem.groups)
    data = problem.operation is Operation.BACKWARD_DATA
    dx, dw, _ = torch.ops.aten.convolution_backward(
        y, x, w, None, *geometry, False, (0, 0), problem.groups, (data, not data, False)
    )
    result: Tensor = dx if data else dw
    return result


def relative_l2_error(actual: Tensor, expected: Tensor) -> float:
    """Compute ``|actual - expected| / |expected|``, Euclidean, in float64; infinite where ``actual`` is not finite.

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
