"""Steps of programs in C++ (kernels/compiled/program): what computes a band of each operator, without torch.

Operators in float32 have steps, copies in every dtype. What has none is computed by torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import singledispatch
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mucudnn.graph.convolution import Convolution
from mucudnn.graph.operators import (
    Band,
    Concatenation,
    Copy,
    Local,
    Moments,
    Normalization,
    Operand,
    Operator,
    Scale,
    Shuffle,
    aten,
)
from mucudnn.graph.windows import AveragePool, MaxPool, Resize
from mucudnn.kernels.algorithm import Algorithm, fuses
from mucudnn.kernels.compiled.library import (
    ACTIVATIONS,
    COMBINATIONS,
    FUNCTIONS,
    STEPS,
    Place,
    ProgramStep,
    View,
    library,
    loaded_build,
)

_COUNTS_PADDING, _COUNTS_IMAGE = 0, -1
_FUNCTION_OF = {
    aten.relu.default: "ReLU",
    aten.relu6.default: "ReLU6",
    aten.silu.default: "SiLU",
    aten.sigmoid.default: "sigmoid",
    aten.hardsigmoid.default: "hardsigmoid",
    aten.hardswish.default: "hardswish",
    aten.leaky_relu.default: "leaky_relu",
}


def is_available() -> bool:
    """Return whether there is a C++ build that runs programs."""
    return loaded_build().library is not None


def run_steps(steps: Sequence[ProgramStep], bases: Any) -> None:
    """Run steps one after another. bases: an array of the addresses to which their places refer."""
    run_array(ctypes.addressof(array := array_of(steps)), len(array), bases)


def run_array(address: int, count: int, bases: Any) -> None:
    """Run the steps of an array in memory."""
    library().mucudnn_program_run(address, count, bases, torch.get_num_threads())


def array_of(steps: Sequence[ProgramStep]) -> Any:
    return (ProgramStep * len(steps))(*steps)


def copy_step(to: Tensor, source: Tensor) -> ProgramStep:
    """Return a step that copies a tensor into another of the same shape, of any strides."""
    return _step("copy", to, source, numbers=(to.itemsize,))


def convolution_steps(
    one: Convolution, algorithm: Algorithm, band: Band, prepared: int, scratch: int
) -> list[ProgramStep]:
    """Return the steps of a convolution by an algorithm of ours; none if Python must call it."""
    x, out = band.xs[0], band.out
    added = band.xs[1] if len(band.xs) > 1 else None
    stage, _ = one.stage(algorithm, len(x), x.shape[2], band.high - band.low, one.above(band))
    if stage.entry is None:
        return []
    activation = ACTIVATIONS.index(one.activation)
    bias = 0 if one.bias is None else one.bias.data_ptr()
    does_all = fuses(algorithm, one.problem) and not one.is_transposed
    takes_bias = not one.is_transposed
    made = _step("convolution", out, x, added if does_all else None)
    made.operation = activation if does_all else 0
    made.entry, made.stage = stage.entry
    addresses = one.weight.data_ptr(), bias if takes_bias else 0, prepared, scratch
    made.places[:] = [Place(0, address) for address in addresses]
    if does_all:
        return [made]
    if not _is_float(out, *([] if added is None else [added])):
        return []
    steps = [made]
    if one.bias is not None and not takes_bias:
        steps.append(_step("elementwise", out, out, _repeated(one.bias.view(1, -1, 1, 1), out), combination="add"))
    if added is not None or activation:
        steps.append(_elementwise(out, out, added, None if added is None else "add", one.activation))
    return steps


@singledispatch
def steps_of(one: Operator, band: Band) -> list[ProgramStep]:
    """Return the steps that compute a band; none if torch must."""
    return []


@steps_of.register
def _(one: Copy, band: Band) -> list[ProgramStep]:
    return [copy_step(band.out, band.xs[0][:, one.channels])]


@steps_of.register
def _(one: Concatenation, band: Band) -> list[ProgramStep]:
    starts = np.concatenate(([0], np.cumsum(one.widths))).tolist()
    return [
        copy_step(band.out[:, start : start + width], band.xs[position])
        for start, width, position in zip(starts, one.widths, one.order, strict=False)
    ]


@steps_of.register
def _(one: Local, band: Band) -> list[ProgramStep]:
    if not _is_float(band.out, *band.xs):
        return []
    function = _FUNCTION_OF.get(one.target)
    if one.target is aten.hardtanh.default and list(one.args[1:]) == [0.0, 6.0]:
        function = "ReLU6"
    if function is not None:
        slope = one.args[1] if function == "leaky_relu" and len(one.args) > 1 else 0.01
        values = (slope, 0.0) if function == "leaky_relu" else (1.0, 0.0)
        return [_elementwise(band.out, band.xs[0], None, None, function, values)]
    if one.target in (aten.add.Tensor, aten.mul.Tensor) and not one.kwargs and len(one.args) == 2:
        return _sum_or_product(one, band)
    return []


def _sum_or_product(one: Local, band: Band) -> list[ProgramStep]:
    combination = "add" if one.target is aten.add.Tensor else "multiply"
    first, second = (_operand(one, value, band) for value in one.args)
    if not isinstance(first, Tensor) or first.shape != band.out.shape:
        first, second = second, first
    if not isinstance(first, Tensor) or first.shape != band.out.shape:
        return []
    if isinstance(second, (int, float)):
        values = (1.0, float(second)) if combination == "add" else (float(second), 0.0)
        return [_elementwise(band.out, first, None, None, None, values)]
    if not isinstance(second, Tensor) or not _is_float(second):
        return []
    if second.shape == band.out.shape:
        return [_elementwise(band.out, first, second, combination, None)]
    if second.dim() == 4 and second.shape[1] == band.out.shape[1] and second.shape[2:] == (1, 1):
        return [_step("elementwise", band.out, first, _repeated(second, band.out), combination=combination)]
    return []


def _operand(one: Local, value: Any, band: Band) -> Any:
    """Return a tensor operand that has rows or is a number for each channel of a sample; None for others."""
    if not isinstance(value, Operand):
        return value
    if isinstance(value.value, int) and value.has_rows:
        return band.xs[one.sources.index(value.value)]
    if value.has_rows:
        return None
    tensor = band.wholes[value.value] if isinstance(value.value, int) else value.value
    return tensor[band.samples] if value.has_samples else tensor


@steps_of.register
def _(one: MaxPool, band: Band) -> list[ProgramStep]:
    if not _is_float(band.out, band.xs[0]):
        return []
    top = band.low * one.stride[0] - one.padding[0] - band.starts[0]
    numbers = *one.kernel, *one.stride, *one.dilation, top, -one.padding[1]
    return [_step("max_pool", band.out, band.xs[0], numbers=numbers)]


@steps_of.register
def _(one: AveragePool, band: Band) -> list[ProgramStep]:
    if not _is_float(band.out, band.xs[0]):
        return []
    top = band.low * one.stride[0] - one.padding[0] - band.starts[0]
    divisor = one.divisor or (_COUNTS_PADDING if one.counts_padding else _COUNTS_IMAGE)
    height = one.height - band.starts[0]
    numbers = *one.kernel, *one.stride, 1, 1, top, -one.padding[1], height, *one.padding, divisor
    return [_step("average_pool", band.out, band.xs[0], numbers=numbers)]


@steps_of.register
def _(one: Resize, band: Band) -> list[ProgramStep]:
    if not _is_float(band.out, band.xs[0]):
        return []
    rows = slice(band.low, band.high)
    above, below = (np.ascontiguousarray(some[rows] - band.starts[0]) for some in (one.above, one.below))
    left, right, weights_w = one.columns(band.xs[0].shape[3])
    tables = above, below, one.weights[rows].astype(np.float32), left, right, weights_w.astype(np.float32)
    made = _step("resize", band.out, band.xs[0], numbers=(one.mode == "bilinear",))
    made.tables[:] = [table.ctypes.data for table in tables]
    made.kept = tables
    return [made]


@steps_of.register
def _(one: Shuffle, band: Band) -> list[ProgramStep]:
    if one.factor < 0 or not _is_float(band.out, band.xs[0]):
        return []
    return [_step("shuffle", band.out, band.xs[0], numbers=(one.factor, band.low - band.starts[0] * one.factor))]


@steps_of.register
def _(one: Moments, band: Band) -> list[ProgramStep]:
    if not _is_float(band.xs[0]):
        return []
    made = _step("moments", band.xs[0], band.xs[0], numbers=(one.groups,))
    made.out.place = Place(0, band.out[band.samples].data_ptr())
    return [made]


@steps_of.register
def _(one: Normalization, band: Band) -> list[ProgramStep]:
    affine = [tensor for tensor in (one.weight, one.bias) if tensor is not None]
    if not _is_float(band.out, *band.xs) or any(tensor.dtype != torch.float32 for tensor in affine):
        return []
    totals, (_, channels, height, width) = band.wholes[one.wholes[0]][band.samples], one.shape
    groups = totals.shape[1]
    count = channels // groups * height * width
    made = _step("normalize", band.out, band.xs[0], numbers=(FUNCTIONS.index(one.activation), groups, count))
    made.places[:3] = [_place(totals), *(_place(tensor) for tensor in (one.weight, one.bias))]
    made.values[0] = one.eps
    return [made]


@steps_of.register
def _(one: Scale, band: Band) -> list[ProgramStep]:
    if not _is_float(band.out, *band.xs):
        return []
    made = _step("scale", band.out, band.xs[0], numbers=(FUNCTIONS.index(one.activation),))
    made.places[:2] = [_place(one.factor), _place(one.addend)]
    return [made]


def _elementwise(
    out: Tensor,
    x: Tensor,
    other: Tensor | None,
    combination: str | None,
    function: str | None,
    values: tuple[float, float] = (1.0, 0.0),
) -> ProgramStep:
    numbers = (FUNCTIONS.index(function),)
    return _step("elementwise", out, x, other, combination=combination, numbers=numbers, values=values)


def _step(
    kind: str,
    out: Tensor,
    x: Tensor,
    other: Tensor | None = None,
    *,
    combination: str | None = None,
    numbers: Sequence[int] = (),
    values: tuple[float, float] = (1.0, 0.0),
) -> ProgramStep:
    made = ProgramStep(kind=STEPS.index(kind), operation=COMBINATIONS.index(combination), out=_view(out), x=_view(x))
    if other is not None:
        made.other = _view(other)
    made.numbers[: len(numbers)] = [int(number) for number in numbers]
    made.values[:] = values
    return made


def _view(tensor: Tensor) -> View:
    return View(_place(tensor), *tensor.shape, *tensor.stride())


def _place(tensor: Tensor | None) -> Place:
    return Place(0, 0 if tensor is None else tensor.data_ptr())


def _repeated(numbers: Tensor, out: Tensor) -> Tensor:
    """Return a number for each channel (of a sample) as if it were an image of the size of ``out``."""
    return numbers.expand(out.shape)


def _is_float(*tensors: Tensor) -> bool:
    """Return whether tensors are in float32, and their rows are columns of contiguous channels."""
    return all(
        tensor.dtype == torch.float32
        and (tensor.stride(1) == 1 or tensor.shape[1] == 1)
        and (tensor.stride(-1) == tensor.shape[1] or tensor.shape[-1] == 1)
        for tensor in tensors
        if tensor.dim() == 4
    )


def perform(one: Operator, band: Band) -> None:
    """Compute a band by steps in C++ if there are any, otherwise by torch."""
    made = steps_of(one, band) if one.device.type == "cpu" and is_available() else []
    if made:
        run_steps(made, (ctypes.c_void_p * 1)())
    else:
        one.compute(band)


def places(step: ProgramStep) -> list[Place]:
    """Return all places of a step, which are addresses until a program makes them relative."""
    return [step.out.place, step.x.place, step.other.place, *step.places]
