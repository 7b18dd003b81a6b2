"""Convolution problems, and sizes, times and bandwidths as people write them."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mucudnn.cli.scale import parse_bandwidth
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import MOST_ELEMENTS, ConvProblem, MemoryFormat, Operation
from mucudnn.core.values import exact_bytes, format_bytes, format_seconds, parse_bytes, parse_seconds

SIZES: dict[str, Any] = {"c": 4, "h": 9, "w": 8, "k": 6, "r": 3, "s": 2}


def pairs(low: int, high: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(low, high), st.integers(low, high))


GEOMETRIES = st.fixed_dictionaries(
    {name: st.integers(1, 9) for name in ("h", "w")}
    | {name: st.integers(1, 4) for name in ("c", "k", "r", "s", "groups")}
    | {"stride": pairs(1, 3), "padding": pairs(0, 3), "dilation": pairs(1, 3)}
)


def torch_shape(geometry: dict[str, Any], n: int) -> tuple[int, ...] | None:
    """(N, K, P, Q) as torch has it, None if it refuses."""
    g = geometry
    if g["c"] % g["groups"]:
        return None  # torch's filter has no shape then
    x = torch.empty(n, g["c"], g["h"], g["w"])
    w = torch.empty(g["k"], g["c"] // g["groups"], g["r"], g["s"])
    try:
        y = torch.nn.functional.conv2d(x, w, None, g["stride"], g["padding"], g["dilation"], g["groups"])
    except RuntimeError:
        return None
    return tuple(y.shape)


@settings(max_examples=100)
@given(GEOMETRIES, st.integers(1, 3))
def test_y_shape_is_torchs(geometry: dict[str, Any], n: int) -> None:
    expected = torch_shape(geometry, n)
    if expected is None:
        with pytest.raises(InvalidInputError, match="not a convolution"):
            ConvProblem(Operation.FORWARD, **geometry)
    else:
        assert ConvProblem(Operation.FORWARD, **geometry).y_shape(n) == expected


@given(GEOMETRIES, st.integers(1, 3))
def test_operations_share_shapes_and_work(geometry: dict[str, Any], n: int) -> None:
    if torch_shape(geometry, n) is None:
        return
    forward = ConvProblem(Operation.FORWARD, **geometry)
    for operation in Operation:
        problem = forward.with_operation(operation)
        assert problem.operation is operation
        assert (problem.x_shape(n), problem.w_shape(), problem.y_shape(n), problem.flops(n)) == (
            *(forward.x_shape(n), forward.w_shape(), forward.y_shape(n), forward.flops(n)),
        )


def test_flops_of_a_published_layer() -> None:
    """The second layer of VGG-16 does 1.85e9 multiply-adds an image."""
    problem = ConvProblem(Operation.FORWARD, 64, 224, 224, 64, 3, 3, padding=(1, 1))
    assert problem.flops(2) == 2 * 2 * 1_849_688_064


def test_groups_divide_the_work() -> None:
    whole = ConvProblem(Operation.FORWARD, **SIZES)
    assert ConvProblem(Operation.FORWARD, **SIZES, groups=2).flops(1) * 2 == whole.flops(1)


def test_for_people() -> None:
    problem = ConvProblem(
        Operation.BACKWARD_DATA, **SIZES, stride=(2, 1), groups=2, memory_format=MemoryFormat.CHANNELS_LAST
    )
    assert str(problem) == "backward_data 4x9x8 -> 6, 3x2, stride 2x1, groups 2, float32 channels_last"


# Bytes and seconds: what people write is understood exactly, or refused with what to write instead.


FACTORS = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}


@given(st.integers(0, 10**6), st.sampled_from(sorted(FACTORS)), st.sampled_from(["", " ", "  "]))
def test_binary_units_are_powers_of_1024(number: int, unit: str, space: str) -> None:
    assert parse_bytes(f"{number}{space}{unit}") == number * FACTORS[unit]
    assert parse_bytes(f"{number}{space}{unit.lower()}") == number * FACTORS[unit]


@given(st.none() | st.integers(0, 2**50))
def test_bytes_pass_through(value: int | None) -> None:
    assert parse_bytes(value) == value


def test_none_is_no_limit() -> None:
    assert parse_bytes("none") is None
    assert parse_bytes(" None ") is None
    assert parse_bytes("1.5KiB") == 1536
    assert format_bytes(None) == "no limit"


@given(st.integers(0, 2**50))
def test_printed_bytes_are_right_to_three_digits(value: int) -> None:
    number, unit = format_bytes(value).split()
    assert float(number) * FACTORS[unit] == pytest.approx(value, rel=6e-3)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("60s", 60.0),
        ("2min", 120.0),
        ("500ms", 0.5),
        ("5us", pytest.approx(5e-6)),
        ("1h", 3600.0),
        ("1.5", 1.5),
        (3, 3.0),
        (1e-9, 1e-9),
        ("1e-9s", 1e-9),
        ("none", None),
        (None, None),
    ],
)
def test_seconds(text: str | float | None, seconds: float | None) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("size", [2**53 + 1, 2**63 - 1])
def test_exact_bytes_are_read_back_exactly(size: int) -> None:
    """In float64 both are rounded, one of them to less than what was needed."""
    assert parse_bytes(exact_bytes(size).split()[0]) == size


def test_numbers_of_numpy_are_numbers() -> None:
    assert type(parse_bytes(np.int32(64))) is int
    assert type(parse_seconds(np.float32(0.5))) is float
    assert (parse_bytes(np.int32(64)), parse_seconds(np.float32(0.5))) == (64, 0.5)


def test_sizes_beyond_all_units_can_be_printed() -> None:
    assert format_bytes(10**400).endswith("0 GiB")
    assert format_seconds(inf) == "inf s"


def test_bandwidths_are_bytes_a_second_in_decimal_units_powers_of_1024_and_bits() -> None:
    units: dict[str, float] = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
    units |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
    units |= {"kbit": 1e3 / 8, "Mbit": 1e6 / 8, "Gbit": 1e9 / 8, "Tbit": 1e12 / 8}
    for unit, factor in units.items():
        assert parse_bandwidth(f"2.5{unit}/s") == parse_bandwidth(f" 2.5 {unit.lower()}/s ") == 2.5 * factor


def test_the_largest_operand_has_as_many_elements_as_32_bits_count() -> None:
    most: dict[str, Any] = {"c": 1, "h": 1, "w": MOST_ELEMENTS, "k": 1, "r": 1, "s": 1}
    assert ConvProblem(Operation.FORWARD, **most).countable_samples() == 1
    with pytest.raises(InvalidInputError, match=f"at most {MOST_ELEMENTS} are allowed"):
        ConvProblem(Operation.FORWARD, **most | {"w": MOST_ELEMENTS - 1, "padding": (0, 1)})
