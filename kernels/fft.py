"""Convolution by Fourier transform, of the whole image or of tiles.

Outputs are computed in tiles by *overlap-save*: the transform of a window of L elements times the transform of the
filter is a cyclic convolution of length L, of which L - R + 1 outputs are free of wrap-around. For each frequency,
channels are summed by one complex matrix product over all windows of the micro-batch: the same three products as in
``gemm``, with X (windows, C), W (K, C) and Y (windows, K), one of the factors conjugated where it is a correlation.
(Mathieu, Henaff, LeCun, *Fast training of convolutional networks through FFTs*, 2013; Vasilache et al., *Fast
convolutional nets with fbfft*, 2014, for the tiles.)

``prepared`` holds the filter's transform W, or the sum of its gradient's transforms, which is transformed back once.
Torch's transforms allocate inside, whatever they are handed. They run over one sample, or one filter, at a time, so
that what they allocate stays in the cache and does not grow with the micro-batch: at most two spectra of a sample (the
result of a transform, and a copy of what is transformed), and three of a filter, which is also padded or put in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from mucudnn.kernels.algorithm import Workspace
from mucudnn.kernels.buffers import Part, carve, carved_bytes, torch_dtype
from mucudnn.kernels.gemm import multiply
from mucudnn.problem import ConvProblem, Operation, Pair

_TILE_LENGTH = 32  # of a tile, the filter's overlap included


@dataclass(frozen=True, slots=True)
class Fft:
    """See the module's docstring. ``tiled``: many short transforms; otherwise one that covers the padded image."""

    name: str
    tiled: bool = False
    version: int = 2
    deterministic: bool = True

    def supports(self, problem: ConvProblem) -> str | None:
        if problem.dtype not in ("float32", "float64"):
            return f"dtype is {problem.dtype}; the CPU's Fourier transform has only float32 and float64"
        if problem.stride != (1, 1):
            return f"stride is {problem.stride}; a transform computes every output, so only stride 1 is offered"
        if problem.dilation != (1, 1):
            return f"dilation is {problem.dilation}; only dilation 1 is offered"
        if self.tiled and self._tiling(problem).counts == (1, 1):
            return "one tile covers the whole image: that is the algorithm fft"
        return None

    def supports_micro_batch(self, problem: ConvProblem, micro_batch_size: int) -> str | None:
        return None

    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        tiling = self._tiling(problem)
        scratch = tiling.scratch_parts(micro_batch_size)
        return Workspace(carved_bytes([tiling.filter_spectrum]), carved_bytes(scratch))

    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        tiling = self._tiling(problem)
        return max(2 * tiling.image_spectrum_bytes, 3 * tiling.filter_spectrum.size_bytes // problem.k)

    def open(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        tiling = self._tiling(problem)
        (spectrum,) = carve(prepared, [tiling.filter_spectrum])
        if problem.operation is Operation.BACKWARD_FILTER:
            spectrum.zero_()
            return
        for k, target in tiling.filters(spectrum):
            transformed = torch.fft.rfft2(w[k], s=tiling.lengths)
            correlate = problem.operation is Operation.FORWARD
            target.copy_((transformed.conj() if correlate else transformed).flatten(1).T)

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
        tiling = self._tiling(problem)
        (w_spectrum,) = carve(prepared, [tiling.filter_spectrum])
        x_spectrum, y_spectrum, padded = carve(scratch, tiling.scratch_parts(x.shape[0]))
        match problem.operation:
            case Operation.FORWARD:
                tiling.transform(x, x_spectrum, padded, tiling.lengths, problem.padding)
                _multiply(problem, x_spectrum, w_spectrum, y_spectrum)
                tiling.transform_back(y_spectrum, y, (0, 0))
                if bias is not None:
                    y.add_(bias.view(1, -1, 1, 1))
            case Operation.BACKWARD_DATA:
                overlap = (problem.r - 1, problem.s - 1)
                before = (overlap[0] - problem.padding[0], overlap[1] - problem.padding[1])
                tiling.transform(y, y_spectrum, padded, tiling.lengths, before)
                _multiply(problem, x_spectrum, w_spectrum, y_spectrum)
                tiling.transform_back(x_spectrum, x, overlap)
            case Operation.BACKWARD_FILTER:
                tiling.transform(x, x_spectrum, padded, tiling.lengths, problem.padding)
                tiling.transform(y, y_spectrum, padded, tiling.steps, (0, 0), conjugate=True)
                _multiply(problem, x_spectrum, w_spectrum, y_spectrum)

    def close(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        if problem.operation is not Operation.BACKWARD_FILTER:
            return
        tiling = self._tiling(problem)
        (spectrum,) = carve(prepared, [tiling.filter_spectrum])
        for k, source in tiling.filters(spectrum):
            gradient = torch.fft.irfft2(tiling.unflatten(source.T), s=tiling.lengths)
            w[k].add_(gradient[..., : problem.r, : problem.s])

    def _tiling(self, problem: ConvProblem) -> _Tiling:
        written = (problem.h, problem.w) if problem.operation is Operation.BACKWARD_DATA else (problem.p, problem.q)
        overlap = (problem.r - 1, problem.s - 1)
        whole = (_good_length(written[0] + overlap[0]), _good_length(written[1] + overlap[1]))
        if not self.tiled:
            return _Tiling(problem, written, whole)
        tile = [max(_TILE_LENGTH, _good_length(2 * (o + 1))) for o in overlap]
        return _Tiling(problem, written, (min(whole[0], tile[0]), min(whole[1], tile[1])))


FFT = Fft("fft")
FFT_TILED = Fft("fft-tiled", tiled=True)


@dataclass(frozen=True, slots=True)
class _Tiling:
    """How images of (height, width) ``written`` are cut into windows of ``lengths``, and where the spectra lie."""

    problem: ConvProblem
    written: Pair
    lengths: Pair

    @property
    def steps(self) -> Pair:
        """Outputs of one window that are free of wrap-around."""
        return self.lengths[0] - self.problem.r + 1, self.lengths[1] - self.problem.s + 1

    @property
    def counts(self) -> Pair:
        """Windows down and across."""
        return ceil(self.written[0] / self.steps[0]), ceil(self.written[1] / self.steps[1])

    @property
    def frequencies(self) -> int:
        """Of a real two-dimensional transform: half of them are redundant."""
        return self.lengths[0] * (self.lengths[1] // 2 + 1)

    @property
    def filter_spectrum(self) -> Part:
        """(frequencies, groups, K // groups, C // groups)."""
        k, c = self.problem.k, self.problem.c
        groups = self.problem.groups
        return Part((self.frequencies, groups, k // groups, c // groups), self._complex)

    @property
    def image_spectrum_bytes(self) -> int:
        """Of all windows of one sample of x or y, whichever has more channels."""
        windows = self.counts[0] * self.counts[1]
        return max(self.problem.c, self.problem.k) * windows * self.frequencies * self._complex.itemsize

    @property
    def _complex(self) -> torch.dtype:
        return torch_dtype(self.problem).to_complex()

    def scratch_parts(self, n: int) -> list[Part]:
        """Spectra of x and y, (frequencies, groups, windows, channels), and one padded sample."""
        channels = (self.problem.c, self.problem.k)
        groups, windows = self.problem.groups, n * self.counts[0] * self.counts[1]
        spectra = [Part((self.frequencies, groups, windows, c // groups), self._complex) for c in channels]
        return [*spectra, Part((max(channels), *self._padded_size(self.lengths)), torch_dtype(self.problem))]

    def _padded_size(self, window: Pair) -> Pair:
        """What windows of this size cover together."""
        (down, across), (step_h, step_w) = self.counts, self.steps
        return (down - 1) * step_h + window[0], (across - 1) * step_w + window[1]

    def filters(self, spectrum: Tensor) -> list[tuple[int, Tensor]]:
        """Each k with its spectrum (frequencies, C // groups)."""
        return list(enumerate(spectrum.flatten(1, 2).unbind(1)))

    def unflatten(self, spectrum: Tensor) -> Tensor:
        """(..., frequencies) as the two-dimensional half spectrum."""
        return torch.unflatten(spectrum, -1, (self.lengths[0], -1))

    def transform(
        self, images: Tensor, spectrum: Tensor, padded: Tensor, window: Pair, before: Pair, *, conjugate: bool = False
    ) -> None:
        """Spectra of the windows of each image, with ``before`` zeros above and to the left (negative: cropped)."""
        height, width = self._padded_size(window)
        canvas = padded.flatten()[: images.shape[1] * height * width].view(-1, height, width)
        canvas.zero_()
        rows, image_rows = _overlap(before[0], images.shape[2], height)
        columns, image_columns = _overlap(before[1], images.shape[3], width)
        windows = canvas.unfold(1, window[0], self.steps[0]).unfold(2, window[1], self.steps[1])
        for image, target in zip(images, self._samples(spectrum, len(images)), strict=True):
            canvas[:, rows, columns].copy_(image[:, image_rows, image_columns])
            self._transform_windows(windows, target, conjugate)

    def _transform_windows(self, windows: Tensor, target: Tensor, conjugate: bool) -> None:
        """Of one image. windows: (channels, down, across, *window); target: (frequencies, groups, windows, channels).

        A method of its own, as is the way back: what one image allocates is free before the next.
        """
        transformed = torch.fft.rfft2(windows, s=self.lengths)
        by_frequency = (transformed.conj() if conjugate else transformed).flatten(3).flatten(1, 2)
        target.copy_(torch.unflatten(by_frequency, 0, (self.problem.groups, -1)).permute(3, 0, 2, 1))

    def transform_back(self, spectrum: Tensor, images: Tensor, skip: Pair) -> None:
        """Write each image from its windows' spectra; the first ``skip`` outputs of a window are wrapped around."""
        for image, source in zip(images, self._samples(spectrum, len(images)), strict=True):
            self._transform_image_back(source, image, skip)

    def _transform_image_back(self, source: Tensor, image: Tensor, skip: Pair) -> None:
        """source: (frequencies, groups, windows, channels), image: (channels, height, width)."""
        (down, across), (step_h, step_w) = self.counts, self.steps
        tiles = torch.fft.irfft2(self.unflatten(source.permute(1, 3, 2, 0)), s=self.lengths).flatten(0, 1)
        kept = tiles[..., skip[0] : skip[0] + step_h, skip[1] : skip[1] + step_w]
        whole = torch.unflatten(kept, 1, (down, across)).transpose(2, 3).reshape(-1, down * step_h, across * step_w)
        image.copy_(whole[:, : image.shape[1], : image.shape[2]])

    @staticmethod
    def _samples(spectrum: Tensor, n: int) -> tuple[Tensor, ...]:
        """Each sample's part: (frequencies, groups, windows of one sample, channels)."""
        return torch.unflatten(spectrum, 2, (n, -1)).unbind(2)


def _multiply(problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor) -> None:
    accumulate = problem.operation is Operation.BACKWARD_FILTER
    multiply(problem.operation, x.flatten(0, 1), w.flatten(0, 1), y.flatten(0, 1), accumulate=accumulate)


def _overlap(before: int, size: int, room: int) -> tuple[slice, slice]:
    """Where an image of ``size`` that starts at ``before`` lies in ``room`` elements, and which part of it does."""
    start, end = max(0, before), min(room, before + size)
    end = max(start, end)
    return slice(start, end), slice(start - before, end - before)


def _good_length(at_least: int) -> int:
    """The next length without prime factors above 5, for which transforms are fast."""
    length = at_least
    while not _is_smooth(length):
        length += 1
    return length


def _is_smooth(value: int) -> bool:
    for factor in (2, 3, 5):
        while value % factor == 0:
            value //= factor
    return value == 1
