"""What is computed: one operation of one convolution, without the batch size. Knows no torch and no device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from mucudnn.errors import InvalidInputError


class Operation(StrEnum):
    """The three convolutions of a layer, with cuDNN's names."""

    FORWARD = "forward"
    BACKWARD_DATA = "backward_data"
    BACKWARD_FILTER = "backward_filter"


class MemoryFormat(StrEnum):
    """How activations and filters lie in memory: NCHW/KCRS or NHWC/KRSC."""

    CONTIGUOUS = "contiguous"
    CHANNELS_LAST = "channels_last"


ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
Pair = tuple[int, int]


@dataclass(frozen=True, slots=True, order=True)
class ConvProblem:
    """One operation of one layer geometry. All sizes are in elements, pairs are (height, width).

    x: (N, C, H, W), w: (K, C // groups, R, S), y: (N, K, P, Q).

    Raises ``InvalidInputError`` where no such convolution exists.
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
        for name in ("c", "h", "w", "k", "r", "s", "groups"):
            _require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be at least 1")
        _require(min(self.stride) >= 1, f"stride is {self.stride}; both must be at least 1")
        _require(min(self.dilation) >= 1, f"dilation is {self.dilation}; both must be at least 1")
        _require(min(self.padding) >= 0, f"padding is {self.padding}; both must be at least 0")
        divides = self.c % self.groups == 0 and self.k % self.groups == 0
        _require(divides, f"groups is {self.groups}; it must divide C={self.c} and K={self.k}")
        _require(self.dtype in ITEM_BYTES, f"dtype is {self.dtype!r}; allowed are {', '.join(ITEM_BYTES)}")
        extent = (self.dilation[0] * (self.r - 1) + 1, self.dilation[1] * (self.s - 1) + 1)
        padded = (self.h + 2 * self.padding[0], self.w + 2 * self.padding[1])
        fits = extent[0] <= padded[0] and extent[1] <= padded[1]
        _require(
            fits,
            f"the filter covers {extent[0]}x{extent[1]} but the padded input is only {padded[0]}x{padded[1]}; "
            "use a smaller filter or dilation, or more padding",
        )

    @property
    def p(self) -> int:
        """Output height."""
        return (self.h + 2 * self.padding[0] - self.dilation[0] * (self.r - 1) - 1) // self.stride[0] + 1

    @property
    def q(self) -> int:
        """Output width."""
        return (self.w + 2 * self.padding[1] - self.dilation[1] * (self.s - 1) - 1) // self.stride[1] + 1

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    def x_shape(self, n: int) -> tuple[int, int, int, int]:
        """(N, C, H, W) for ``n`` samples."""
        return (n, self.c, self.h, self.w)

    def w_shape(self) -> tuple[int, int, int, int]:
        """(K, C // groups, R, S)."""
        return (self.k, self.c // self.groups, self.r, self.s)

    def y_shape(self, n: int) -> tuple[int, int, int, int]:
        """(N, K, P, Q) for ``n`` samples."""
        return (n, self.k, self.p, self.q)

    def flops(self, n: int) -> int:
        """Additions and multiplications of the direct method for ``n`` samples."""
        return 2 * n * self.k * self.p * self.q * (self.c // self.groups) * self.r * self.s

    def with_operation(self, operation: Operation) -> ConvProblem:
        return replace(self, operation=operation)

    def __str__(self) -> str:
        """For people: ``forward 64x56x56 -> 64, 3x3, padding 1x1, float32 contiguous``."""
        parts = [f"{self.operation} {self.c}x{self.h}x{self.w} -> {self.k}", f"{self.r}x{self.s}"]
        for name, neutral in (("stride", (1, 1)), ("padding", (0, 0)), ("dilation", (1, 1))):
            value = getattr(self, name)
            if value != neutral:
                parts.append(f"{name} {value[0]}x{value[1]}")
        if self.groups != 1:
            parts.append(f"groups {self.groups}")
        return ", ".join(parts) + f", {self.dtype} {self.memory_format}"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidInputError(f"not a convolution: {message}")
