"""Storage format of raw samples (timings): little-endian float64, which preserves their median exactly."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import fields
from math import inf
from typing import Any

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.samples import MeasuredSamples, PairedSamples
from mucudnn.core.values import shown
from mucudnn.store.schema import SAMPLE_COLUMNS


def packed(name: str, samples: Sequence[float]) -> bytes:
    """Return timings as bytes of little-endian float64. Raises ``InvalidInputError`` for values that are not times."""
    try:
        if all(0 <= sample < inf for sample in samples):
            return struct.pack(f"<{len(samples)}d", *samples)
    except (TypeError, OverflowError, struct.error):
        pass
    raise InvalidInputError(f"{name} is {shown(samples)}; it must be seconds, each finite and at least 0")


def unpacked(stored: bytes) -> list[float]:
    """Return the timings in bytes made by ``packed``."""
    return [*struct.unpack(f"<{len(stored) // 8}d", stored)]


def sample_columns(raw: MeasuredSamples | PairedSamples | None) -> dict[str, Any]:
    """Return the fields of raw samples (timings) as columns of a database row; an empty dict for None.

    Raises ``InvalidInputError`` for samples that are not times.
    """
    values = {} if raw is None else {field.name: getattr(raw, field.name) for field in fields(raw)}
    return {name: packed(name, value) if name in SAMPLE_COLUMNS else value for name, value in values.items()}
