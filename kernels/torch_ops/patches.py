"""Convolution whose filter never overlaps itself, as one matrix product of patches: stride = filter, no padding.

So images and clips are embedded in transformers (Dosovitskiy et al., *An image is worth 16x16 words*, 2021). With M
patches of J = (C // groups) * T * R * S elements, the patches are a matrix X (M, J), the filter is W (K, J) and the
output is Y (M, K), for each group, and the three operations are the products of ``gemm``. Every element of x is in at
most one patch, so that im2col is one copy; where x is one patch, or the filter one element, x is the matrix as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, product
from math import prod

import torch
from torch import Tensor

from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.kernels.algorithm import Workspace
from mucudnn.kernels.memory import Part, carve, carved_bytes, torch_dtype
from mucudnn.kernels.torch_ops.gemm import Gemm, multiply, sums_of_filter, w_matrix


@dataclass(frozen=True, slots=True)
class Patches(Gemm):
    """Convolution of images or volumes with patches that do not overlap: one copy, and one matrix product a group."""

    name: str = "patches"

    takes_volumes = True

    def supports(self, problem: ConvProblem) -> str | None:
        if problem.window != problem.stride or any(problem.padding) or any(step > 1 for step in problem.dilation):
            return "patches overlap, leave gaps or are padded: stride and filter must be equal, padding 0, dilation 1"
        if prod(problem.window) == 1 and not problem.is_volume:
            return "the filter is one pixel; pointwise and gemm compute it in place"
        return None

    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        sums = sums_of_filter(problem)
        return Workspace(carved_bytes(sums), carved_bytes([*_copies(problem, micro_batch_size), *sums]))

    def step(
        self,
        problem: ConvProblem,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        bias: Tensor | None,
        prepared: Tensor,
        scratch: Tensor,
    ) -> None:
        copies, sums, operation = _copies(problem, x.shape[0]), sums_of_filter(problem), problem.operation
        views = carve(scratch, [*copies, *sums])
        copied = views[0] if copies else None
        if copied is not None and operation is not Operation.BACKWARD_DATA:
            _as_patches(problem, copied).copy_(_patches(problem, x))
        x_matrix = _matrix(problem, x) if copied is None else copied
        y_matrix = _outputs(problem, y)
        filters = w_matrix(problem, w)
        if operation is Operation.BACKWARD_FILTER:
            self._add_gradient(problem, x_matrix, filters, y_matrix, prepared, views[-1] if sums else None)
            return
        for group in range(problem.groups):
            shared = filters[group].expand(len(x_matrix), -1, -1)
            multiply(operation, x_matrix[:, group], shared, y_matrix[:, group])
        if bias is not None:
            y.add_(bias.view(-1, *(1 for _ in problem.positions)))
        if copied is not None and operation is Operation.BACKWARD_DATA:
            if any(size % taps for size, taps in zip(problem.extent, problem.window, strict=True)):
                x.zero_()
            _patches(problem, x).copy_(_as_patches(problem, copied))

    def _add_gradient(
        self, problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor, prepared: Tensor, part: Tensor | None
    ) -> None:
        """Add the gradient of the filter to ``w``, or in half precision to a sum in float32, matrix by matrix."""
        sums = carve(prepared, sums_of_filter(problem))
        for index, group in product(range(len(x)), range(problem.groups)):
            matrix = slice(index, index + 1), group
            if sums and part is not None:
                gradient = part.view(-1).view(torch_dtype(problem))[: w[group].numel()].view(1, *w[group].shape)
                multiply(problem.operation, x[matrix], gradient, y[matrix])
                sums[0][group].add_(gradient[0])
            else:
                multiply(problem.operation, x[matrix], w[group : group + 1], y[matrix], accumulate=True)


PATCHES = Patches()
PATCHES_ON_CUDA = Patches(device_type="cuda")


def _is_last(problem: ConvProblem) -> bool:
    return problem.memory_format is MemoryFormat.CHANNELS_LAST


def _is_in_place(problem: ConvProblem) -> bool:
    """Return whether x is the matrix of patches as it is in memory."""
    if prod(problem.window) == 1:
        return True
    is_single = problem.extent == problem.window
    return is_single and (problem.groups == 1 or not _is_last(problem))


def _copies(problem: ConvProblem, n: int) -> list[Part]:
    """Return the part for the matrix of patches, (matrices, groups, M, J); empty if x is that matrix."""
    if _is_in_place(problem):
        return []
    matrices, m = (1, n * prod(problem.positions)) if _is_last(problem) else (n, prod(problem.positions))
    j = problem.c // problem.groups * prod(problem.window)
    return [Part((matrices, problem.groups, m, j), torch_dtype(problem))]


def _outputs(problem: ConvProblem, y: Tensor) -> Tensor:
    """Return y as a view (matrices, groups, M, K): of all samples, or one for each sample where y is contiguous."""
    if _is_last(problem):
        return y.movedim(1, -1).reshape(1, -1, problem.groups, problem.k // problem.groups).transpose(1, 2)
    return _merged(problem, y.view(y.shape[0], problem.groups, problem.k // problem.groups, -1)).mT


def _matrix(problem: ConvProblem, x: Tensor) -> Tensor:
    """Return x as a view (matrices, groups, M, J), where it ``_is_in_place``."""
    channels = problem.c // problem.groups
    if _is_last(problem):
        stored = x.movedim(1, -1)
        return stored.reshape(1, -1, problem.groups, channels * prod(problem.window)).transpose(1, 2)
    if prod(problem.window) == 1:
        return _merged(problem, x.view(x.shape[0], problem.groups, channels, -1)).mT
    return x.view(1, x.shape[0], problem.groups, -1).transpose(1, 2)


def _merged(problem: ConvProblem, samples: Tensor) -> Tensor:
    """Return contiguous samples (N, groups, channels, M); those of one patch as one matrix (1, groups, channels, N)."""
    is_single = prod(problem.positions) == 1 and _is_in_place(problem)
    return samples[..., 0].permute(1, 2, 0).unsqueeze(0) if is_single else samples


def _patches(problem: ConvProblem, x: Tensor) -> Tensor:
    """Return the part of x that is read as a view (N, groups, C // groups, O, T, P, R, Q, S); images have no O, T."""
    for axis, (count, taps) in enumerate(zip(problem.positions, problem.window, strict=True)):
        x = torch.unflatten(x.narrow(2 + 2 * axis, 0, count * taps), 2 + 2 * axis, (count, taps))
    return torch.unflatten(x, 1, (problem.groups, -1))


def _as_patches(problem: ConvProblem, matrix: Tensor) -> Tensor:
    """Return the matrix of patches as a view with the dimensions of ``_patches``."""
    channels, dims = problem.c // problem.groups, len(problem.positions)
    if _is_last(problem):  # (groups, N, O, P, Q, T, R, S, channels)
        view = matrix.view(problem.groups, -1, *problem.positions, *problem.window, channels)
        group, n, channel, places, taps = 0, 1, 2 + 2 * dims, 2, 2 + dims
    else:  # (N, groups, O, P, Q, channels, T, R, S)
        view = matrix.view(-1, problem.groups, *problem.positions, channels, *problem.window)
        group, n, channel, places, taps = 1, 0, 2 + dims, 2, 3 + dims
    return view.permute(n, group, channel, *chain(*((places + axis, taps + axis) for axis in range(dims))))
