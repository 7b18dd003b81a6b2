"""Convolution by Fourier transforms of the whole image or of tiles.

Outputs are computed in tiles by *overlap-save*: the transform of a window of L elements times the transform of the
filter is a cyclic convolution of length L, of which L - R + 1 outputs are free of wrap-around. For each frequency,
channels are summed by one complex matrix product over all windows of the micro-batch: the same three products as in
``gemm``, with X (windows, C), W (K, C) and Y (windows, K), and one factor conjugated for correlations. (Sources:
Mathieu, Henaff, LeCun, *Fast training of convolutional networks through FFTs*, 2013; Vasilache et al., *Fast
convolutional nets with fbfft*, 2014, for the tiles.)

The buffer ``prepared`` holds the filter's transform W, or the sum of the transforms of its gradient, which is
transformed back once. Torch's transforms always allocate internally. On the CPU each call transforms one sample or one
filter, so that the allocations stay in the cache and do not grow with the micro-batch: at most two spectra of a sample
(the result, and a copy of the input), and three of a filter, which is also padded or reordered. On CUDA, where each
call is a few launches, one call transforms the whole micro-batch or all filters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import Tensor

from mucudnn.core.problem import ConvProblem, Operation, Pair, Sizes, inside
from mucudnn.kernels.algorithm import BaseAlgorithm, Workspace, counted_internal_bytes
from mucudnn.kernels.memory import Part, carve, carved_bytes, torch_dtype
from mucudnn.kernels.torch_ops.gemm import multiply

_TILE_LENGTH = 32  # length of a tile, including the filter's overlap


@dataclass(frozen=True, slots=True)
class Fft(BaseAlgorithm):
    """Convolution by Fourier transforms: of tiles if ``tiled``, otherwise of the whole padded image."""

    name: str
    tiled: bool = False
    device_type: str = "cpu"
    version: int = 2
    deterministic: bool = True

    def supports(self, problem: ConvProblem) -> str | None:
        if problem.dtype not in ("float32", "float64"):
            return f"dtype is {problem.dtype}; Fourier transforms support only float32 and float64"
        if problem.stride != (1, 1):
            return f"stride is {problem.stride}; a transform computes every output, so only stride 1 is supported"
        if problem.dilation != (1, 1):
            return f"dilation is {problem.dilation}; only dilation 1 is supported"
        if self.tiled and self._tiling(problem).counts == (1, 1):
            return "one tile covers the whole image, as in the algorithm fft"
        return None

    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        tiling = self._tiling(problem)
        scratch = tiling.scratch_parts(micro_batch_size)
        return Workspace(carved_bytes([tiling.filter_spectrum]), carved_bytes(scratch))

    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        if self.device_type == "cuda":
            return counted_internal_bytes(self, problem, micro_batch_size)
        tiling = self._tiling(problem)
        images = max(spectrum.size_bytes for spectrum in tiling.scratch_parts(1)[:2])  # of one sample of x or y
        return max(2 * images, 3 * tiling.filter_spectrum.size_bytes // problem.k)

    def open(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        tiling = self._tiling(problem)
        (spectrum,) = carve(prepared, [tiling.filter_spectrum])
        if problem.operation is Operation.BACKWARD_FILTER:
            spectrum.zero_()
            return
        for filters, target in tiling.filters(w, spectrum):
            transformed = torch.fft.rfft2(filters, s=tiling.lengths)
            correlate = problem.operation is Operation.FORWARD
            target.copy_((transformed.conj() if correlate else transformed).flatten(2).permute(2, 0, 1))

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
        for filters, source in tiling.filters(w, spectrum):
            gradient = tiling.irfft2(source.permute(1, 2, 0))
            filters.add_(gradient[..., : problem.r, : problem.s])

    def _tiling(self, problem: ConvProblem) -> _Tiling:
        written = (problem.h, problem.w) if problem.operation is Operation.BACKWARD_DATA else (problem.p, problem.q)
        overlap, at_once = (problem.r - 1, problem.s - 1), self.device_type == "cuda"
        whole = (_good_length(written[0] + overlap[0]), _good_length(written[1] + overlap[1]))
        if not self.tiled:
            return _Tiling(problem, written, whole, at_once)
        tile = [max(_TILE_LENGTH, _good_length(2 * (size + 1))) for size in overlap]
        return _Tiling(problem, written, (min(whole[0], tile[0]), min(whole[1], tile[1])), at_once)


ALGORITHMS: tuple[Fft, ...] = (Fft("fft"), Fft("fft-tiled", tiled=True))
ON_CUDA: tuple[Fft, ...] = tuple(replace(algorithm, device_type="cuda") for algorithm in ALGORITHMS)


@dataclass(frozen=True, slots=True)
class _Tiling:
    """The division of output images of size ``written`` into windows of size ``lengths``, and the layout of spectra.

    ``at_once``: whether all images of a micro-batch, or all filters, are transformed in one call.
    """

    problem: ConvProblem
    written: Pair
    lengths: Pair
    at_once: bool

    @property
    def steps(self) -> Pair:
        """Height and width of the outputs of a window that are free of wrap-around."""
        return self.lengths[0] - self.problem.r + 1, self.lengths[1] - self.problem.s + 1

    @property
    def counts(self) -> Pair:
        """Number of windows that cover an image: (down, across)."""
        return ceil(self.written[0] / self.steps[0]), ceil(self.written[1] / self.steps[1])

    @property
    def frequencies(self) -> int:
        """Number of frequencies of a window's real two-dimensional transform, without the redundant half."""
        return self.lengths[0] * (self.lengths[1] // 2 + 1)

    @property
    def filter_spectrum(self) -> Part:
        """Part of a buffer for the spectrum of the filter, (frequencies, groups, K // groups, C // groups)."""
        k, c = self.problem.k, self.problem.c
        groups = self.problem.groups
        return Part((self.frequencies, groups, k // groups, c // groups), torch_dtype(self.problem).to_complex())

    def scratch_parts(self, n: int) -> list[Part]:
        """Return the parts of the scratch buffer: spectra of x and of y, and the padded samples of one call of torch.

        The spectra have the shape (frequencies, groups, windows, channels).
        """
        channels, dtype = (self.problem.c, self.problem.k), torch_dtype(self.problem)
        groups, windows = self.problem.groups, n * self.counts[0] * self.counts[1]
        spectra = [Part((self.frequencies, groups, windows, c // groups), dtype.to_complex()) for c in channels]
        padded = (n if self.at_once else 1, max(channels), *self._padded_size(self.lengths))
        return [*spectra, Part(padded, dtype)]

    def _padded_size(self, window: Pair) -> Pair:
        """Return the height and width of the area that all windows of this size cover together."""
        (down, across), (step_h, step_w) = self.counts, self.steps
        return (down - 1) * step_h + window[0], (across - 1) * step_w + window[1]

    def filters(self, w: Tensor, spectrum: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the filters to transform in one call, (k, C // groups, R, S), with a view of their spectra.

        The spectra have the shape (frequencies, k, C // groups).
        """
        step = len(w) if self.at_once else 1
        return zip(torch.split(w, step), torch.split(spectrum.flatten(1, 2), step, 1), strict=True)

    def irfft2(self, spectrum: Tensor) -> Tensor:
        """Transform spectra (..., frequencies) back to windows."""
        windows: Tensor = torch.fft.irfft2(torch.unflatten(spectrum, -1, (self.lengths[0], -1)), s=self.lengths)
        return windows

    def transform(
        self, images: Tensor, spectrum: Tensor, padded: Tensor, window: Pair, before: Sizes, *, conjugate: bool = False
    ) -> None:
        """Transform the windows of each image, and write their spectra.

        before: number of zeros above and left of the image; a negative number crops the image.
        """
        height, width = self._padded_size(window)
        step, channels = len(padded), images.shape[1]
        canvas = padded.flatten()[: step * channels * height * width].view(step, channels, height, width)
        canvas.zero_()
        rows, image_rows = inside(-before[0], 1, images.shape[2], height)
        columns, image_columns = inside(-before[1], 1, images.shape[3], width)
        windows = canvas.unfold(2, window[0], self.steps[0]).unfold(3, window[1], self.steps[1])
        for part, target in self._samples(images, spectrum):
            canvas[..., rows, columns].copy_(part[..., image_rows, image_columns])
            self._transform_windows(windows, target, conjugate=conjugate)

    def _transform_windows(self, windows: Tensor, target: Tensor, *, conjugate: bool) -> None:
        """Transform some images' windows in one call of torch, and write their spectra to ``target``.

        This is a method of its own so that its temporary tensors are freed before the next call.

        windows: (n, channels, down, across, *window), target: (frequencies, groups, n, windows, channels).
        """
        transformed = torch.fft.rfft2(windows, s=self.lengths)
        by_frequency = (transformed.conj() if conjugate else transformed).flatten(4).flatten(2, 3)
        target.copy_(torch.unflatten(by_frequency, 1, (self.problem.groups, -1)).permute(4, 1, 0, 3, 2))

    def transform_back(self, spectrum: Tensor, images: Tensor, skip: Pair) -> None:
        """Transform the spectra of the windows back into images.

        skip: number of rows at the top and columns at the left of each window to leave out, because they wrap around.
        """
        for part, source in self._samples(images, spectrum):
            self._transform_part_back(source, part, skip)

    def _transform_part_back(self, source: Tensor, images: Tensor, skip: Pair) -> None:
        """Transform the spectra of some images back in one call of torch, and write the images.

        source: (frequencies, groups, n, windows, channels), images: (n, channels, height, width).
        """
        (down, across), (step_h, step_w) = self.counts, self.steps
        tiles = self.irfft2(source.permute(2, 1, 4, 3, 0)).flatten(1, 2)
        kept = tiles[..., skip[0] : skip[0] + step_h, skip[1] : skip[1] + step_w]
        rows = torch.unflatten(kept, 2, (down, across)).transpose(3, 4)
        whole = rows.reshape(*images.shape[:2], down * step_h, across * step_w)
        images.copy_(whole[..., : images.shape[2], : images.shape[3]])

    def _samples(self, images: Tensor, spectrum: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the images to transform in one call of torch, with a view of their spectra.

        The spectra have the shape (frequencies, groups, images, windows of one image, channels).
        """
        step = len(images) if self.at_once else 1
        spectra = torch.unflatten(spectrum, 2, (len(images), -1))
        return zip(torch.split(images, step), torch.split(spectra, step, 2), strict=True)


def _multiply(problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor) -> None:
    accumulate = problem.operation is Operation.BACKWARD_FILTER
    multiply(problem.operation, x.flatten(0, 1), w.flatten(0, 1), y.flatten(0, 1), accumulate=accumulate)


def _good_length(at_least: int) -> int:
    """Return the smallest length from ``at_least`` on without prime factors above 5, which makes transforms fast.

    >>> _good_length(7), _good_length(31)
    (8, 32)
    """
    length = at_least
    while True:
        quotient = length
        for factor in (2, 3, 5):
            while quotient % factor == 0:
                quotient //= factor
        if quotient == 1:
            return length
        length += 1
