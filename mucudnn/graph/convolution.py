"""Convolutions of bands: by an algorithm of mucudnn that writes the band where it belongs, or by torch."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.graph.operators import Band, Operator
from mucudnn.graph.steps import address_of, are_float, elementwise_step, step
from mucudnn.graph.windows import windows
from mucudnn.kernels.algorithm import Algorithm, BoundStage, Epilogue, Workspace, fuses
from mucudnn.kernels.compiled.library import FUNCTIONS, ProgramStep
from mucudnn.running.workspace import lasting_buffer
from mucudnn.solver.bands import Cut, Reach
from mucudnn.solver.placement import aligned


@dataclass(frozen=True, slots=True)
class Choice:
    """The algorithms of a convolution for all rows at once, and for bands of them; None for torch's own."""

    whole: Algorithm | None = None
    band: Algorithm | None = None


@dataclass(kw_only=True)
class Convolution(Operator):
    """activation(convolution(x) + added), where ``added`` is the second of ``sources``, if there are two.

    problem: of the whole image, FORWARD, or BACKWARD_DATA for a transposed convolution, in channels_last. weight, bias:
    with batch norm folded in. output_padding: rows and columns that a transposed convolution adds. choices:
    algorithms, of each variant of a segment's cut. keeps: whether prepared filters are kept between calls. extent: rows
    from the first to the last that a filter reads.
    """

    problem: ConvProblem
    weight: Tensor
    bias: Tensor | None
    activation: str | None = None
    output_padding: tuple[int, int] = (0, 0)
    choices: tuple[Choice, ...] = (Choice(),)
    keeps: bool = False
    is_transposed: bool = field(init=False)
    extent: int = field(init=False)
    _kept: dict[str, Tensor] = field(default_factory=dict, repr=False)
    _stages: dict[Any, tuple[BoundStage, Workspace]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.is_transposed = self.problem.operation is Operation.BACKWARD_DATA
        self.extent = self.problem.dilation[0] * (self.problem.r - 1) + 1
        self.align = self.problem.stride[0] if self.is_transposed else 1  # with which a transposed filter is prepared

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what refers to addresses in this process."""
        return self.__dict__ | {"_kept": {}, "_stages": {}}

    def reaches(self) -> tuple[Reach, ...]:
        stride, padding, rows = self.problem.stride[0], self.problem.padding[0], np.arange(self.rows)
        if self.is_transposed:
            height = self.problem.y_shape(1)[2]
            first = np.clip((rows + padding - self.extent + 1) // stride, 0, height - 1)
            last = np.clip((rows + padding) // stride + 1, first + 1, height)
        else:
            first, last = windows(self.rows, self.problem.h, stride, padding, self.extent)
        same = [Reach(source, rows, rows + 1) for source in self.sources[1:]]
        return (Reach(self.sources[0], first, last), *same)

    def above(self, low: int, start: int) -> int:
        """Return how many rows of padding are above a band from row ``low`` on, which reads from row ``start`` on."""
        stride, padding = self.problem.stride[0], self.problem.padding[0]
        return padding + low - start * stride if self.is_transposed else start - (low * stride - padding)

    def algorithm(self, cut: Cut) -> Algorithm | None:
        """Return what computes the convolution in a segment that is cut in this way; None for torch's own."""
        choice = self.choices[min(cut.variant, len(self.choices) - 1)]
        return choice.whole if cut.bands == 1 else choice.band

    def stage(self, algorithm: Algorithm, n: int, x_rows: int, y_rows: int, above: int) -> tuple[BoundStage, Workspace]:
        """Return an algorithm for a band, ready to call, and its workspace. x_rows: read, y_rows: written."""
        key = algorithm.name, n, x_rows, y_rows, above, torch.get_num_threads()
        if key not in self._stages:
            rows = (y_rows, x_rows) if self.is_transposed else (x_rows, y_rows)
            made = algorithm.band(self.problem, n, rows, above)
            assert made is not None  # those that run no bands are not chosen
            self._stages[key] = made
        return self._stages[key]

    def prepared_bytes(self, algorithm: Algorithm | None) -> int:
        """Return the bytes of the prepared filter in the workspace: 0 if it is kept."""
        if algorithm is None or self.keeps:
            return 0
        return algorithm.workspace(self.problem, 1).prepared_bytes

    def forget(self, except_for: Container[str] = ()) -> None:
        """Free the prepared filters that are kept, except for those of the named algorithms."""
        for name in [name for name in self._kept if name not in except_for]:
            del self._kept[name]

    def _bound(self, algorithm: Algorithm, band: Band) -> BoundStage:
        """Return an algorithm of ours for the band, whose tensors are dense."""
        x, above = band.xs[0], self.above(band.low, band.starts[0])
        return self.stage(algorithm, len(x), x.shape[2], band.high - band.low, above)[0]

    def compute(self, band: Band) -> None:
        x, out, bias = band.xs[0], band.out, self.bias
        epilogue = Epilogue(self.activation, band.xs[1] if len(band.xs) > 1 else None)
        if band.algorithm is None:
            out.copy_(epilogue.apply(self._by_torch(band)))
            return
        stage, buffers = self._bound(band.algorithm, band), (band.prepared, band.scratch)
        if self.is_transposed:
            stage(out.data_ptr(), self.weight.data_ptr(), x.data_ptr(), None, *buffers, None)
            if bias is not None:
                out.add_(bias.view(1, -1, 1, 1))
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
        (_, columns), height = problem.padding, band.high - band.low
        above = self.above(band.low, band.starts[0])
        if self.is_transposed:
            missing = above + height - ((x.shape[2] - 1) * problem.stride[0] + self.extent)
            return F.conv_transpose2d(
                *(x, self.weight, self.bias, problem.stride, (0, columns)),
                *((max(missing, 0), self.output_padding[1]), problem.groups, problem.dilation),
            )[:, :, above : above + height]
        is_pixel = x.shape[2:] == self.shape[2:] == self.weight.shape[2:] == (1, 1)
        if is_pixel and problem.groups == 1 and not any(problem.padding):
            return F.linear(x.flatten(1), self.weight.flatten(1), self.bias)[:, :, None, None]
        below = (height - 1) * problem.stride[0] + self.extent - above - x.shape[2]
        padding = (0, columns)
        if height == self.rows or above == below == problem.padding[0]:
            padding = problem.padding
        elif above or below:
            x = F.pad(x, (0, 0, above, below))
        return F.conv2d(x, self.weight, self.bias, problem.stride, padding, problem.dilation, problem.groups)

    def steps(self, band: Band) -> list[ProgramStep]:
        if band.algorithm is None:
            return []
        x, out, bias = band.xs[0], band.out, self.bias
        added = band.xs[1] if len(band.xs) > 1 else None
        stage = self._bound(band.algorithm, band)
        does_all = fuses(band.algorithm, self.problem) and not self.is_transposed
        if stage.entry is None or not (does_all or are_float(out, added)):
            return []
        addresses = self.weight.data_ptr(), 0 if self.is_transposed else address_of(bias), band.prepared, band.scratch
        made = [step("convolution", out, x, added if does_all else None, addresses=addresses)]
        made[0].entry, made[0].stage = stage.entry
        if does_all:
            made[0].operation = FUNCTIONS.index(self.activation)
            return made
        if bias is not None and self.is_transposed:
            made.append(elementwise_step(out, out, combination="add", other=bias.view(1, -1, 1, 1)))
        if added is not None:
            made.append(elementwise_step(out, out, self.activation, combination="add", other=added))
        elif self.activation:
            made.append(elementwise_step(out, out, self.activation))
        return made


def keep_filters(used: Iterable[tuple[Convolution, Algorithm]]) -> None:
    """Prepare the filters that are kept between calls, of convolutions with the algorithms that run them.

    Those that are new are in one buffer: separately, most would be too small for huge pages. Copies of a convolution in
    a graph that recomputes its result share one.
    """
    every = {(id(one._kept), algorithm.name): (one, algorithm) for one, algorithm in used if one.keeps}
    new = [(one, algorithm) for one, algorithm in every.values() if algorithm.name not in one._kept]
    sizes = [algorithm.workspace(one.problem, 1).prepared_bytes for one, algorithm in new]
    buffer, end = lasting_buffer(sum(map(aligned, sizes))), 0
    for (one, algorithm), size in zip(new, sizes, strict=True):
        kept = buffer[end : end + size]
        algorithm.open(one.problem, one.weight, kept)
        one._kept.setdefault(algorithm.name, kept)  # programs refer to the first one's address
        end += aligned(size)
