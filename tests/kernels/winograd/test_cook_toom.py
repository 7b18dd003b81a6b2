"""The matrices in exact fractions: they compute a correlation, with the structure that fast transforms rely on."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mucudnn.kernels.winograd.cook_toom import CookToom, Matrix, cook_toom

USED = [(2, 3), (4, 3), (6, 3), (2, 5), (4, 5)]
STRIDED = [(2, 3, 2), (4, 3, 2), (5, 3, 2), (4, 5, 2), (3, 7, 2), (2, 4, 2), (2, 5, 3), (4, 4, 3)]
NUMBERS = st.fractions(min_value=-8, max_value=8, max_denominator=16)
CUSTOMARY = tuple(Fraction(p) for p in (0, 1, -1, 2, -2))


def times(matrix: Matrix, vector: Sequence[Fraction]) -> list[Fraction]:
    return [sum((x * y for x, y in zip(row, vector, strict=True)), Fraction(0)) for row in matrix]


def filtered(f: CookToom, d: Sequence[Fraction], g: Sequence[Fraction]) -> list[Fraction]:
    products = [x * y for x, y in zip(times(f.g, g), times(f.b_t, d), strict=True)]
    return times(f.a_t, products)


@pytest.mark.parametrize(("m", "r"), USED)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_it_is_the_correlation(m: int, r: int, data: st.DataObject) -> None:
    f = cook_toom(m, r)
    d = data.draw(st.lists(NUMBERS, min_size=f.a, max_size=f.a))
    g = data.draw(st.lists(NUMBERS, min_size=r, max_size=r))
    assert filtered(f, d, g) == [sum(d[i + j] * g[j] for j in range(r)) for i in range(m)]


@pytest.mark.parametrize(("m", "r", "stride"), STRIDED)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_with_a_stride_it_is_every_so_many_results(m: int, r: int, stride: int, data: st.DataObject) -> None:
    f = cook_toom(m, r, stride)
    d = data.draw(st.lists(NUMBERS, min_size=f.a, max_size=f.a))
    g = data.draw(st.lists(NUMBERS, min_size=r, max_size=r))
    assert filtered(f, d, g) == [sum(d[stride * i + j] * g[j] for j in range(r)) for i in range(m)]


@pytest.mark.parametrize(("m", "r", "stride"), [*((m, r, 1) for m, r in USED), *STRIDED])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_the_matrices_of_dx_compute_a_tile_of_the_gradient(m: int, r: int, stride: int, data: st.DataObject) -> None:
    """Its first pixel is the first that only the dy of the window reach, of the phase that comes first."""
    f = cook_toom(m, r, stride)
    dy = data.draw(st.lists(NUMBERS, min_size=len(f.dx_b_t[0]), max_size=len(f.dx_b_t[0])))
    g = data.draw(st.lists(NUMBERS, min_size=r, max_size=r))
    products = [x * y for x, y in zip(times(f.g, g[::-1]), times(f.dx_b_t, dy), strict=True)]
    dx = [Fraction(0)] * (stride * (len(dy) - 1) + r)
    for i, j in product(range(len(dy)), range(r)):
        dx[stride * i + j] += dy[i] * g[j]
    first = stride * (-(-r // stride) - 1) - f.late
    assert times(f.dx_a_t, products) == dx[first : first + stride * m]


@pytest.mark.parametrize("stride", [0, 4])
def test_a_stride_that_passes_over_pixels_is_refused(stride: int) -> None:
    with pytest.raises(ValueError, match="needs a stride from 1 to 3; given is"):
        cook_toom(2, 3, stride)


@pytest.mark.parametrize(("m", "r"), USED)
def test_tile_transforms_are_exact_in_float32(m: int, r: int) -> None:
    """So that rounding happens in sums only."""
    f = cook_toom(m, r)
    for row in (*f.a_t, *f.b_t):
        assert all(Fraction(float(np.float32(float(x)))) == x for x in row)


@pytest.mark.parametrize(("m", "r"), USED)
def test_rows_of_a_pair_of_points_differ_in_the_signs_of_alternate_entries(m: int, r: int) -> None:
    f = cook_toom(m, r)
    for matrix in (f.b_t, f.g, tuple(zip(*f.a_t, strict=True))):
        for plus, minus in zip(matrix[1:-1:2], matrix[2:-1:2], strict=True):
            alternating = tuple(x * (-1) ** i for i, x in enumerate(plus))
            assert minus in (alternating, tuple(-x for x in alternating))


def test_customary_points_give_the_published_matrices() -> None:
    """F(4, 3) as in Lavin and Gray (2016), section 4.3."""
    f = cook_toom(4, 3, points=CUSTOMARY)
    assert [[int(x) for x in row] for row in f.b_t] == [
        [4, 0, -5, 0, 1, 0],
        [0, -4, -4, 1, 1, 0],
        [0, 4, -4, -1, 1, 0],
        [0, -2, -1, 2, 1, 0],
        [0, 2, -1, -2, 1, 0],
        [0, 4, 0, -5, 0, 1],
    ]
    assert [[int(24 * x) for x in row] for row in f.g] == [
        [6, 0, 0],
        [-4, -4, -4],
        [-4, 4, -4],
        [1, 2, 4],
        [1, -2, 4],
        [0, 0, 24],
    ]


@pytest.mark.parametrize(
    ("m", "r", "points"),
    [(4, 3, CUSTOMARY[:4]), (2, 3, CUSTOMARY), (2, 3, (Fraction(1),) * 3), (9, 9, None), (0, 3, ())],
)
def test_unsuitable_points_are_refused(m: int, r: int, points: tuple[Fraction, ...] | None) -> None:
    with pytest.raises(ValueError, match=r"different points; given"):
        cook_toom(m, r, points=points)
