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
    g = [*(_scaled(_powers(p, r), 1 / _spread(p, finite)) for p in finite), _unit(r)]
    b_t = [*(_padded(_monic(_without(p, finite)), count + 1) for p in finite), _monic(finite)]
    if finite and b_t[0][0] < 0:  # normalizes the sign by convention
        b_t[0], g[0] = _scaled(b_t[0], -1), _scaled(g[0], -1)
    return CookToom(m, r, a_t, tuple(g), tuple(b_t))


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
