"""Results in float64 at some places of the output: a check that costs milliseconds, whatever the layer.

A result of a convolution is a sum over one window. So the windows of a few places, gathered into a matrix, give them
exactly, and nothing else must be computed. The places are the corners, where the padding is, of the first and the last
sample, and others at random.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mucudnn.kernels.contract.reference import reference, relative_l2_error
from mucudnn.measuring.operands import Operands
from mucudnn.words.problem import ConvProblem, Operation

_PLACES = 64
_MOST_GROUPS = 4
_MOST_CHANNELS = 8  # of each group
_FLOPS = 2e7  # most for the gradient of the filter, in float64: some milliseconds


class SampledResults:
    """Relative errors of what algorithms write, estimated at some places, always the same of a problem.

    Activations are compared at ``_PLACES`` pixels in some channels, the gradient of the filter in some pairs of
    channels at all its taps: channels of some groups, evenly spread. The operands must not change meanwhile.
    """

    def __init__(self, problem: ConvProblem, operands: Operands) -> None:
        self._problem, self._operands = problem, operands
        self._last: tuple[int, tuple[Tensor, ...], Tensor] | None = None

    @property
    def affordable(self) -> int:
        """The number of samples on which it is worth it to run: one micro-batch is enough."""
        return 0

    def error(self, written: Tensor, n: int) -> float:
        """Relative L2 error at the places, of what an algorithm wrote for the first ``n`` samples."""
        places, expected = self._expected(n)
        return relative_l2_error(written[places], expected)

    def peak_bytes(self) -> int:
        """Most bytes that are allocated at a time, about: windows and filters in float64, and their copies."""
        problem = self._problem
        if problem.operation is Operation.BACKWARD_FILTER:
            pixels = max(problem.h * problem.w, problem.p * problem.q)
            return 32 * self._operands.batch_size * 2 * _MOST_CHANNELS * pixels
        channels = max(problem.c, problem.k) // problem.groups
        return 24 * (_PLACES + _MOST_CHANNELS) * channels * problem.r * problem.s

    def _expected(self, n: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return indices into what is written for ``n`` samples, and the results there."""
        if self._last is None or self._last[0] != n:
            self._last = (n, *self._computed(n))
        return self._last[1:]

    def _computed(self, n: int) -> tuple[tuple[Tensor, ...], Tensor]:
        problem = self._problem
        if problem.operation is Operation.BACKWARD_FILTER:
            return self._filter_gradients(n)
        forward = problem.operation is Operation.FORWARD
        size = (problem.p, problem.q) if forward else (problem.h, problem.w)
        pixels = tuple(place.to(self._operands.x.device) for place in _places(n, *size))
        of_group = self._outputs if forward else self._data_gradients
        channels, results = [], []
        for group in _spread(problem.groups, _MOST_GROUPS):
            written = (problem.k if forward else problem.c) // problem.groups
            chosen = torch.tensor(_spread(written, _MOST_CHANNELS), device=self._operands.x.device)
            channels.append(chosen + group * written)
            results.append(of_group(group, chosen, *pixels))
        samples, rows, columns = (place[:, None] for place in pixels)
        return (samples, torch.cat(channels)[None, :], rows, columns), torch.cat(results, dim=1)

    def _outputs(self, group: int, chosen: Tensor, samples: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Compute y of chosen channels of a group at the places: (places, channels)."""
        problem, k, c = self._problem, self._problem.k // self._problem.groups, self._problem.c // self._problem.groups
        above, left = (
            place[:, None] * stride - padding + torch.arange(taps, device=place.device) * dilation
            for place, taps, stride, padding, dilation in _by_axis(problem, rows, columns)
        )
        inside = _inside(above, problem.h)[:, :, None] & _inside(left, problem.w)[:, None, :]
        x = self._operands.x[:, group * c : (group + 1) * c]
        windows = _windows(x, samples, above.clamp(0, problem.h - 1), left.clamp(0, problem.w - 1), inside)
        filters = self._operands.w[chosen + group * k].double()  # (channels, C / groups, R, S)
        return torch.einsum("pcrs,kcrs->pk", windows, filters)

    def _data_gradients(self, group: int, chosen: Tensor, samples: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Compute dx of chosen channels of a group at the places: (places, channels)."""
        problem, k = self._problem, self._problem.k // self._problem.groups
        reached, inside = [], []
        for (place, taps, stride, padding, dilation), size in zip(
            _by_axis(problem, rows, columns), (problem.p, problem.q), strict=True
        ):
            distance = place[:, None] + padding - torch.arange(taps, device=place.device) * dilation
            pixel = distance.div(stride, rounding_mode="floor")
            reached.append(pixel.clamp(0, size - 1))
            inside.append(_inside(pixel, size) & (distance.remainder(stride) == 0))
        dy = self._operands.y[:, group * k : (group + 1) * k]
        windows = _windows(dy, samples, reached[0], reached[1], inside[0][:, :, None] & inside[1][:, None, :])
        filters = self._operands.w[group * k : (group + 1) * k][:, chosen].double()  # (K / groups, channels, R, S)
        return torch.einsum("pkrs,kcrs->pc", windows, filters)

    def _filter_gradients(self, n: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """Compute dw of the chosen pairs of channels: (outputs, inputs, R, S)."""
        problem, operands, device = self._problem, self._operands, self._operands.x.device
        k, c = problem.k // problem.groups, problem.c // problem.groups
        groups = _spread(problem.groups, _MOST_GROUPS)
        of_pair = problem.flops(n) / (problem.k * c)
        side = max(1, min(_MOST_CHANNELS, int((_FLOPS / of_pair / len(groups)) ** 0.5)))
        inputs = torch.tensor(_spread(c, side), device=device)
        outputs, gradients = [], []
        for group in groups:
            of_group = torch.tensor(_spread(k, side), device=device) + group * k
            small = replace(problem, c=len(inputs), k=len(of_group), groups=1)
            x, dy = operands.x[:n, inputs + group * c], operands.y[:n, of_group]
            gradients.append(reference(small, x, dy.new_empty(small.w_shape()), dy))
            outputs.append(of_group)
        return (torch.cat(outputs)[:, None], inputs[None, :]), torch.cat(gradients)


def _places(n: int, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Samples, rows and columns of the places: corners of the first and last sample, others at random."""
    corners = [(i, r, c) for i in (0, n - 1) for r in (0, height - 1) for c in (0, width - 1)]
    generator = torch.Generator().manual_seed(n)
    random = [torch.randint(size, (_PLACES - len(corners),), generator=generator) for size in (n, height, width)]
    fixed = torch.tensor(corners).unbind(1)
    samples, rows, columns = (torch.cat(pair) for pair in zip(fixed, random, strict=True))
    return samples, rows, columns


def _by_axis(problem: ConvProblem, rows: Tensor, columns: Tensor) -> list[tuple[Tensor, int, int, int, int]]:
    taps = (problem.r, problem.s)
    return [*zip((rows, columns), taps, problem.stride, problem.padding, problem.dilation, strict=True)]


def _inside(index: Tensor, size: int) -> Tensor:
    return (index >= 0) & (index < size)


def _windows(images: Tensor, samples: Tensor, rows: Tensor, columns: Tensor, inside: Tensor) -> Tensor:
    """Gather windows in float64: (places, channels, R, S), zero where not inside. rows, columns: (places, taps)."""
    gathered = images[samples[:, None, None], :, rows[:, :, None], columns[:, None, :]]  # (places, R, S, channels)
    return (gathered.double() * inside[..., None]).permute(0, 3, 1, 2).contiguous()


def _spread(size: int, count: int) -> list[int]:
    """Choose ``count`` of ``size`` indices, or all: the first, the last, and others between."""
    if count >= size:
        return list(range(size))
    return [0] if count == 1 else [i * (size - 1) // (count - 1) for i in range(count)]
