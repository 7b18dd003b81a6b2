"""Bands of rows in which a part of a model can be computed: which rows of its inputs a band depends on.

No operation is known by its name. NaN in some rows of the inputs shows which rows of the result they reach, through
weights of zero, activations and maxima too. That must be the same for rows elsewhere, so each band is then computed
from its rows alone, and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from math import nan

import torch
from torch import Tensor, nn

from mucudnn.running.dispatcher import untouched
from mucudnn.running.modules import TunedModule, running_torchs_own
from mucudnn.running.segments import Band

_ALIGNMENTS = (1, 2, 4, 8, 16, 32)  # rows of the result that are tried as blocks
_MOST_ROWS = 2  # of an input that are computed in all bands together, over those there are


def bands_of(function: nn.Module, inputs: Sequence[Tensor], count: int) -> tuple[Band, ...]:
    """Return bands of the result of a part for inputs (N, C, rows, ...), or none if it cannot be computed in bands.

    It cannot if rows depend on most others, if their rows do not line up, if it writes buffers, or if an operation is
    undefined for fewer rows.

    count: of bands; there may be fewer.
    """
    inputs = [x[:1].detach() for x in inputs]
    with _by_torch(function):
        versions = [buffer._version for buffer in function.buffers()]
        y = function(*(x.clone() for x in inputs))  # which may be written in place
        if versions != [buffer._version for buffer in function.buffers()] or bool(y.isnan().any()):
            return ()
        ratios = [_ratio(x.shape[2], y.shape[2]) for x in inputs]
        for alignment in _ALIGNMENTS:
            if any((alignment * ratio).denominator > 1 for ratio in ratios):
                continue
            blocks = [int(alignment * ratio) for ratio in ratios]
            bands = _aligned(function, inputs, y.shape[2], count, alignment, blocks)
            if bands and all(_is_apart(function, inputs, y, band) for band in bands):
                return bands
    return ()


@contextmanager
def _by_torch(function: nn.Module) -> Iterator[None]:
    """Compute without gradients, by operators in which a NaN reaches what is computed from it and nothing else.

    Winograd and Fourier transforms carry it to the rest of their tiles.
    """
    tuned = [module for module in function.modules() if isinstance(module, TunedModule)]
    with torch.no_grad(), running_torchs_own(tuned), untouched, torch.backends.nnpack.flags(enabled=False):
        yield


def _ratio(x_rows: int, y_rows: int) -> Fraction:
    """Return how many rows of an input there are for one row of the result: a whole number or its inverse."""
    return Fraction(round(x_rows / y_rows)) if x_rows >= y_rows else Fraction(1, round(y_rows / x_rows))


def _aligned(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    y_rows: int,
    count: int,
    alignment: int,
    blocks: Sequence[int],
) -> tuple[Band, ...]:
    """Return bands of whole blocks, if a block in the middle of each input reaches only blocks near it.

    alignment, blocks: rows of a block of the result and of each input.
    """
    number = -(-y_rows // alignment)  # of blocks
    middle, before, after = number // 2, 0, 0
    for place, rows in enumerate(blocks):
        probed = [x.clone() for x in inputs]
        probed[place][:, :, middle * rows : (middle + 1) * rows] = nan
        reached = _nan_rows(function(*probed))
        if reached:
            first, last = reached[0] // alignment, reached[-1] // alignment
            if first == 0 or last >= number - 1:
                return ()
            before, after = max(before, last - middle), max(after, middle - first)

    per_band = -(-number // count)
    bands = []
    for first in range(0, number, per_band):
        last = min(first + per_band, number)
        begin, end = max(0, first - before), last + after
        is_last = last == number
        of_inputs = tuple(
            (begin * rows, x.shape[2] if is_last else min(x.shape[2], end * rows))
            for x, rows in zip(inputs, blocks, strict=True)
        )
        start, stop = first * alignment, min(y_rows, last * alignment)
        bands.append(Band(start, stop, start - begin * alignment, of_inputs))
    for place, x in enumerate(inputs):
        numbers = [stop - start for start, stop in (band.of_inputs[place] for band in bands)]
        if min(numbers) <= 0 or sum(numbers) > _MOST_ROWS * x.shape[2]:
            return ()
    return tuple(bands) if len(bands) > 1 else ()


def _nan_rows(y: Tensor) -> list[int]:
    return torch.nonzero(y.isnan().transpose(0, 2).flatten(1).any(1)).flatten().tolist()


def _is_apart(function: Callable[..., Tensor], inputs: Sequence[Tensor], y: Tensor, band: Band) -> bool:
    """Return whether a band depends on its rows of the inputs alone, and is the same if computed from these."""
    rows = [slice(*rows) for rows in band.of_inputs]
    others = [torch.full_like(x, nan) for x in inputs]
    for x, other, of_input in zip(inputs, others, rows, strict=True):
        other[:, :, of_input] = x[:, :, of_input]
    if bool(function(*others)[:, :, band.start : band.stop].isnan().any()):
        return False
    try:
        part = function(*(x[:, :, of_input].clone() for x, of_input in zip(inputs, rows, strict=True)))
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):  # such as a view of a fixed shape
        return False
    own, whole = part[:, :, band.offset : band.offset + band.stop - band.start], y[:, :, band.start : band.stop]
    if own.shape != whole.shape or own.dtype is not whole.dtype:
        return False
    difference, norms = (_by_row(tensor) for tensor in (own.double() - whole.double(), whole.double()))
    return bool((difference <= 2 * torch.finfo(y.dtype).eps ** 0.5 * (norms + norms.mean())).all())


def _by_row(y: Tensor) -> Tensor:
    """Return the norm of each row."""
    norms: Tensor = torch.linalg.vector_norm(y.transpose(0, 2).flatten(1), dim=1)
    return norms
