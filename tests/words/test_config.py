"""A config's own rules."""

from __future__ import annotations

import pytest

from mucudnn.words.config import DEFAULT_MAX_RELATIVE_ERROR, TF32_MAX_RELATIVE_ERROR, Config
from mucudnn.words.errors import InvalidInputError, first_line


@pytest.mark.parametrize(
    ("numerics", "rounds"),
    [
        ("", False),
        ("tf32", True),
        ("tf32 deterministic benchmark=10", True),
        ("tf32 matmul-tf32", True),
        ("no-tf32", False),
        ("no-tf32 matmul-tf32", False),
        ("tf32 NVIDIA_TF32_OVERRIDE=0", False),
        ("tf32 NVIDIA_TF32_OVERRIDE=0 matmul-tf32", False),
        ("tf32 NVIDIA_TF32_OVERRIDE=1", True),
        ("tf32 no-cudnn", False),
        ("tf32 no-cudnn matmul-tf32", True),
        ("no-tf32 no-cudnn matmul-tf32", True),
        ("tf32 NVIDIA_TF32_OVERRIDE=0 no-cudnn matmul-tf32", False),
    ],
)
def test_errors_of_tf32_are_allowed_where_torchs_own_convolution_rounds_to_it(numerics: str, rounds: bool) -> None:
    expected = TF32_MAX_RELATIVE_ERROR if rounds else DEFAULT_MAX_RELATIVE_ERROR["float32"]
    assert Config().error_bound("float32", numerics) == expected
    for dtype in ("float64", "float16", "bfloat16"):
        assert Config().error_bound(dtype, numerics) == DEFAULT_MAX_RELATIVE_ERROR[dtype]
    assert Config(max_relative_error=1e-7).error_bound("float32", numerics) == 1e-7


def test_time_for_a_first_call() -> None:
    assert Config().first_call_time_s == 1.0
    assert Config(first_call_time="200ms").first_call_time_s == 0.2
    assert Config(first_call_time=None).first_call_time_s is None
    with pytest.raises(InvalidInputError, match="first_call_time"):
        Config(first_call_time=-1)
    with pytest.raises(InvalidInputError, match="background"):
        Config(background="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "fits"),
    [
        ({}, True),
        ({"workspace_limit": "64MiB"}, True),
        ({"workspace_limit": "8MiB"}, False),
        ({"workspace_limit": "8MiB", "limits_torch": False}, True),
        ({"limits_torch": True}, False),
        ({"workspace_budget": "64MiB"}, False),
    ],
)
def test_which_limits_hold_torchs_own(given: dict[str, object], fits: bool) -> None:
    assert Config(**given).baseline_exempt is fits


# Errors, told.


def test_the_first_line_says_what_happened() -> None:
    assert first_line(RuntimeError("out of memory\na stack trace")) == "out of memory"
    assert first_line(RuntimeError()) == "RuntimeError"
