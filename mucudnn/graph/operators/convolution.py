"""Convolutions of graphs: by an algorithm of mucudnn, which writes the band where it belongs, or by torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import ConvProblem, Operation, Sizes
from mucudnn.graph.operators.operator import Band, Operator, for_channels
from mucudnn.graph.operators.steps import address_of, are_images, elementwise_step, step
from mucudnn.graph.operators.windows import windows
from mucudnn.kernels.algorithm import Algorithm, BoundStage, Epilogue, Workspace, fuses
from mucudnn.kernels.compiled.library import FUNCTIONS, ProgramStep
from mucudnn.kernels.torch_convolution import functions
from mucudnn.running.workspace import lasting_buffer
from mucudnn.solver.bands import Reach
from mucudnn.solver.placement import aligned

_MOST_STAGES = 4096  # of all graphs, that are bound once


@dataclass(frozen=True, kw_only=True, eq=False)
class Convolution(Operator):
    """activation(convolution(x) + added), where ``added`` is the second of ``sources``, if there are two.

    problem: of the whole image, FORWARD, or BACKWARD_DATA for a transposed convolution, in channels_last; there may be
        fewer rows of the result than of the problem's, if fewer are padded below.
    weight, bias: with batch norm folded in.
    output_padding: rows and columns that a transposed convolution adds.
    """

    problem: ConvProblem
    weight: Tensor
    bias: Tensor | None
    activation: str | None = None
    output_padding: Sizes = (0, 0)

    @property
    def is_transposed(self) -> bool:
        return self.problem.operation is Operation.BACKWARD_DATA

    @property
    def extent(self) -> int:
        """The rows from the first to the last that a filter reads."""
        return self.problem.dilation[0] * (self.problem.window[0] - 1) + 1

    @property
    def align(self) -> int:
        return self.problem.stride[0] if self.is_transposed else 1  # with which a transposed filter is prepared

    def reaches(self, dim: int = 0) -> tuple[Reach, ...]:
        problem, rows = self.problem, np.arange(self.shape[2 + dim])
        stride, padding = problem.stride[dim], problem.padding[dim]
        extent = problem.dilation[dim] * (problem.window[dim] - 1) + 1
        if self.is_transposed:
            size = problem.positions[dim]
            first = np.clip((rows + padding - extent + 1) // stride, 0, size - 1)
            last = np.clip((rows + padding) // stride + 1, first + 1, size)
        else:
            first, last = windows(len(rows), problem.extent[dim], stride, padding, extent)
        same = [Reach(source, rows, rows + 1) for source in self.sources[1:]]
        return (Reach(self.sources[0], first, last), *same)

    def above(self, low: int, start: int) -> int:
        """Return how many rows of padding are above a band from row ``low`` on, which reads from row ``start`` on."""
        stride, padding = self.problem.stride[0], self.problem.padding[0]
        return padding + low - start * stride if self.is_transposed else start - (low * stride - padding)

    def stage(self, algorithm: Algorithm, n: int, x_rows: int, y_rows: int, above: int) -> tuple[BoundStage, Workspace]:
        """Return an algorithm for a band, ready to call by torch's number of threads, and its workspace.

        x_rows: that are read.
        y_rows: that are written.
        """
        rows = (y_rows, x_rows) if self.is_transposed else (x_rows, y_rows)
        return _bound(algorithm, self.problem, n, rows, above, torch.get_num_threads())

    def scratch_bytes(self, algorithm: Algorithm, rows: int) -> int:
        """Return the scratch bytes of a call for so many rows."""
        stride, extent = self.problem.stride[0], self.extent
        x_rows = max((rows - extent) // stride + 1, 1) if self.is_transposed else (rows - 1) * stride + extent
        return self.stage(algorithm, 1, x_rows, rows, 0)[1].scratch_bytes

    def prepared_bytes(self, algorithm: Algorithm) -> int:
        """Return the bytes of a prepared filter."""
        return algorithm.workspace(self.problem, 1).prepared_bytes

    def _stage_of(self, algorithm: Algorithm, band: Band) -> BoundStage:
        """Return an algorithm of ours for the band, whose tensors are dense."""
        x, above, reserved = band.xs[0], self.above(band.low, band.starts[0]), band.reserved
        stage, needed = self.stage(algorithm, len(x), x.shape[2], band.high - band.low, above)
        if needed.prepared_bytes > reserved.prepared_bytes or needed.scratch_bytes > reserved.scratch_bytes:
            raise InvalidInputError(f"{algorithm.name} needs {needed} for a band of {self.name}; it has {reserved}")
        return stage

    def compute(self, band: Band) -> None:
        x, out, bias = band.xs[0], band.out, self.bias
        epilogue = Epilogue(self.activation, band.xs[1] if len(band.xs) > 1 else None)
        if band.algorithm is None:
            out.copy_(epilogue.apply(self._by_torch(band)))
            return
        stage, buffers = self._stage_of(band.algorithm, band), (band.prepared, band.scratch)
        if self.is_transposed:
            stage(out.data_ptr(), self.weight.data_ptr(), x.data_ptr(), None, *buffers, None)
            if bias is not None:
                out.add_(for_channels(bias, out))
            epilogue.apply(out)
            return
        does_all = fuses(band.algorithm, self.problem)
        has_epilogue = does_all and (self.activation or epilogue.added is not None)
        addresses = x.data_ptr(), self.weight.data_ptr(), out.data_ptr(), None if bias is None else bias.data_ptr()
        stage(*addresses, *buffers, epilogue if has_epilogue else None)
        if not does_all:
            epilogue.apply(out)

    def _by_torch(self, band: Band) -> Tensor:
        problem, x = self.problem, band.xs[0]
        (_, *columns), height = problem.padding, band.high - band.low
        above = self.above(band.low, band.starts[0])
        if self.is_transposed:
            missing = above + height - ((x.shape[2] - 1) * problem.stride[0] + self.extent)
            transposed = functions.conv_transpose3d if problem.is_volume else functions.conv_transpose2d
            y = transposed(
                x,
                self.weight,
                self.bias,
                stride=problem.stride,
                padding=(0, *columns),
                output_padding=(max(missing, 0), *self.output_padding[1:]),
                groups=problem.groups,
                dilation=problem.dilation,
            )
            return y[:, :, above : above + height]
        is_pixel = x.shape[2:] == self.shape[2:] == self.weight.shape[2:] == (1, 1)
        if is_pixel and problem.groups == 1 and not any(problem.padding):
            return F.linear(x.flatten(1), self.weight.flatten(1), self.bias)[:, :, None, None]
        below = (height - 1) * problem.stride[0] + self.extent - above - x.shape[2]
        padding: Sizes = (0, *columns)
        if height == problem.positions[0] or above == below == problem.padding[0]:
            padding = problem.padding
        elif min(above, below) <= -x.shape[2]:  # none of the rows is read
            x = x.new_zeros(*x.shape[:2], above + x.shape[2] + below, *x.shape[3:])
        elif above or below:
            x = F.pad(x, (*(0, 0) * len(columns), above, below))
        convolve = functions.conv3d if problem.is_volume else functions.conv2d
        return convolve(x, self.weight, self.bias, problem.stride, padding, problem.dilation, problem.groups)

    def steps(self, band: Band) -> list[ProgramStep]:
        if band.algorithm is None:
            return []
        x, out, bias = band.xs[0], band.out, self.bias
        added = band.xs[1] if len(band.xs) > 1 else None
        stage = self._stage_of(band.algorithm, band)
        does_all = fuses(band.algorithm, self.problem) and not self.is_transposed
        if stage.entry is None or not (does_all or are_images(out, added)):
            return []
        addresses = self.weight.data_ptr(), 0 if self.is_transposed else address_of(bias), band.prepared, band.scratch
        reserved = band.reserved.prepared_bytes, band.reserved.scratch_bytes
        convolved = step("convolution", out, x, added if does_all else None, numbers=reserved, addresses=addresses)
        convolved.entry, convolved.stage = stage.entry
        convolved.kept = (stage,)
        if does_all:
            convolved.operation = FUNCTIONS.index(self.activation)
            return [convolved]
        following = []
        if bias is not None and self.is_transposed:
            following.append(elementwise_step(out, out, combination="add", other=for_channels(bias, out)))
        if added is not None:
            following.append(elementwise_step(out, out, self.activation, combination="add", other=added))
        elif self.activation:
            following.append(elementwise_step(out, out, self.activation))
        return [convolved, *following]


@lru_cache(_MOST_STAGES)
def _bound(
    algorithm: Algorithm, problem: ConvProblem, n: int, rows: tuple[int, int], above: int, threads: int
) -> tuple[BoundStage, Workspace]:
    """Return ``algorithm.band`` of these arguments, which depends on torch's number of threads, too."""
    bound = algorithm.band(problem, n, rows, above)
    assert bound is not None  # those that run no bands are not chosen
    return bound


def convolutions_of(operators: Iterable[Operator]) -> dict[int, Convolution]:
    """Return the convolutions among the operators of a graph, by index."""
    return {index: operator for index, operator in enumerate(operators) if isinstance(operator, Convolution)}


_FilterKey: TypeAlias = tuple[int, ConvProblem, str]  # identity of the weight, problem, name of the algorithm


class Filters:
    """The prepared filters that are kept between calls, of all schedules of a model for one input.

    Copies of a convolution in a graph that recomputes its result share one.
    """

    def __init__(self) -> None:
        self._prepared: dict[_FilterKey, tuple[Tensor, Tensor]] = {}  # each with the weight, so that it is alive

    def prepare(self, used: Iterable[tuple[Convolution, Algorithm]]) -> None:
        """Prepare the filters of convolutions for algorithms, as far as they are not known.

        New ones are in one buffer: separately, most would be too small for huge pages.
        """
        by_key = {_filter_key(convolution, algorithm): (convolution, algorithm) for convolution, algorithm in used}
        new = {key: pair for key, pair in by_key.items() if key not in self._prepared}
        sizes = [convolution.prepared_bytes(algorithm) for convolution, algorithm in new.values()]
        buffer, end = lasting_buffer(sum(map(aligned, sizes))), 0
        for (key, (convolution, algorithm)), size in zip(new.items(), sizes, strict=True):
            prepared = buffer[end : end + size]
            algorithm.open(convolution.problem, convolution.weight, prepared)
            # Another thread may have been faster: programs refer to the first one's address.
            self._prepared.setdefault(key, (convolution.weight, prepared))
            end += aligned(size)

    def prepared(self, convolution: Convolution, algorithm: Algorithm) -> Tensor:
        """Return a filter that was prepared."""
        return self._prepared[_filter_key(convolution, algorithm)][1]

    def forget_others(self, used: Iterable[tuple[Convolution, Algorithm]]) -> None:
        """Free the filters that none of these convolutions and algorithms needs."""
        needed = {_filter_key(convolution, algorithm) for convolution, algorithm in used}
        self._prepared = {key: filters for key, filters in self._prepared.items() if key in needed}

    @property
    def nbytes(self) -> int:
        return sum(prepared.nbytes for _, prepared in self._prepared.values())

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what programs in this process refer to."""
        return {"_prepared": {}}


def _filter_key(convolution: Convolution, algorithm: Algorithm) -> _FilterKey:
    return id(convolution.weight), convolution.problem, algorithm.name
