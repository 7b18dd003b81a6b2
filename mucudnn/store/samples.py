"""Storage format of raw samples (timings): little-endian float64, which preserves their median exactly."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import inf

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.records import Comparison, Measurement
from mucudnn.core.values import shown
from mucudnn.store.schema import SAMPLES


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


def sample_columns(result: Measurement | Comparison) -> dict[str, bytes]:
    """Return the raw samples (timings) of a new result as columns of a database row.

    Raises ``InvalidInputError`` for samples that are not times.
    """
    names = SAMPLES["measurement" if isinstance(result, Measurement) else "verification"]
    return {name: packed(name, samples) for name in names if (samples := getattr(result, name))}
