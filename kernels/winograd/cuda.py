"""Winograd convolution on CUDA: transforms by mucudnn's winograd.cu, products over channels by torch (cuBLAS).

The stages are not fused: the transformed tiles, (a / m)^2 times as large as the image, and their products pass through
memory. The scratch buffer therefore grows with the micro-batch, and stays in the cache if the micro-batch is small.
Images and filters are read and written in either memory format without a copy. Half precision is computed in float32,
subject to ``torch.backends.cuda.matmul``. The source is made from exact Cook-Toom (Winograd) matrices for minimal
filtering F(m, r), m outputs of an r-tap correlation:

    y = A^T [ (G g) * (B^T d) ]         d: (a,) input tile, g: (r,) filter, y: (m,) outputs, a = m + r - 1

A product of polynomials of degree m - 1 and r - 1 has a coefficients, so its values at a points determine it (Toom
1963, Cook 1966). As matrices: evaluate both factors, multiply, interpolate. The transpose with respect to one factor
computes a correlation (Winograd, *Arithmetic Complexity of Computations*, 1980; Lavin and Gray, *Fast Algorithms for
Convolutional Neural Networks*, 2016). In two dimensions each matrix is applied along both axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation, Sizes
from mucudnn.kernels.algorithm import Workspace
from mucudnn.kernels.memory import Part, carve, carved_bytes, compute_dtype
from mucudnn.kernels.winograd.algorithms import UNIT_STRIDE, Tiling, WinogradAlgorithm, tiling
from mucudnn.kernels.winograd.cupy_launcher import CupyLauncher, LaunchError

# nvcc 13.0 uses 32 to 108 registers per thread (float64: up to 179): at least four (two) blocks per multiprocessor.
BLOCK_THREADS = 128
_LARGEST_PLANE = 2**31 - 1  # The CUDA functions count elements in 32 bits.


@dataclass(frozen=True, slots=True)
class CudaWinograd(WinogradAlgorithm):
    """Winograd convolution on CUDA, with unit stride."""

    launcher: CupyLauncher = field(default_factory=CupyLauncher, compare=False)

    device_type = "cuda"

    def supports(self, problem: ConvProblem) -> str | None:
        return WinogradAlgorithm.supports(self, problem) or self.launcher.probe()

    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        tiles = self._tile_parts(problem, tiling(self.m, problem, micro_batch_size))
        return Workspace(carved_bytes([self._filter_part(problem)]), carved_bytes(tiles))

    def open(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        """Compute the transformed filter U = G w G^T, with w rotated by 180 degrees for BACKWARD_DATA."""
        if problem.operation is Operation.BACKWARD_FILTER:
            prepared.zero_()
            return
        (u,) = carve(prepared, [self._filter_part(problem)])
        turned = problem.operation is Operation.BACKWARD_DATA
        function = "transform_turned_filter" if turned else "transform_filter"
        self._of_filters(problem, function, w, (w.data_ptr(), u.data_ptr()))

    def step(
        self,
        problem: ConvProblem,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        bias: Tensor | None,
        prepared: Tensor,
        scratch: Tensor,
    ) -> None:
        match problem.operation:
            case Operation.FORWARD:
                self._correlate(problem, x, y, bias, prepared, scratch)
            case Operation.BACKWARD_DATA:
                self._correlate(problem, y, x, None, prepared, scratch)
            case Operation.BACKWARD_FILTER:
                self._accumulate(problem, x, y, prepared, scratch)

    def close(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        """Transform the filter gradient back and add it to w: w += G^T dU G."""
        if problem.operation is Operation.BACKWARD_FILTER:
            (du,) = carve(prepared, [self._filter_part(problem)])
            self._of_filters(problem, "add_filter_gradient", w, (du.data_ptr(), w.data_ptr()))

    def _correlate(
        self,
        problem: ConvProblem,
        source: Tensor,
        target: Tensor,
        bias: Tensor | None,
        prepared: Tensor,
        scratch: Tensor,
    ) -> None:
        """Compute target = A^T [U * (B^T source B)] A + bias; products with U are summed over the source's channels."""
        if bias is not None and bias.dtype != target.dtype:
            raise InvalidInputError(f"bias has dtype {bias.dtype}; it must be that of the images, {target.dtype}")
        tiles = tiling(self.m, problem, len(source))
        v, product = carve(scratch, self._tile_parts(problem, tiles))
        (u,) = carve(prepared, [self._filter_part(problem)])
        if problem.operation is Operation.FORWARD:
            u = u.transpose(1, 2)  # The shape is now (points, channels of the source, channels of the target).
        pointers = (source.data_ptr(), v.data_ptr())
        self._of_images(problem, tiles, "transform_source", source, pointers, tiles.padding)
        if problem.memory_format is MemoryFormat.CHANNELS_LAST:
            product.baddbmm_(v, u, beta=0)
        else:
            product.baddbmm_(u.transpose(1, 2), v, beta=0)
        results = (product.data_ptr(), 0 if bias is None else bias.data_ptr(), target.data_ptr())
        self._of_images(problem, tiles, "inverse_transform", target, results)

    def _accumulate(self, problem: ConvProblem, x: Tensor, y: Tensor, prepared: Tensor, scratch: Tensor) -> None:
        """Add to the filter gradient's transform: dU += (A dy A^T) * (B^T x B), summed over the tiles."""
        tiles = tiling(self.m, problem, len(x))
        v, d = carve(scratch, self._tile_parts(problem, tiles))
        (du,) = carve(prepared, [self._filter_part(problem)])
        self._of_images(problem, tiles, "transform_source", x, (x.data_ptr(), v.data_ptr()), tiles.padding)
        self._of_images(problem, tiles, "transform_gradient", y, (y.data_ptr(), d.data_ptr()))
        if problem.memory_format is MemoryFormat.CHANNELS_LAST:
            du.baddbmm_(d.transpose(1, 2), v)
        else:
            du.baddbmm_(d, v.transpose(1, 2))

    def _of_images(
        self,
        problem: ConvProblem,
        tiles: Tiling,
        function: str,
        image: Tensor,
        pointers: tuple[int, ...],
        padding: Sizes = (0, 0),
    ) -> None:
        """Launch a CUDA function with one thread for each tile and channel of an image.

        padding: of the first tile.
        """
        _, channels, height, width = image.shape
        sizes = (channels, channels // tiles.groups, tiles.count, tiles.rows, tiles.columns, height, width, *padding)
        self._launch(problem, function, channels * tiles.count, pointers, sizes, image.device)

    def _of_filters(self, problem: ConvProblem, function: str, w: Tensor, pointers: tuple[int, ...]) -> None:
        """Launch a CUDA function with one thread for each channel of each filter."""
        count = w.shape[0] * w.shape[1]
        self._launch(problem, function, count, pointers, (count, w.shape[1]), w.device)

    def _launch(
        self,
        problem: ConvProblem,
        function: str,
        threads: int,
        pointers: tuple[int, ...],
        sizes: tuple[int, ...],
        device: torch.device,
    ) -> None:
        if threads > _LARGEST_PLANE:
            raise LaunchError(
                f"{function} has {threads} elements for each point; the limit is {_LARGEST_PLANE}; use a smaller "
                "micro-batch"
            )
        source = winograd_source(cook_toom(self.m, self.r), problem.dtype, problem.memory_format, BLOCK_THREADS)
        blocks = -(-threads // BLOCK_THREADS)
        self.launcher.launch(source, function, blocks, BLOCK_THREADS, pointers, sizes, device)

    @property
    def _points(self) -> int:
        return (self.m + self.r - 1) ** 2

    def _filter_part(self, problem: ConvProblem) -> Part:
        """Return the buffer part of the transformed filter or gradient, (points * groups, K // groups, C // groups)."""
        k, c, _, _ = problem.w_shape()
        return Part((self._points * problem.groups, k // problem.groups, c), compute_dtype(problem))

    def _tile_parts(self, problem: ConvProblem, tiles: Tiling) -> list[Part]:
        """Return the buffer parts of the transformed source tiles, and of their products or the transformed dy.

        The shape is (points * groups, channels, tiles); for channels_last the last two dimensions are swapped.
        """
        points, dtype = self._points * tiles.groups, compute_dtype(problem)
        if problem.memory_format is MemoryFormat.CHANNELS_LAST:
            return [Part((points, tiles.count, c), dtype) for c in (tiles.source_channels, tiles.target_channels)]
        return [Part((points, c, tiles.count), dtype) for c in (tiles.source_channels, tiles.target_channels)]


ON_CUDA = (CudaWinograd(2, 3, version=5), *(CudaWinograd(on_cpu.m, on_cpu.r) for on_cpu in UNIT_STRIDE[1:]))


# The source: matrices, types and sizes, then winograd.cu

_TYPES = {  # The types of storage and of arithmetic, by dtype.
    "float64": ("double", "double"),
    "float32": ("float", "float"),
    "bfloat16": ("BFloat16", "float"),
    "float16": ("Half", "float"),
}


@cache
def winograd_source(matrices: CookToom, dtype: str, memory_format: MemoryFormat, block_threads: int) -> str:
    """Return a CUDA C++ source without includes: ``extern "C"`` functions for blocks of ``block_threads`` threads.

    The matrices of the transforms are unrolled into sums that omit zero entries; each entry is rounded once.
    """
    held, computed = _TYPES[dtype]
    constants = {
        "bool CHANNELS_LAST": str(memory_format is MemoryFormat.CHANNELS_LAST).lower(),
        "int THREADS": block_threads,
        "int M": matrices.m,
        "int R": matrices.r,
        "int A": matrices.a,
    }
    named_matrices = {
        "B_T": matrices.b_t,
        "A_T": matrices.a_t,
        "DY": _transposed(matrices.a_t),
        "G": matrices.g,
        "TURNED_G": tuple(row[::-1] for row in matrices.g),
        "G_T": _transposed(matrices.g),
    }
    return "\n".join(
        [
            _text("scalars.cuh"),
            f"using T = {held};",
            f"using Real = {computed};",
            *(f"constexpr {name} = {value};" for name, value in constants.items()),
            *(_struct(name, matrix) for name, matrix in named_matrices.items()),
            _text("winograd.cu"),
        ]
    )


def _struct(name: str, matrix: Matrix) -> str:
    rows, columns = len(matrix), len(matrix[0])
    return "\n".join(
        [
            f"struct {name} {{",
            f"  static constexpr int ROWS = {rows}, COLUMNS = {columns};",
            f"  static __device__ __forceinline__ void apply(const Real (&in)[{columns}], Real (&out)[{rows}]) {{",
            *(f"    out[{i}] = {_sum(row)};" for i, row in enumerate(matrix)),
            "  }",
            "};",
        ]
    )


def _sum(row: tuple[Fraction, ...]) -> str:
    terms = (_term(factor, f"in[{j}]") for j, factor in enumerate(row) if factor)
    return " ".join(terms).removeprefix("+ ")


def _term(factor: Fraction, operand: str) -> str:
    sign = "-" if factor < 0 else "+"
    return f"{sign} {operand}" if abs(factor) == 1 else f"{sign} Real({float(abs(factor))!r}) * {operand}"


def _text(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="ascii")


# Cook-Toom matrices

Row = tuple[Fraction, ...]
Matrix = tuple[Row, ...]


def _symmetric(*pairs: str) -> Row:
    """Return pairs of points +p and -p; their rows differ only in signs, which halves the work of a transform."""
    return tuple(sign * Fraction(p) for p in pairs for sign in (1, -1))


_ZERO = Fraction(0)
# The finite points, by their number; the last point is always infinity, the leading coefficient. All are sums of few
# powers of two, so A^T and B^T are exact in float32; among such symmetric sets these have the smallest error. Relative
# L2 error in float32, Gaussian data, C = 256 (in brackets: the customary points 0, +-1, +-2):
# F(2,3) 3.6e-7; F(4,3) 1.0e-6 (2.3e-6); F(2,5) 1.2e-6 (2.6e-6); F(6,3) 4.4e-6; F(4,5) 4.1e-6.
POINTS = {
    3: (_ZERO, *_symmetric("1")),
    5: (_ZERO, *_symmetric("5/8", "3/2")),
    7: (_ZERO, *_symmetric("1", "2", "1/2")),
}


@dataclass(frozen=True, slots=True, eq=False)
class CookToom:
    """The exact matrices of F(m, r). Objects are compared by identity, because ``cook_toom`` caches them.

    a_t (m, a), g (a, r) and b_t (a, a) compute m outputs from a window of a = m + r - 1 pixels.
    """

    m: int
    r: int
    a_t: Matrix
    g: Matrix
    b_t: Matrix

    @property
    def a(self) -> int:
        """Number of multiplications for m outputs of F(m, r), in one dimension."""
        return self.m + self.r - 1


@cache
def cook_toom(m: int, r: int, points: Row | None = None) -> CookToom:
    """Return the matrices of F(m, r), from m + r - 2 finite points, by default ``POINTS``, and infinity.

    The scaling is that of wincnn (Lavin): the rows of B^T are monic polynomials and A^T holds powers; the divisions are
    in G, which is applied once per call, not once per tile. (Scaling a row by a power of two does not change rounding.)
    Raises ``ValueError`` if the points are too few, too many or not distinct.
    """
    count = m + r - 2
    finite = POINTS.get(count, ()) if points is None else points
    if min(m, r) < 1 or not len(finite) == len(set(finite)) == count:
        raise ValueError(f"F({m}, {r}) needs m, r >= 1 and {count} different points; given are {len(set(finite))}")
    a_t = _transposed([*(_powers(p, m) for p in finite), _unit(m)])
    roots_of = [[root for root in finite if root != point] for point in finite]
    # The divisor is the denominator of the point's Lagrange basis polynomial: the product of its distances.
    spreads = [
        prod((point - root for root in roots), start=Fraction(1)) for point, roots in zip(finite, roots_of, strict=True)
    ]
    g = [*(_scaled(_powers(p, r), 1 / spread) for p, spread in zip(finite, spreads, strict=True)), _unit(r)]
    b_t = [*((*_monic(roots), Fraction(0)) for roots in roots_of), _monic(finite)]
    if finite and b_t[0][0] < 0:  # normalizes the sign by convention
        b_t[0], g[0] = _scaled(b_t[0], -1), _scaled(g[0], -1)
    return CookToom(m, r, a_t, tuple(g), tuple(b_t))


def _powers(point: Fraction, length: int) -> Row:
    return tuple(point**i for i in range(length))


def _unit(length: int) -> Row:
    """Return the row that evaluates a polynomial at the point infinity: its leading coefficient."""
    return (*(Fraction(0) for _ in range(length - 1)), Fraction(1))


def _monic(roots: Sequence[Fraction]) -> Row:
    """Return the coefficients of the product of all (x - root), lowest degree first.

    >>> [int(coefficient) for coefficient in _monic([Fraction(1), Fraction(2)])]  # (x - 1)(x - 2)
    [2, -3, 1]
    """
    coefficients: Row = (Fraction(1),)
    for root in roots:
        raised, lowered = (Fraction(0), *coefficients), (*_scaled(coefficients, -root), Fraction(0))
        coefficients = tuple(x + y for x, y in zip(raised, lowered, strict=True))
    return coefficients


def _scaled(row: Row, factor: Fraction | int) -> Row:
    return tuple(x * factor for x in row)


def _transposed(rows: Sequence[Row]) -> Matrix:
    return tuple(zip(*rows, strict=True))
