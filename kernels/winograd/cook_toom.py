"""Exact Cook-Toom (Winograd) matrices for minimal filtering F(m, r): m outputs of an r-tap correlation.

    y = A^T [ (G g) * (B^T d) ]         d: (a,) input tile, g: (r,) filter, y: (m,) outputs, a = m + r - 1

A product of polynomials of degree m - 1 and r - 1 has a coefficients, so its values at a points determine it (Toom
1963, Cook 1966). As matrices: evaluate both factors, multiply, interpolate. The transpose with respect to one factor
computes a correlation (Winograd, *Arithmetic Complexity of Computations*, 1980; Lavin and Gray, *Fast Algorithms for
Convolutional Neural Networks*, 2016). In two dimensions each matrix is applied along both axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import prod

Row = tuple[Fraction, ...]
Matrix = tuple[Row, ...]


def _symmetric(*pairs: str) -> Row:
    """Return pairs of points +p and -p; their rows differ only in signs, which halves the work of a transform."""
    return tuple(sign * Fraction(p) for p in pairs for sign in (1, -1))


_ZERO = Fraction(0)
# The finite points, by their number; the last point is always infinity, the leading coefficient. All are sums of few
# powers of two, so A^T and B^T are exact in float32; among such symmetric sets these have the smallest error. Relative
# L2 error in float32, Gaussian data, C = 256 (in brackets: the customary points 0, +-1, +-2):
# F(2,3) 3.6e-7; F(4,3) 1.0e-6 (2.3e-6); F(2,5) 1.2e-6 (2.6e-6); F(6,3) 4.4e-6; F(4,5) 4.1e-6;
# with stride 2 F(2,3) 3.9e-7; F(4,3) 8.4e-7 (+-1, +-1/2: 1.4e-6); F(4,5) 1.4e-6.
POINTS = {
    2: _symmetric("1"),
    3: (_ZERO, *_symmetric("1")),
    4: _symmetric("1/2", "3/2"),
    5: (_ZERO, *_symmetric("5/8", "3/2")),
    7: (_ZERO, *_symmetric("1", "2", "1/2")),
}


@dataclass(frozen=True, slots=True, eq=False)
class CookToom:
    """The exact matrices of F(m, r). Objects are compared by identity, because ``cook_toom`` caches them.

    a_t (m, a), g (a, r) and b_t (a, a) compute m outputs from a window of a = stride * (m - 1) + r pixels. With the
    filter rotated, dx_a_t (stride * m, a), g and dx_b_t (a, b), b = m + ceil(r / stride) - 1, compute stride * m pixels
    of dx from a window of b pixels of dy. For stride 1, dx_a_t equals a_t, and dx_b_t equals b_t.
    """

    m: int
    r: int
    stride: int
    a_t: Matrix
    g: Matrix
    b_t: Matrix
    dx_a_t: Matrix
    dx_b_t: Matrix

    @property
    def a(self) -> int:
        """Number of multiplications for m outputs of F(m, r), in one dimension."""
        return self.stride * (self.m - 1) + self.r

    @property
    def late(self) -> int:
        """Number of phases (every stride-th filter element) that have one element fewer than the other phases.

        A window of dx begins with these phases.
        """
        return -self.r % self.stride


@cache
def cook_toom(m: int, r: int, stride: int = 1, points: Row | None = None) -> CookToom:
    """Return the matrices of F(m, r) with a stride, from m + ceil(r / stride) - 2 finite points and infinity.

    The default points are ``POINTS``. A *phase* is every stride-th tap (filter element), beginning with one of the
    first ``stride`` taps: a filter with unit stride on every stride-th pixel. All phases use the points of the longest,
    so that their products at a point can be summed before A^T. A phase with one tap fewer does not use infinity.

    The scaling is that of wincnn (Lavin): the rows of B^T are monic polynomials and A^T holds powers; the divisions are
    in G, which is applied once per call, not once per tile. (Scaling a row by a power of two does not change rounding.)
    Raises ``ValueError`` if the points are too few, too many or not distinct, and for strides above r.
    """
    if not 1 <= stride <= r:
        raise ValueError(f"F({m}, {r}) needs a stride from 1 to {r}; given is {stride}")
    taps = -(-r // stride)
    a_t, g, b_t = _unit_stride(m, taps, points)
    late = -r % stride
    phases = [(p, len(a_t[0]) - (p >= stride - late)) for p in range(stride)]
    window = stride * (m - 1) + r
    return CookToom(
        m,
        r,
        stride,
        a_t=tuple(tuple(x for _, count in phases for x in row[:count]) for row in a_t),
        g=tuple(_spread_out(row, p, stride, r) for p, count in phases for row in g[:count]),
        b_t=tuple(_spread_out(row, p, stride, window) for p, count in phases for row in b_t[:count]),
        dx_a_t=tuple(
            tuple(x for p, count in phases for x in (row[:count] if p == phase else (Fraction(0),) * count))
            for row in a_t
            for phase in reversed(range(stride))
        ),
        dx_b_t=tuple(row for _, count in phases for row in b_t[:count]),
    )


def _unit_stride(m: int, r: int, points: Row | None) -> tuple[Matrix, Matrix, Matrix]:
    count = m + r - 2
    finite = POINTS.get(count, ()) if points is None else points
    if min(m, r) < 1 or not len(finite) == len(set(finite)) == count:
        raise ValueError(f"F({m}, {r}) needs m, r >= 1 and {count} different points; given are {len(set(finite))}")
    a_t = _transposed([*(_powers(p, m) for p in finite), _unit(m)])
    g = [*(_scaled(_powers(p, r), 1 / _spread(p, finite)) for p in finite), _unit(r)]
    b_t = [*(_padded(_monic(_without(p, finite)), count + 1) for p in finite), _monic(finite)]
    if finite and b_t[0][0] < 0:  # normalizes the sign by convention
        b_t[0], g[0] = _scaled(b_t[0], -1), _scaled(g[0], -1)
    return a_t, tuple(g), tuple(b_t)


def _spread_out(row: Row, first: int, stride: int, length: int) -> Row:
    """Return ``length`` zeros, with the entries of ``row`` at every ``stride``-th position from ``first`` on."""
    entries = dict(zip(range(first, length, stride), row, strict=False))
    return tuple(entries.get(i, Fraction(0)) for i in range(length))


def kronecker(left: Matrix, right: Matrix) -> Matrix:
    """Return the matrix that applies ``left`` along the height and ``right`` along the width of a flattened tile."""
    return tuple(tuple(x * y for x in row for y in other) for row in left for other in right)


def _powers(point: Fraction, length: int) -> Row:
    return tuple(point**i for i in range(length))


def _unit(length: int) -> Row:
    """Return the row that evaluates a polynomial at the point infinity: its leading coefficient."""
    return (*(Fraction(0) for _ in range(length - 1)), Fraction(1))


def _without(point: Fraction, points: Iterable[Fraction]) -> list[Fraction]:
    return [p for p in points if p != point]


def _spread(point: Fraction, points: Iterable[Fraction]) -> Fraction:
    """Return the denominator of the Lagrange basis polynomial of ``point``: the product of its distances."""
    return prod((point - p for p in _without(point, points)), start=Fraction(1))


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


def _padded(row: Row, length: int) -> Row:
    return (*row, *(Fraction(0) for _ in range(length - len(row))))


def _scaled(row: Row, factor: Fraction | int) -> Row:
    return tuple(x * factor for x in row)


def _transposed(rows: Sequence[Row]) -> Matrix:
    return tuple(zip(*rows, strict=True))
