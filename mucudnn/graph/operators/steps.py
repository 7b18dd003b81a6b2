"""Steps of programs in C++ (kernels/compiled/program): each computes a band of an operator, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from mucudnn.kernels.compiled.library import (
    COMBINATIONS,
    ELEMENTS,
    FUNCTIONS,
    STEPS,
    Place,
    ProgramStep,
    View,
    function,
    loaded_build,
)
from mucudnn.measuring.load import most_threads

_COMPUTED = {torch.float32, torch.bfloat16, torch.float16}


def is_available() -> bool:
    """Return whether there is a C++ build that runs programs."""
    return loaded_build().library is not None


def array_of(steps: Sequence[ProgramStep]) -> Any:
    return (ProgramStep * len(steps))(*steps)


def run_array(array: Any, bases: Any) -> None:
    """Run steps one after another. bases: an array of the addresses to which their places refer.

    They run with torch's number of threads, or with as many as there are processors for them.
    """
    function("program_run")(array, len(array), bases, int(min(torch.get_num_threads(), most_threads())))


@contextmanager
def threads_limited(count: int) -> Iterator[None]:
    """Context in which this thread's operators have ``count`` threads.

    Unlike ``torch.set_num_threads``, this leaves other threads and the cached primitives of oneDNN as they are.
    """
    before = torch.get_num_threads()
    function("set_threads")(count)
    try:
        yield
    finally:
        function("set_threads")(before)


def step(
    kind: str,
    out: Tensor,
    x: Tensor,
    other: Tensor | None = None,
    *,
    combination: str | None = None,
    numbers: Sequence[int] = (),
    values: tuple[float, float] = (1.0, 0.0),
    addresses: Sequence[int] = (),
    tables: Sequence[NDArray[Any]] = (),
) -> ProgramStep:
    """Return a step. addresses: of other operands. tables: which the step's ``kept`` holds."""
    made = ProgramStep(kind=STEPS.index(kind), operation=COMBINATIONS.index(combination), out=_view(out), x=_view(x))
    if other is not None:
        made.other = _view(other)
    made.numbers[: len(numbers)] = [int(number) for number in numbers]
    made.values[:] = values
    made.places[: len(addresses)] = [Place(0, address) for address in addresses]
    made.tables[: len(tables)] = [table.ctypes.data for table in tables]
    made.kept = tables
    return made


def elementwise_step(
    out: Tensor,
    x: Tensor,
    function: str | None = None,
    values: tuple[float, float] = (1.0, 0.0),
    *,
    combination: str | None = None,
    other: Tensor | None = None,
) -> ProgramStep:
    """Return a step that computes a function of x, combined with ``other``, which is repeated to the size of x."""
    other = None if other is None else other.expand(out.shape)
    numbers = (FUNCTIONS.index(function),)
    return step("elementwise", out, x, other, combination=combination, numbers=numbers, values=values)


def copy_step(to: Tensor, source: Tensor) -> ProgramStep:
    """Return a step that copies a tensor into another of the same shape, of any strides."""
    return step("copy", to, source, numbers=(to.itemsize,))


def address_of(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def has_rows(tensor: Tensor) -> bool:
    """Return whether each frame of volumes, (N, C, D, H, W), can be viewed as one row of H * W columns."""
    *_, height, width = tensor.shape
    return tensor.dim() < 5 or 1 in (height, width) or tensor.stride(3) == width * tensor.stride(4)


def _in_rows(tensor: Tensor) -> Tensor:
    return tensor.view(*tensor.shape[:3], -1) if tensor.dim() == 5 else tensor


def _view(tensor: Tensor) -> View:
    rows = _in_rows(tensor)
    element = ELEMENTS.get(str(rows.dtype).removeprefix("torch."), 0)
    return View(Place(0, rows.data_ptr()), element, *rows.shape, *rows.stride())


def are_images(*tensors: Tensor | None) -> bool:
    """Return whether steps compute these tensors: all in float32, or all in one half precision, with dense rows.

    Frames of volumes are rows.
    """
    every = [tensor for tensor in tensors if tensor is not None and tensor.dim() in (4, 5)]
    dtypes = {tensor.dtype for tensor in every}
    return len(dtypes) == 1 and dtypes <= _COMPUTED and all(map(has_rows, every)) and all(map(_is_dense, every))


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the rows of images are columns of contiguous channels."""
    rows = _in_rows(tensor)
    return (rows.stride(1) == 1 or rows.shape[1] == 1) and (rows.stride(-1) == rows.shape[1] or rows.shape[-1] == 1)


def places(of: ProgramStep) -> list[Place]:
    """Return all places of a step, which are addresses until a program makes them relative."""
    return [of.out.place, of.x.place, of.other.place, *of.places]
