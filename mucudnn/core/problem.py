"""Problems: one operation of one convolution, without the batch size, independent of torch and devices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.values import member, pair, settle, shown, whole


class Operation(StrEnum):
    """The three convolutions of a layer: the result y, and the gradients dx and dw."""

    FORWARD = "forward"
    BACKWARD_DATA = "backward_data"
    BACKWARD_FILTER = "backward_filter"


class MemoryFormat(StrEnum):
    """Order of activations and filters in memory: NCHW/KCRS or NHWC/KRSC."""

    CONTIGUOUS = "contiguous"
    CHANNELS_LAST = "channels_last"


ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
MOST_ELEMENTS = 2**31 - 1  # limit for an operand of a kernel: libraries, and some of our loops, index with 32 bits
MOST_SAMPLES = 2**20  # limit for a mini-batch: solving for all sizes up to it takes about a minute and 1 GiB
Pair = tuple[int, int]

_SIZES = ("c", "h", "w", "k", "r", "s", "groups")


@dataclass(frozen=True, slots=True, order=True)
class ConvProblem:
    """One operation of one layer geometry. All sizes are in elements, pairs are (height, width).

    x: (N, C, H, W), w: (K, C // groups, R, S), y: (N, K, P, Q).

    operation and memory_format may be given as text, dtype as ``torch.dtype``, a pair as one number for both, and
    numbers as NumPy's; the fields are converted to the types below.

    Raises ``InvalidInputError`` if no such convolution exists, and if w, or x or y of one sample, has more than
    ``MOST_ELEMENTS`` elements.

    >>> problem = ConvProblem("forward", c=3, h=224, w=192, k=64, r=7, s=7, stride=2, padding=3)
    >>> problem.x_shape(8), problem.w_shape(), problem.y_shape(8)
    ((8, 3, 224, 192), (64, 3, 7, 7), (8, 64, 112, 96))
    """

    operation: Operation
    c: int
    h: int
    w: int
    k: int
    r: int
    s: int
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1
    dtype: str = "float32"
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS

    def __post_init__(self) -> None:
        settle(
            self,
            operation=member(Operation, self.operation, "operation"),
            **{name: whole(getattr(self, name), name, 1, MOST_ELEMENTS) for name in _SIZES},
            stride=pair(self.stride, "stride", 1, MOST_ELEMENTS),
            padding=pair(self.padding, "padding", 0, MOST_ELEMENTS),
            dilation=pair(self.dilation, "dilation", 1, MOST_ELEMENTS),
            dtype=dtype_name(self.dtype),
            memory_format=member(MemoryFormat, self.memory_format, "memory_format"),
        )
        if self.c % self.groups or self.k % self.groups:
            raise _not_a_convolution(f"groups is {self.groups}; it must divide C={self.c} and K={self.k}")
        extent = (self.dilation[0] * (self.r - 1) + 1, self.dilation[1] * (self.s - 1) + 1)
        padded = self._padded()
        if extent[0] > padded[0] or extent[1] > padded[1]:
            raise _not_a_convolution(
                f"the filter covers {extent[0]}x{extent[1]} but the padded input is only {padded[0]}x{padded[1]}; "
                "use a smaller filter or dilation, or more padding"
            )
        # Sizes must fit 32 bits; padded rows and columns of x count too.
        sizes = prod(self.x_shape(1)), prod(self.w_shape()), prod(self.y_shape(1)), *padded
        if max(sizes) > MOST_ELEMENTS:
            names = "one sample of x", "w", "one sample of y", "a padded column of x", "a padded row of x"
            what, elements = max(zip(names, sizes, strict=True), key=lambda named: named[1])
            raise InvalidInputError(
                f"{self}: {what} has {elements} elements; at most {MOST_ELEMENTS} are allowed: give smaller sizes, or "
                "leave this one to PyTorch's own convolution"
            )

    def _padded(self) -> Pair:
        return self.h + 2 * self.padding[0], self.w + 2 * self.padding[1]

    @property
    def p(self) -> int:
        """Height of y, the output."""
        return (self._padded()[0] - self.dilation[0] * (self.r - 1) - 1) // self.stride[0] + 1

    @property
    def q(self) -> int:
        """Width of y, the output."""
        return (self._padded()[1] - self.dilation[1] * (self.s - 1) - 1) // self.stride[1] + 1

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    def x_shape(self, n: int) -> tuple[int, int, int, int]:
        """Return the shape of x, (N, C, H, W), for ``n`` samples."""
        return (n, self.c, self.h, self.w)

    def w_shape(self) -> tuple[int, int, int, int]:
        """Return the shape of the filter w, (K, C // groups, R, S)."""
        return (self.k, self.c // self.groups, self.r, self.s)

    def y_shape(self, n: int) -> tuple[int, int, int, int]:
        """Return the shape of y, (N, K, P, Q), for ``n`` samples."""
        return (n, self.k, self.p, self.q)

    def flops(self, n: int) -> int:
        """Return the number of additions and multiplications of a direct convolution of ``n`` samples."""
        return 2 * n * self.k * self.p * self.q * (self.c // self.groups) * self.r * self.s

    def least_bytes(self, n: int) -> int:
        """Return the bytes of x, w and y for ``n`` samples, without rows of x that a stride skips.

        For BACKWARD_DATA, which writes zeros to skipped rows of dx, the skipped rows are included.
        """
        is_written = self.operation is Operation.BACKWARD_DATA
        rows = self.h if is_written else min(self.h, self.p * self.r)
        sizes = prod(self.x_shape(n)) // self.h * rows, prod(self.w_shape()), prod(self.y_shape(n))
        return sum(sizes) * self.item_bytes

    def countable_samples(self) -> int:
        """Return the largest number of samples for which x and y have at most ``MOST_ELEMENTS``."""
        return MOST_ELEMENTS // max(prod(self.x_shape(1)), prod(self.y_shape(1)))

    def with_operation(self, operation: Operation) -> ConvProblem:
        return replace(self, operation=operation)

    def __str__(self) -> str:
        """Return text for people such as ``forward 64x56x56 -> 64, 3x3, padding 1x1, float32 contiguous``."""
        parts = [f"{self.operation} {self.c}x{self.h}x{self.w} -> {self.k}", f"{self.r}x{self.s}"]
        for name, neutral in (("stride", (1, 1)), ("padding", (0, 0)), ("dilation", (1, 1))):
            value = getattr(self, name)
            if value != neutral:
                parts.append(f"{name} {value[0]}x{value[1]}")
        if self.groups != 1:
            parts.append(f"groups {self.groups}")
        return ", ".join(parts) + f", {self.dtype} {self.memory_format}"


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype: ``float32`` for ``"float32"`` and for ``torch.float32``.

    Raises ``InvalidInputError`` for a dtype that mucudnn does not support.
    """
    given = str(dtype) if isinstance(dtype, str) else shown(dtype)
    name = given.removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise InvalidInputError(f"dtype is {shown(dtype)}; allowed are {', '.join(ITEM_BYTES)}")
    return name


def _not_a_convolution(reason: str) -> InvalidInputError:
    return InvalidInputError(f"not a convolution: {reason}")
