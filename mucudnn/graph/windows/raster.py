"""``run_in_bands``: a model on an image that does not fit into memory, window by window.

A window is a part of the image on which the model runs as if it were the image. A row that an operator computes in a
window is *exact* if it reads the same rows there as in the image, and if all of these are exact. So rows near a border
of the window are not exact, unless it is a border of the image. ``Operator.reaches`` says which rows are read, for the
graph of the image and for that of a window; columns likewise. Only exact pixels of a window's result are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from math import ceil, lcm, prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mucudnn.core.config import Config
from mucudnn.core.errors import InfeasibleError, InvalidInputError
from mucudnn.core.terminal import Progress, progress_of
from mucudnn.core.values import exact_bytes, format_bytes, instance, shown, whole
from mucudnn.graph.capture import NotCapturedError, capture
from mucudnn.graph.fitting import fit
from mucudnn.graph.least import comfortable_bytes
from mucudnn.graph.memory_budget import require_inference
from mucudnn.graph.operators.operator import Barrier, Captured, Input, Local, Moments, Operator, Ref
from mucudnn.graph.operators.windows import Resize
from mucudnn.graph.schedule import Schedule
from mucudnn.graph.windows.fixed_norms import UpToNorm, with_fixed_norms
from mucudnn.measuring.heap import trim_heap
from mucudnn.running.devices import device_of_convolutions
from mucudnn.running.dispatcher import untouched
from mucudnn.tuning.model_state import undisturbed

_SPANS = 192, 960, 1344, 6720, 96, 48, 24  # rows by which two images differ, to compare their graphs
_PARTS = 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024  # windows side by side
_DIMENSIONS = "rows", "columns"
_SAME_WEIGHT = 1e-6  # of interpolation


@dataclass(frozen=True, slots=True)
class Bands:
    """What ``run_in_bands`` did.

    window: rows and columns of the image that the model runs on at once.
    windows: their number, in each pass.
    passes: over the source, one for each norm that needs sums over the image, and one for the result.
    needed_bytes: of activations, workspace, the window, and the rows that are read and written at once.
    work: pixels of all windows over pixels of the image.
    """

    window: tuple[int, int]
    windows: int
    passes: int
    needed_bytes: int
    work: float

    def __str__(self) -> str:
        rows, columns = self.window
        return (
            f"windows of {rows}x{columns} pixels: {self.windows}, with {self.work:.2f} times the pixels of the image; "
            f"passes over the source: {self.passes}; {format_bytes(self.needed_bytes)}"
        )


def run_in_bands(
    model: nn.Module,
    source: Any,
    sink: Any,
    config: Config,
    *,
    shape: Sequence[int] | None = None,
    first_row: int = 0,
    progress: Progress | bool | None = None,
) -> Bands:
    """Run a model on an image that need not fit into memory, within ``config.memory_budget``, and return a summary.

    Apart from rounding, the result is that of the model on the whole image. The budget bounds the activations and the
    workspace, the part of the image on which the model runs, and the rows that are read or written at once. It bounds
    neither parameters nor the memory of the source, of the sink and of planning. For each ``nn.GroupNorm``, and each
    ``nn.InstanceNorm2d`` without running statistics, the source is read once more.

    model: in ``eval()``, on the CPU, with one image as argument and as result.
    source: an array (C, H, W), such as a NumPy memmap, of which parts are read; or a function of ``first_row`` and
        ``last_row`` that returns these rows, (C, last_row - first_row, W), as a tensor or an array. Values are
        converted to the dtype of the model.
    sink: an array (K, P, Q) to write into; or a function of ``first_row`` and an array of the rows of the result from
        there on, (K, rows, Q). It gets all rows in order, and has them when it returns.
    shape: (C, H, W) of a source that is a function.
    first_row: of the result, to go on where an earlier run with the same arguments stopped: as many rows as the sink
        has by then.
    progress: as in ``optimize``; True or False shows or hides it.

    Raises ``InvalidInputError`` if there is no budget, if the arguments do not fit together, and if a result depends on
    the whole image in another way than by a norm; ``InfeasibleError`` with a budget that is enough.
    """
    model, config = instance(nn.Module, model, "model"), instance(Config, config, "config")
    require_inference(model, "run_in_bands")
    if config.memory_budget_bytes is None:
        raise InvalidInputError("run_in_bands needs a memory budget: give mucudnn.Config(memory_budget=...)")
    if (device := device_of_convolutions(model)).type != "cpu":
        raise InvalidInputError(f"run_in_bands is for the CPU, and the model is on {device}")
    shape = _shape_of(source, shape)
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    fixed, passes = with_fixed_norms(model), 0
    with progress_of(progress) as tell, torch.no_grad(), untouched:
        tell("capturing the graph of the image", 0.0)
        whole_image = _geometry(model, shape, dtype)
        result = whole_image.operators[_result(whole_image)[0]].shape[1:]
        first_row = whole(first_row, "first_row", most=result[1])
        if not callable(sink) and _array_shape(sink, "sink") != result:
            raise InvalidInputError(f"the sink has the shape {_array_shape(sink, 'sink')}; the result has {result}")
        while True:
            plan, passes = _planned(fixed, shape, dtype, config, tell, has_rows=callable(source)), passes + 1
            parts = _parts(plan, source, first_row if plan.norm is None else 0, tell)
            if plan.norm is None:
                break
            fixed.norms[plan.norm].settle(part for _, _, part in parts)
        _write(parts, plan, sink, first_row)
    return Bands(plan.window, plan.windows, passes, plan.needed_bytes, plan.work)


def _shape_of(source: Any, shape: Sequence[int] | None) -> tuple[int, int, int]:
    """Return (C, H, W). Raises ``InvalidInputError`` if it is not known, or not that of the source."""
    if not callable(source):
        own_shape = _array_shape(source, "source")
        if shape is not None and tuple(shape) != own_shape:
            raise InvalidInputError(f"shape is {shown(shape)}, and the source has {own_shape}; leave it out")
        shape = own_shape
    if shape is None or len(shape) != 3:
        raise InvalidInputError(
            f"the shape of the source is {shown(shape)}; give an array (C, H, W), or a function of first_row and "
            "last_row and shape=(C, H, W)"
        )
    channels, rows, columns = (whole(size, "shape", 1) for size in shape)
    return channels, rows, columns


def _array_shape(array: Any, name: str) -> tuple[int, ...]:
    if not hasattr(array, "shape"):
        raise InvalidInputError(f"the {name} is {shown(array)}; give an array of three dimensions or a function")
    return tuple(map(int, array.shape))


def _geometry(model: nn.Module, shape: Sequence[int], dtype: torch.dtype) -> Captured:
    """Return the graph of a model for an image of this shape, of which no memory is needed."""
    try:
        return capture(model, (torch.zeros((), dtype=dtype).expand(1, *shape),))
    except NotCapturedError as error:
        raise InvalidInputError(f"the model does not run in windows: {error}") from error


@dataclass(frozen=True, slots=True)
class _Cut:
    """A window along one dimension, from row ``start`` on. Rows ``first`` to ``last`` - 1 of the result are used."""

    start: int
    first: int
    last: int


class _Axis:
    """One dimension of an image, rows (0) or columns (1), and how the rows of all operators follow from its own.

    size: of the image.
    captured: the graph of an image of this size, of few rows in the other dimension.
    image: its operators.
    rates: rows of each operator's result for a row of the image.
    period: windows begin at multiples of it.
    halo: about how many rows of a window are not exact, if it touches no border of the image.
    """

    def __init__(self, dim: int, image: Captured, smaller: Captured) -> None:
        """Compare the operators of the image with those of a smaller one.

        Raises ``InvalidInputError`` if the result depends on the whole image.
        """
        self.dim, self.captured, self.image = dim, image, image.operators
        if list(map(type, self.image)) != list(map(type, smaller.operators)):
            raise InvalidInputError("the model has other operators for images of other sizes, so windows would, too")
        lengths, of_smaller = self.lengths(self.image), self.lengths(smaller.operators)
        source = next(index for index, operator in enumerate(self.image) if isinstance(operator, Input))
        self.size = lengths[source]
        span = self.size - of_smaller[source]
        self.rates = [Fraction(one - other, span or 1) for one, other in zip(lengths, of_smaller, strict=True)]
        self.period = lcm(*(rate.denominator for rate in self.rates))
        self.halo = self._halo(smaller.operators, _result(image)[0])

    @classmethod
    def of(cls, dim: int, model: nn.Module, shape: Sequence[int], dtype: torch.dtype) -> _Axis:
        """Return a dimension of a model's image of this shape, (C, H, W).

        The graphs are those of images that are narrow in the other dimension: of the whole image, tensors may have
        more elements than a ``ConvProblem``.

        Raises ``InvalidInputError`` if the result depends on the whole image.
        """
        size, other = shape[1 + dim], shape[2 - dim]
        refusals = list[InvalidInputError]()
        for span in [span for span in _SPANS if 2 * span <= size] or [0]:
            narrow = span + other % span if 0 < span <= other else other
            sizes = [(rows, narrow) if dim == 0 else (narrow, rows) for rows in (size, size - span)]
            try:
                return cls(dim, *(_geometry(model, (shape[0], *each), dtype) for each in sizes))
            except InvalidInputError as error:  # also where the strides of the model do not divide the span
                refusals.append(error)
        raise refusals[0]

    def lengths(self, operators: Sequence[Operator]) -> list[int]:
        """Return the rows of each operator's result; 0 if it is no image."""
        return [operator.shape[2 + self.dim] if len(operator.shape) == 4 else 0 for operator in operators]

    def exact(self, window: Sequence[Operator], start: int) -> list[NDArray[np.bool_]]:
        """Return which rows of each operator's result in a window are exact: (rows,) for each operator.

        window: the operators of a window, which begins at row ``start`` of the image.
        """
        exact: list[NDArray[np.bool_]] = []
        shifts = [int(start * rate) for rate in self.rates]
        lengths = zip(self.lengths(window), self.lengths(self.image), strict=True)
        for index, (operator, (length, most)) in enumerate(zip(window, lengths, strict=True)):
            in_image, places = self.image[index], np.arange(length) + shifts[index]
            same, places = places < most, np.minimum(places, most - 1)
            if isinstance(operator, Barrier | Moments) or _depends_on_place(operator, self.dim):
                same[:] = False
            elif operator.sources:
                for reach, of_image in zip(operator.reaches(self.dim), in_image.reaches(self.dim), strict=True):
                    shift, counts = shifts[reach.source], np.concatenate(([0], exact[reach.source].cumsum()))
                    known = counts.take(reach.last, mode="clip") - counts.take(reach.first, mode="clip")
                    same &= (reach.first + shift == of_image.first[places]) & (known == reach.last - reach.first)
                    same &= reach.last + shift == of_image.last[places]
            if isinstance(operator, Resize) and isinstance(in_image, Resize):
                weights, of_image_weights = (each.neighbors(self.dim)[2] for each in (operator, in_image))
                same &= np.isclose(weights, of_image_weights[places], rtol=0, atol=_SAME_WEIGHT)
            if not all(exact[whole].all() and len(exact[whole]) for whole in operator.wholes):
                same[:] = False
            exact.append(same)
        return exact

    def cuts(self, window: Sequence[Operator], result: int) -> list[_Cut] | None:
        """Return windows whose exact rows together are all rows of the result; None if a window has too few.

        window: the operators of a window of this size.
        result: the index of the operator that computes the result.
        """
        extent, rows = self.lengths(window)[0], self.lengths(self.image)[result]
        last_start, rate = self.size - extent, self.rates[result]
        if last_start == 0:
            return [_Cut(0, 0, rows)]
        inner = self.exact(window, last_start // self.period // 2 * self.period)[result]
        margin, cuts, start, first = int(inner.argmax()), list[_Cut](), 0, 0
        while first < rows:
            exact, shift = self.exact(window, start)[result], int(start * rate)
            owned = exact[first - shift :]
            last = first + (len(owned) if owned.all() else int(owned.argmin()))
            if last == first or not inner.any():
                return None
            cuts.append(_Cut(start, first, last))
            following = int((last - margin) / rate) // self.period * self.period
            start, first = max(0, min(following, last_start)), last
        return cuts

    def _halo(self, window: Sequence[Operator], result: int) -> int:
        """Return about how many rows of a window are not exact, at both of its borders together."""
        last_start, lost = self.size - self.lengths(window)[0], 0
        for start in {0, last_start // self.period // 2 * self.period, last_start} if last_start else ():
            exact = self.exact(window, start)
            if not exact[result].any():
                first = next(index for index, rows in enumerate(exact) if len(rows) and not rows.any())
                raise InvalidInputError(
                    f"the result depends on {_DIMENSIONS[self.dim]} of the whole image, through {window[first].name}: "
                    "run the model on the whole image, with mucudnn.optimize and a memory budget"
                )
            lost = max(lost, int((~exact[result]).sum()))
        return ceil(lost / self.rates[result]) + 2 * self.period

    def extents(self) -> list[tuple[int, int]]:
        """Return sizes of windows, from the largest, each with the approximate number of windows of that size."""
        if not self.halo:
            return [(self.size, 1)]
        extents = dict[int, int]()
        for parts in _PARTS:
            least = self.size if parts == 1 else min(self.size // parts + self.halo, self.size)
            extents.setdefault(self.size - (self.size - least) // self.period * self.period, parts)
        return [*extents.items()]


def _depends_on_place(operator: Operator, dim: int) -> bool:
    """Return whether an operator combines rows with those of a constant, such as coordinates."""
    if not isinstance(operator, Local):
        return False
    constants = (leaf for leaf in tree_leaves((operator.args, operator.kwargs)) if isinstance(leaf, Tensor))
    return any(constant.dim() >= 2 - dim and constant.shape[dim - 2] > 1 for constant in constants)


@dataclass(frozen=True)
class _Plan:
    """How a pass runs: windows of one shape, each by the same schedule.

    cuts: of rows, and of columns.
    rates: rows, and columns, of the result for one of the image.
    norm: the number of the norm of which it is the pass; None for the pass of the result.
    shape: of the image, (C, H, W).
    result: (K, P, Q).
    """

    schedule: Schedule
    window: tuple[int, int]
    cuts: tuple[Sequence[_Cut], Sequence[_Cut]]
    rates: tuple[Fraction, Fraction]
    norm: int | None
    shape: tuple[int, int, int]
    result: tuple[int, int, int]
    dtype: torch.dtype
    needed_bytes: int

    @property
    def windows(self) -> int:
        return prod(map(len, self.cuts))

    @property
    def work(self) -> float:
        return self.windows * prod(self.window) / prod(self.shape[1:])


def _planned(
    model: UpToNorm, shape: tuple[int, int, int], dtype: torch.dtype, config: Config, tell: Progress, *, has_rows: bool
) -> _Plan:
    """Return the plan with the fewest pixels in its windows, within the budget.

    has_rows: whether the source gives all columns of the rows of a window.
    """
    channels, _, columns = shape
    axes = [_Axis.of(dim, model, shape, dtype) for dim in (0, 1)]
    result, norm = _result(axes[0].captured)
    k, p = axes[0].image[result].shape[1:3]
    q = axes[1].image[result].shape[3]

    # Windows, from those with the fewest pixels altogether
    def outside_bytes(h: int, w: int) -> int:
        """Return the bytes of a window, of its result, and of the rows that are read and written at once."""
        y_rows, y_columns = (ceil(size * axis.rates[result]) for size, axis in zip((h, w), axes, strict=True))
        read, written = channels * h * (w + columns * has_rows), k * y_rows * (y_columns + q * (norm is None))
        return (read + written) * dtype.itemsize

    budget, column_bytes = config.memory_budget_bytes, 0.0
    assert budget is not None
    candidates = [*product(*(axis.extents() for axis in axes))]
    for (h, _), (w, _) in sorted(candidates, key=lambda sizes: prod(map(prod, sizes))):
        within = budget - outside_bytes(h, w)
        if within < column_bytes * w:
            continue
        window = _geometry(model, (channels, h, w), dtype)
        cuts = [axis.cuts(window.operators, result) for axis in axes]
        needed_bytes = comfortable_bytes(window, config)
        trim_heap()  # counting has freed much
        if needed_bytes > within:
            column_bytes = needed_bytes / w
        elif cuts[0] and cuts[1]:
            with undisturbed(model):
                zeros = torch.zeros(1, channels, h, w, dtype=dtype)
                fitted = fit(model, (zeros,), replace(config, memory_budget=within), tell, is_large=True)
            trim_heap()
            return _Plan(
                fitted.schedule,
                (h, w),
                (cuts[0], cuts[1]),
                (axes[0].rates[result], axes[1].rates[result]),
                norm,
                shape,
                (k, p, q),
                dtype,
                outside_bytes(h, w) + fitted.needed_bytes,
            )
    h, w = (min(axis.extents())[0] for axis in axes)
    least = outside_bytes(h, w) + comfortable_bytes(_geometry(model, (channels, h, w), dtype), config)
    raise InfeasibleError(
        f"the memory budget is {exact_bytes(budget)}; in windows of {h}x{w} pixels the model needs about "
        f"{exact_bytes(least)}",
        least,
    )


def _result(image: Captured) -> tuple[int, int | None]:
    """Return the operator that computes the result, and the number of the norm that reads it, if one does."""
    first, *others = image.results
    if not isinstance(first, Ref) or len(image.operators[first.index].shape) != 4 or any(map(_is_tensor, others)):
        raise InvalidInputError("run_in_bands is for models of which the result is one image, (1, K, P, Q)")
    return first.index, others[0] if others else None


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Ref | Tensor)


# Running


def _parts(plan: _Plan, source: Any, first_row: int, tell: Progress) -> Iterator[tuple[_Cut, _Cut, Tensor]]:
    """Yield what each window has of the result, (1, K, rows, columns), with the cuts of its rows and columns."""
    (h, w), (channels, _, columns) = plan.window, plan.shape
    image, done = torch.empty(1, channels, h, w, dtype=plan.dtype), 0
    for row in plan.cuts[0]:
        if row.last <= first_row:
            done += len(plan.cuts[1])
            continue
        rows = _tensor(source(row.start, row.start + h)) if callable(source) else None
        if rows is not None and rows.shape != (channels, h, columns):
            raise InvalidInputError(
                f"source({row.start}, {row.start + h}) returned an array of shape {tuple(rows.shape)}; it must be "
                f"{(channels, h, columns)}"
            )
        for column in plan.cuts[1]:
            tell(f"window {done + 1} of {plan.windows}", done / plan.windows)
            across = slice(column.start, column.start + w)
            part = _tensor(source[:, row.start : row.start + h, across]) if rows is None else rows[:, :, across]
            image.copy_(part)
            y: Tensor = tree_leaves(plan.schedule.run((image,)))[0]
            first, left = (int(cut.start * rate) for cut, rate in zip((row, column), plan.rates, strict=True))
            yield row, column, y[:, :, row.first - first : row.last - first, column.first - left : column.last - left]
            done += 1


def _tensor(values: Any) -> Tensor:
    return values if isinstance(values, Tensor) else torch.from_numpy(np.array(values))


def _write(parts: Iterable[tuple[_Cut, _Cut, Tensor]], plan: _Plan, sink: Any, first_row: int) -> None:
    """Give the rows of the result to the sink, as soon as all of their columns are known."""
    (k, _, q), is_double = plan.result, plan.dtype == torch.float64
    dtype = torch.float64 if is_double else torch.float32  # NumPy has no bfloat16
    rows = torch.empty(0)
    for row, column, part in parts:
        first = max(row.first, first_row)
        if column.first == 0:
            rows = torch.empty(k, row.last - first, q, dtype=dtype)
        rows[:, :, column.first : column.last] = part[0, :, first - row.first :]
        if column.last < q:
            continue
        if callable(sink):
            sink(first, rows.numpy())
        else:
            sink[:, first : row.last] = rows.numpy()
        rows = torch.empty(0)  # before there are others
