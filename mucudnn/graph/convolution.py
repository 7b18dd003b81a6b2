"""Convolutions of bands: by an algorithm of mucudnn that writes the band where it belongs, or by torch."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.graph.operators import Band, Operator
from mucudnn.graph.windows import windows
from mucudnn.kernels.algorithm import Algorithm, BoundStage, Epilogue, Workspace, fuses
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
    algorithms, of each variant of a segment's cut. keeps: whether prepared filters are kept between calls.
    """

    problem: ConvProblem
    weight: Tensor
    bias: Tensor | None
    activation: str | None = None
    output_padding: tuple[int, int] = (0, 0)
    choices: tuple[Choice, ...] = (Choice(),)
    keeps: bool = False
    _kept: dict[str, Tensor] = field(default_factory=dict, repr=False)
    _stages: dict[Any, tuple[BoundStage, Workspace]] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what refers to addresses in this process."""
        return self.__dict__ | {"_kept": {}, "_stages": {}}

    @property
    def is_transposed(self) -> bool:
        return self.problem.operation is Operation.BACKWARD_DATA

    @property
    def align(self) -> int:
        """Multiple at which bands begin: the stride of a transposed convolution, with which its filter is prepared."""
        return self.problem.stride[0] if self.is_transposed else 1

    @property
    def extent(self) -> int:
        return self.problem.dilation[0] * (self.problem.r - 1) + 1

    def reaches(self, heights: Sequence[int]) -> tuple[Reach, ...]:
        stride, padding, rows = self.problem.stride[0], self.problem.padding[0], np.arange(self.rows)
        if self.is_transposed:
            first = np.clip((rows + padding - self.extent + 1) // stride, 0, heights[0] - 1)
            last = np.clip((rows + padding) // stride + 1, first + 1, heights[0])
        else:
            first, last = windows(self.rows, heights[0], stride, padding, self.extent)
        same = [Reach(source, rows, rows + 1) for source in self.sources[1:]]
        return (Reach(self.sources[0], first, last), *same)

    def above(self, band: Band) -> int:
        """Return how many rows of padding are above the band's input."""
        stride, padding = self.problem.stride[0], self.problem.padding[0]
        if self.is_transposed:
            return padding + band.low - band.starts[0] * stride
        return band.starts[0] - (band.low * stride - padding)

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

    def prepared(self, algorithm: Algorithm, buffer: Tensor) -> Tensor:
        """Return the filter prepared for all bands, in the buffer, 1-D uint8, or kept from an earlier call."""
        if self.keeps:
            return self._kept[algorithm.name]
        algorithm.open(self.problem, self.weight, buffer)
        return buffer

    def forget(self, except_for: Container[str] = ()) -> None:
        """Free the prepared filters that are kept, except for those of the named algorithms."""
        for name in [name for name in self._kept if name not in except_for]:
            del self._kept[name]

    def compute_ours(self, algorithm: Algorithm, band: Band, prepared: int, scratch: int) -> None:
        """Compute a band, whose tensors are dense, by an algorithm. prepared, scratch: addresses of buffers."""
        x, out = band.xs[0], band.out
        stage, _ = self.stage(algorithm, len(x), x.shape[2], band.high - band.low, self.above(band))
        addresses = x.data_ptr(), self.weight.data_ptr(), out.data_ptr()
        bias = None if self.bias is None else self.bias.data_ptr()
        if self.is_transposed:
            stage(out.data_ptr(), self.weight.data_ptr(), x.data_ptr(), None, prepared, scratch, None)
            if self.bias is not None:
                out.add_(self.bias.view(1, -1, 1, 1))
        elif fuses(algorithm, self.problem):
            has_epilogue = self.activation or len(band.xs) > 1
            stage(*addresses, bias, prepared, scratch, self._epilogue(band) if has_epilogue else None)
            return
        else:
            stage(*addresses, bias, prepared, scratch, None)
        self._epilogue(band).apply(out)

    def _epilogue(self, band: Band) -> Epilogue:
        return Epilogue(self.activation, band.xs[1] if len(band.xs) > 1 else None)

    def compute(self, band: Band) -> None:
        """Compute a band by torch."""
        problem, x = self.problem, band.xs[0]
        (_, columns), height = problem.padding, band.high - band.low
        if self.is_transposed:
            skipped = self.above(band)
            missing = skipped + height - ((x.shape[2] - 1) * problem.stride[0] + self.extent)
            y = F.conv_transpose2d(
                *(x, self.weight, self.bias, problem.stride, (0, columns)),
                *((max(missing, 0), self.output_padding[1]), problem.groups, problem.dilation),
            )[:, :, skipped : skipped + height]
        elif (
            x.shape[2:] == self.shape[2:] == self.weight.shape[2:] == (1, 1)
            and problem.groups == 1
            and not any(problem.padding)
        ):
            y = F.linear(x.flatten(1), self.weight.flatten(1), self.bias)[:, :, None, None]
        else:
            above = self.above(band)
            below = (height - 1) * problem.stride[0] + self.extent - above - x.shape[2]
            padding = (0, columns)
            if height == self.rows or above == below == problem.padding[0]:
                padding = problem.padding
            elif above or below:
                x = F.pad(x, (0, 0, above, below))
            y = F.conv2d(x, self.weight, self.bias, problem.stride, padding, problem.dilation, problem.groups)
        band.out.copy_(self._epilogue(band).apply(y))


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
