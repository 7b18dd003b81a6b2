"""Problems: one operation of one convolution, without the batch size, independent of torch and devices."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from math import prod

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.values import member, settle, shown, sizes, whole


class Operation(StrEnum):
    """The three convolutions of a layer: the result y, and the gradients dx and dw."""

    FORWARD = "forward"
    BACKWARD_DATA = "backward_data"
    BACKWARD_FILTER = "backward_filter"


class MemoryFormat(StrEnum):
    """Order of activations and filters in memory: NCHW/KCRS or NHWC/KRSC; of volumes, NCDHW/KCTRS or NDHWC/KTRSC."""

    CONTIGUOUS = "contiguous"
    CHANNELS_LAST = "channels_last"


ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
MOST_ELEMENTS = 2**31 - 1  # limit for an operand of a kernel: libraries, and some of our loops, index with 32 bits
MOST_SAMPLES = 2**20  # limit for a mini-batch: solving for all sizes up to it takes about a minute and 1 GiB
Pair = tuple[int, int]
Sizes = tuple[int, ...]  # one for each spatial dimension: (height, width), or (depth, height, width)

_SIZES = ("c", "h", "w", "k", "r", "s", "groups")
_STEPS = {"stride": 1, "padding": 0, "dilation": 1}  # with the least value of each, which is the default


@dataclass(frozen=True, slots=True, order=True)
class ConvProblem:
    """One operation of one layer geometry, on images or on volumes. All sizes are in elements.

    x: (N, C, H, W), w: (K, C // groups, R, S), y: (N, K, P, Q); stride, padding and dilation are (height, width).

    Of volumes, or clips of frames, which have a depth: x: (N, C, D, H, W), w: (K, C // groups, T, R, S),
    y: (N, K, O, P, Q); stride, padding and dilation are (depth, height, width). d and t are both 0 for images.

    operation and memory_format may be given as text, dtype as ``torch.dtype``, stride, padding and dilation as one
    number for all dimensions, and numbers as NumPy's; the fields are converted to the types below.

    Raises ``InvalidInputError`` if no such convolution exists, and if w, or x or y of one sample, has more than
    ``MOST_ELEMENTS`` elements.

    >>> problem = ConvProblem("forward", c=3, h=224, w=192, k=64, r=7, s=7, stride=2, padding=3)
    >>> problem.x_shape(8), problem.w_shape(), problem.y_shape(8)
    ((8, 3, 224, 192), (64, 3, 7, 7), (8, 64, 112, 96))
    >>> clip = ConvProblem("forward", c=3, d=16, h=224, w=192, k=64, t=3, r=7, s=7, stride=(1, 2, 2), padding=(1, 3, 3))
    >>> clip.y_shape(8)
    (8, 64, 16, 112, 96)
    """

    operation: Operation
    c: int
    h: int
    w: int
    k: int
    r: int
    s: int
    stride: Sizes = 1  # type: ignore[assignment]
    padding: Sizes = 0  # type: ignore[assignment]
    dilation: Sizes = 1  # type: ignore[assignment]
    groups: int = 1
    dtype: str = "float32"
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS
    d: int = 0
    t: int = 0

    def __post_init__(self) -> None:
        is_volume = self.d != 0 or self.t != 0
        dims = 3 if is_volume else 2
        settle(
            self,
            operation=member(Operation, self.operation, "operation"),
            **{name: whole(getattr(self, name), name, 1, MOST_ELEMENTS) for name in _SIZES},
            **{name: whole(getattr(self, name), name, int(is_volume), MOST_ELEMENTS) for name in ("d", "t")},
            **{name: sizes(getattr(self, name), name, dims, least, MOST_ELEMENTS) for name, least in _STEPS.items()},
            dtype=dtype_name(self.dtype),
            memory_format=member(MemoryFormat, self.memory_format, "memory_format"),
        )
        if self.c % self.groups or self.k % self.groups:
            raise _not_a_convolution(f"groups is {self.groups}; it must divide C={self.c} and K={self.k}")
        extent = [dilation * (taps - 1) + 1 for taps, dilation in zip(self.window, self.dilation, strict=True)]
        padded = [size + 2 * padding for size, padding in zip(self.extent, self.padding, strict=True)]
        if any(covered > there for covered, there in zip(extent, padded, strict=True)):
            raise _not_a_convolution(
                f"the filter covers {_by(extent)} but the padded input is only {_by(padded)}; use a smaller filter or "
                "dilation, or more padding"
            )
        # Sizes must fit 32 bits; padded rows and columns of x count too.
        *_, column, row = padded
        elements = {
            "one sample of x": prod(self.x_shape(1)),
            "w": prod(self.w_shape()),
            "one sample of y": prod(self.y_shape(1)),
            "a padded column of x": column,
            "a padded row of x": row,
        }
        largest = max(elements, key=elements.__getitem__)
        if elements[largest] > MOST_ELEMENTS:
            raise InvalidInputError(
                f"{self}: {largest} has {elements[largest]} elements; at most {MOST_ELEMENTS} are allowed: give "
                "smaller sizes, or leave this one to PyTorch's own convolution"
            )

    @property
    def is_volume(self) -> bool:
        """Whether x has a depth, as in ``Conv3d``."""
        return self.d > 0

    @property
    def extent(self) -> Sizes:
        """Spatial sizes of x: (H, W), or (D, H, W)."""
        return (self.d, self.h, self.w) if self.d else (self.h, self.w)

    @property
    def window(self) -> Sizes:
        """Spatial sizes of the filter: (R, S), or (T, R, S)."""
        return (self.t, self.r, self.s) if self.d else (self.r, self.s)

    @property
    def layer(self) -> tuple[object, ...]:
        """What problems of one layer have in common: everything but the spatial sizes of x."""
        steps = self.stride, self.padding, self.dilation
        return self.operation, self.c, self.k, *self.window, *steps, self.groups, self.dtype, self.memory_format

    @property
    def positions(self) -> Sizes:
        """Spatial sizes of y, the output: (P, Q), or (O, P, Q)."""
        axes = zip(self.extent, self.window, self.stride, self.padding, self.dilation, strict=True)
        return tuple(
            (size + 2 * padding - dilation * (taps - 1) - 1) // stride + 1
            for size, taps, stride, padding, dilation in axes
        )

    @property
    def p(self) -> int:
        """Height of y, the output."""
        return self.positions[-2]

    @property
    def q(self) -> int:
        """Width of y, the output."""
        return self.positions[-1]

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    def x_shape(self, n: int) -> tuple[int, ...]:
        """Return the shape of x, (N, C, H, W) or (N, C, D, H, W), for ``n`` samples."""
        return (n, self.c, *self.extent)

    def w_shape(self) -> tuple[int, ...]:
        """Return the shape of the filter w, (K, C // groups, R, S) or (K, C // groups, T, R, S)."""
        return (self.k, self.c // self.groups, *self.window)

    def y_shape(self, n: int) -> tuple[int, ...]:
        """Return the shape of y, (N, K, P, Q) or (N, K, O, P, Q), for ``n`` samples."""
        return (n, self.k, *self.positions)

    def flops(self, n: int) -> int:
        """Return the number of additions and multiplications of a direct convolution of ``n`` samples."""
        return 2 * n * self.k * prod(self.positions) * (self.c // self.groups) * prod(self.window)

    def least_bytes(self, n: int) -> int:
        """Return the bytes of x, w and y for ``n`` samples, without rows of x that a stride skips.

        For BACKWARD_DATA, which writes zeros to skipped rows of dx, the skipped rows are included.
        """
        is_written = self.operation is Operation.BACKWARD_DATA
        rows = self.h if is_written else min(self.h, self.p * self.r)
        elements = prod(self.x_shape(n)) // self.h * rows, prod(self.w_shape()), prod(self.y_shape(n))
        return sum(elements) * self.item_bytes

    def countable_samples(self) -> int:
        """Return the largest number of samples for which x and y have at most ``MOST_ELEMENTS``."""
        return MOST_ELEMENTS // max(prod(self.x_shape(1)), prod(self.y_shape(1)))

    def with_extent(self, extent: Sizes) -> ConvProblem:
        """Return the same convolution of an x with other spatial sizes: (H, W), or (D, H, W)."""
        *depth, h, w = extent
        return replace(self, d=depth[0] if depth else 0, h=h, w=w)

    def with_operation(self, operation: Operation) -> ConvProblem:
        if operation is self.operation:
            return self
        other = copy(self)  # without another check of what was checked
        settle(other, operation=member(Operation, operation, "operation"))
        return other

    def __str__(self) -> str:
        """Return text for people such as ``forward 64x56x56 -> 64, 3x3, padding 1x1, float32 contiguous``."""
        parts = [f"{self.operation} {self.c}x{_by(self.extent)} -> {self.k}", _by(self.window)]
        for name, neutral in _STEPS.items():
            value = getattr(self, name)
            if any(size != neutral for size in value):
                parts.append(f"{name} {_by(value)}")
        if self.groups != 1:
            parts.append(f"groups {self.groups}")
        return ", ".join(parts) + f", {self.dtype} {self.memory_format}"


def inside(offset: int, stride: int, size: int, positions: int) -> tuple[slice, slice]:
    """Return the i in ``range(positions)`` with ``offset + i * stride`` in ``range(size)``, and these sums, as slices.

    >>> inside(-1, 2, 5, 3)  # at -1, 1 and 3: the first is in the padding
    (slice(1, 3, None), slice(1, 4, 2))
    """
    first = min(max(0, -(offset // stride)), positions)
    end = max(first, min(positions, (size - 1 - offset) // stride + 1))
    if first == end:
        return slice(0, 0), slice(0, 0)
    start = offset + first * stride
    return slice(first, end), slice(start, start + (end - first - 1) * stride + 1, stride)


@lru_cache(maxsize=1024)
def frame_of(problem: ConvProblem) -> ConvProblem:
    """Return the convolution of images that one tap of the filter along the depth is."""
    stride, padding, dilation = problem.stride[1:], problem.padding[1:], problem.dilation[1:]
    return replace(problem, d=0, t=0, stride=stride, padding=padding, dilation=dilation)


@lru_cache(maxsize=1024)
def taps_and_frames(problem: ConvProblem) -> dict[int, int]:
    """Return the taps along the depth that do not only read padding, each with the number of frames that it reads."""
    (stride, *_), (padding, *_), (dilation, *_) = problem.stride, problem.padding, problem.dilation
    read = [inside(t * dilation - padding, stride, problem.d, problem.positions[0])[0] for t in range(problem.t)]
    return {tap: frames.stop - frames.start for tap, frames in enumerate(read) if frames.stop > frames.start}


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype: ``float32`` for ``"float32"`` and for ``torch.float32``.

    Raises ``InvalidInputError`` for a dtype that mucudnn does not support.
    """
    name = (str(dtype) if isinstance(dtype, str) else shown(dtype)).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise InvalidInputError(f"dtype is {shown(dtype)}; allowed are {', '.join(ITEM_BYTES)}")
    return name


def _by(sizes: Iterable[int]) -> str:
    return "x".join(map(str, sizes))


def _not_a_convolution(reason: str) -> InvalidInputError:
    return InvalidInputError(f"not a convolution: {reason}")
