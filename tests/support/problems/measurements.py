"""Measurements made up of known costs."""

from __future__ import annotations

from typing import Any

from mucudnn.core.records import Measurement, MicroConfig


def measured(
    algorithm: str,
    size: int,
    step_s: float,
    scratch_bytes: int = 0,
    *,
    setup_s: float = 0.0,
    prepared_bytes: int = 0,
    relative_error: float = 1e-7,
    **others: Any,
) -> Measurement:
    """Of one algorithm on micro-batches of one size."""
    return Measurement(
        MicroConfig(algorithm, size), setup_s, step_s, prepared_bytes, scratch_bytes, relative_error, **others
    )
