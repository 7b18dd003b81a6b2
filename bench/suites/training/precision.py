"""What a training step computes in. Loads no torch: the command line lists it."""

from __future__ import annotations

from enum import StrEnum


class Precision(StrEnum):
    """``TF32``: float32, of which matrix products and convolutions round factors to 10 bits of mantissa. ``BFLOAT16``:
    autocast, with parameters in float32.
    """

    TF32 = "tf32"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


PRECISIONS = {"cuda": tuple(Precision), "cpu": (Precision.FLOAT32, Precision.BFLOAT16)}
"""Those that a type of device has."""
