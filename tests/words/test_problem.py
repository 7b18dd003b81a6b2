"""Convolution problems: shapes as torch's own, impossible ones refused as torch refuses them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation

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


@settings(max_examples=300, deadline=None)
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"c": 0}, "c is 0; it must be at least 1"),
        ({"stride": (0, 1)}, r"stride is \(0, 1\)"),
        ({"padding": (0, -1)}, r"padding is \(0, -1\)"),
        ({"dilation": (0, 1)}, r"dilation is \(0, 1\)"),
        ({"groups": 4}, "groups is 4; it must divide C=4 and K=6"),
        ({"r": 10}, "the filter covers 10x2 but the padded input is only 9x8"),
        ({"dtype": "int8"}, "'int8'; allowed are float64, float32"),
    ],
)
def test_refusals_say_what_is_wrong(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        ConvProblem(Operation.FORWARD, **SIZES | change)


def test_filter_as_large_as_the_padded_input_fits_exactly() -> None:
    problem = ConvProblem(Operation.FORWARD, **SIZES | {"r": 11, "padding": (1, 0)})
    assert problem.y_shape(1) == (1, 6, 1, 7)


def test_for_people() -> None:
    problem = ConvProblem(
        Operation.BACKWARD_DATA, **SIZES, stride=(2, 1), groups=2, memory_format=MemoryFormat.CHANNELS_LAST
    )
    assert str(problem) == "backward_data 4x9x8 -> 6, 3x2, stride 2x1, groups 2, float32 channels_last"
