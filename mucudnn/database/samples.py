"""Raw samples as they are stored: float64, one after another, so that a median computed again is the one beside them.

In a row (``schema.ROW_COLUMNS``) they are these bytes, in exports a list of seconds.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import isfinite
from typing import Any

from mucudnn.database.schema import SAMPLE_COLUMNS
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.samples import MeasuredSamples, PairedSamples
from mucudnn.words.values import shown

_BYTES = struct.calcsize("<d")


def packed(samples: Sequence[float]) -> bytes:
    """Return samples as they are stored. They may have any values."""
    return struct.pack(f"<{len(samples)}d", *samples)


def unpacked(stored: bytes) -> tuple[float, ...]:
    """Invert ``packed``."""
    return struct.unpack(f"<{len(stored) // _BYTES}d", stored)


def are_sound(stored: object) -> bool:
    """Whether they are samples as ``packed`` makes them: at least one, each finite and at least 0."""
    if type(stored) is not bytes or not stored or len(stored) % _BYTES:
        return False
    samples = unpacked(stored)
    return all(map(isfinite, samples)) and min(samples) >= 0


def readable(value: object) -> object:
    """Return stored samples as a list of seconds; any other value as it is."""
    return list(unpacked(value)) if type(value) is bytes and value and not len(value) % _BYTES else value


def columns(raw: MeasuredSamples | PairedSamples | None) -> dict[str, Any]:
    """Return what was measured by the columns of its row: none where nothing was kept.

    Raises ``InvalidInputError`` for samples that there cannot be.
    """
    if raw is None:
        return {}
    values = {field.name: getattr(raw, field.name) for field in fields(raw)}
    found = {name: packed(value) if name in SAMPLE_COLUMNS else value for name, value in values.items()}
    if wrong := [name for name in SAMPLE_COLUMNS if name in found and not are_sound(found[name])]:
        raise InvalidInputError(
            f"{wrong[0]} is {shown(values[wrong[0]])}; it must be seconds, each finite and at least 0"
        )
    return found


def for_export(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with its samples as lists."""
    return {**row, **{name: readable(row[name]) for name in SAMPLE_COLUMNS}}


def from_export(row: Mapping[str, Any]) -> dict[str, Any]:
    """Invert ``for_export``. What are no samples stays as it is, and is refused by the table."""
    given = {name: row[name] for name in SAMPLE_COLUMNS if isinstance(row.get(name), list)}
    return {**row, **{name: _stored(samples) for name, samples in given.items()}}


def _stored(samples: list[Any]) -> object:
    """Return the samples packed; a list with something else than numbers that are allowed stays as it is."""
    if not all(type(one) in (float, int) for one in samples):
        return samples
    try:
        stored = packed(samples)
    except struct.error:  # a whole number that no float64 holds
        return samples
    return stored if are_sound(stored) else samples
