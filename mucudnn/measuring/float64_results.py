"""Float64 reference results for candidates, at a few positions, which takes milliseconds.

Each output element of a convolution is a sum over one window of the image, so a few elements can be computed exactly
from their windows, gathered into a matrix. The positions are the corners of the first and last sample, which padding
affects, and random ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from itertools import product
from math import prod
from operator import and_
from typing import Any

import torch
from torch import Tensor

from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.kernels.torch_convolution import reference, relative_l2_error
from mucudnn.measuring.operands import Operands

_PLACES = 64
_MOST_GROUPS = 4
_MOST_CHANNELS = 8  # of each group
_SAMPLED_FLOPS = 2e7  # limit for the filter gradient in float64: a few milliseconds

_Places = tuple[Tensor, ...]  # indices into the written tensor


class Float64Results:
    """Float64 results at a few fixed positions of a problem, from which errors are estimated.

    Outputs and data gradients are compared at ``_PLACES`` pixels in some channels, the filter gradient at all taps of
    some pairs of channels. Channels and groups are evenly spread. The operands must not change meanwhile. Only the last
    result is cached, since candidates are checked in the order of their micro-batch size.
    """

    def __init__(self, problem: ConvProblem, operands: Operands) -> None:
        self._problem, self._operands = problem, operands
        self._last: tuple[int, _Places, Tensor] | None = None

    def error(self, written: Tensor, n: int) -> float:
        """Return the relative L2 error of ``written``, a result of the first ``n`` samples, at the compared places."""
        if self._last is None or self._last[0] != n:
            self._last = (n, *self._computed(n))
        _, places, expected = self._last
        return relative_l2_error(written[places], expected)

    def peak_bytes(self) -> int:
        """Return the approximate peak of allocated bytes while comparing up to the operands' whole mini-batch.

        It consists of windows and filters in float64, and their copies; for the filter gradient of the compared
        channels, their copies, and torch's im2col matrix.
        """
        problem, n = self._problem, self._operands.batch_size
        if problem.operation is Operation.BACKWARD_FILTER:
            extent, positions, window = map(prod, (problem.extent, problem.positions, problem.window))
            channels = self._channels(n) + 1  # fewer samples are compared in more channels
            return 8 * n * channels * (3 * (extent + positions) + window * positions)
        channels = max(problem.c, problem.k) // problem.groups
        return 24 * (_PLACES + _MOST_CHANNELS) * channels * prod(problem.window)

    def _computed(self, n: int) -> tuple[_Places, Tensor]:
        """Compute float64 results for ``n`` samples; return the indices of the compared places, and the results."""
        problem = self._problem
        if problem.operation is Operation.BACKWARD_FILTER:
            return self._filter_gradients(n)
        forward = problem.operation is Operation.FORWARD
        samples, *pixels = (
            place.to(self._operands.x.device) for place in _places(n, problem.positions if forward else problem.extent)
        )
        compute = self._outputs if forward else self._data_gradients
        channels, results = [], []
        for group in _spread(problem.groups, _MOST_GROUPS):
            written = (problem.k if forward else problem.c) // problem.groups
            chosen = torch.tensor(_spread(written, _MOST_CHANNELS), device=self._operands.x.device)
            channels.append(chosen + group * written)
            results.append(compute(group, chosen, samples, pixels))
        at = (samples[:, None], torch.cat(channels)[None, :], *(place[:, None] for place in pixels))
        return at, torch.cat(results, dim=1)

    def _outputs(self, group: int, chosen: Tensor, samples: Tensor, pixels: Sequence[Tensor]) -> Tensor:
        """Compute y in float64 at the compared positions, for chosen channels of a group: (places, channels)."""
        problem, k, c = self._problem, self._problem.k // self._problem.groups, self._problem.c // self._problem.groups
        read = [
            place[:, None] * stride - padding + torch.arange(taps, device=place.device) * dilation
            for place, taps, stride, padding, dilation in _by_axis(problem, pixels)
        ]
        inside = [_inside(index, size) for index, size in zip(read, problem.extent, strict=True)]
        windows = _windows(self._operands.x[:, group * c : (group + 1) * c], samples, read, inside)
        filters = self._operands.w[chosen + group * k].double()  # (channels, C / groups, R, S)
        return torch.einsum("pcr,kcr->pk", windows, filters.flatten(2))

    def _data_gradients(self, group: int, chosen: Tensor, samples: Tensor, pixels: Sequence[Tensor]) -> Tensor:
        """Compute dx in float64 at the compared positions, for chosen channels of a group: (places, channels)."""
        problem, k = self._problem, self._problem.k // self._problem.groups
        reached, inside = [], []
        for (place, taps, stride, padding, dilation), size in zip(
            _by_axis(problem, pixels), problem.positions, strict=True
        ):
            distance = place[:, None] + padding - torch.arange(taps, device=place.device) * dilation
            pixel = distance.div(stride, rounding_mode="floor")
            reached.append(pixel)
            inside.append(_inside(pixel, size) & (distance.remainder(stride) == 0))
        windows = _windows(self._operands.y[:, group * k : (group + 1) * k], samples, reached, inside)
        filters = self._operands.w[group * k : (group + 1) * k][:, chosen].double()  # (K / groups, channels, R, S)
        return torch.einsum("pkr,kcr->pc", windows, filters.flatten(2))

    def _filter_gradients(self, n: int) -> tuple[_Places, Tensor]:
        """Return indices and float64 values of dw for the compared pairs of channels: (outputs, inputs, ...)."""
        problem, operands, device = self._problem, self._operands, self._operands.x.device
        k, c = problem.k // problem.groups, problem.c // problem.groups
        count = self._channels(n)
        inputs = torch.tensor(_spread(c, count), device=device)
        outputs, gradients = [], []
        for group in _spread(problem.groups, _MOST_GROUPS):
            channels = torch.tensor(_spread(k, count), device=device) + group * k
            small = replace(problem, c=len(inputs), k=len(channels), groups=1)
            x, dy = operands.x[:n, inputs + group * c], operands.y[:n, channels]
            gradients.append(reference(small, x, dy.new_empty(small.w_shape()), dy))
            outputs.append(channels)
        return (torch.cat(outputs)[:, None], inputs[None, :]), torch.cat(gradients)

    def _channels(self, n: int) -> int:
        """Return the most inputs, and outputs, of a group for which dw of ``n`` samples is compared."""
        pair_flops = self._problem.flops(n) * self._problem.groups / (self._problem.k * self._problem.c)
        groups = min(self._problem.groups, _MOST_GROUPS)
        return max(1, min(_MOST_CHANNELS, int((_SAMPLED_FLOPS / pair_flops / groups) ** 0.5)))


def _places(n: int, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Return samples and pixels of the positions: corners of the first and last sample, then random ones.

    sizes: of the pixels, (height, width) or (depth, height, width).
    """
    corners = [*product((0, n - 1), *((0, size - 1) for size in sizes))]
    generator = torch.Generator().manual_seed(n)
    random = [torch.randint(size, (_PLACES - len(corners),), generator=generator) for size in (n, *sizes)]
    return tuple(map(torch.cat, zip(torch.tensor(corners).unbind(1), random, strict=True)))


def _by_axis(problem: ConvProblem, pixels: Sequence[Tensor]) -> list[tuple[Tensor, int, int, int, int]]:
    return [*zip(pixels, problem.window, problem.stride, problem.padding, problem.dilation, strict=True)]


def _inside(index: Tensor, size: int) -> Tensor:
    return (index >= 0) & (index < size)


def _windows(images: Tensor, samples: Tensor, read: Sequence[Tensor], inside: Sequence[Tensor]) -> Tensor:
    """Gather the images' windows in float64: (places, channels, taps), zero where a tap is outside the image.

    read: pixels of the taps along each axis, (places, taps of the axis).
    inside: whether they are in the image.
    """
    dims = len(read)

    def along(axis: int, values: Tensor) -> Tensor:
        """Return values by place and tap of one axis, so that they broadcast over the others."""
        shape = [1] * dims
        shape[axis] = -1
        return values.view(len(samples), *shape)

    pixels = [
        along(axis, index.clamp(0, size - 1))
        for axis, (index, size) in enumerate(zip(read, images.shape[2:], strict=True))
    ]
    indices: Any = (samples.view(-1, *[1] * dims), slice(None), *pixels)
    gathered = images[indices]  # (places, ..., channels)
    is_inside = reduce(and_, map(along, range(dims), inside))
    return (gathered.double() * is_inside[..., None]).movedim(-1, 1).flatten(2)


def _spread(size: int, count: int) -> list[int]:
    """Return ``count`` evenly spaced indices from 0 to ``size`` - 1, including both ends, or all if there are fewer."""
    if count >= size:
        return list(range(size))
    return [0] if count == 1 else [i * (size - 1) // (count - 1) for i in range(count)]
