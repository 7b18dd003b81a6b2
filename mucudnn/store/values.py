"""How values are stored: samples as bytes; the keys of whole runs, and the seconds of timings, as JSON."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import groupby
from math import inf, isfinite

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import MOST_SAMPLES
from mucudnn.core.records import MicroConfig
from mucudnn.core.values import shown


def packed(name: str, samples: Sequence[float]) -> bytes:
    """Return timings as bytes of little-endian float64, which preserves them exactly.

    Raises ``InvalidInputError`` for values that are not times.
    """
    try:
        if all(0 <= sample < inf for sample in samples):
            return struct.pack(f"<{len(samples)}d", *samples)
    except (TypeError, OverflowError, struct.error):
        pass
    raise InvalidInputError(f"{name} is {shown(samples)}; it must be seconds, each finite and at least 0")


def unpacked(stored: bytes) -> list[float]:
    """Return the timings in bytes made by ``packed``."""
    return [*struct.unpack(f"<{len(stored) // 8}d", stored)]


def configuration_key(micro_configs: Sequence[MicroConfig], versions: Mapping[str, int], *, fresh: bool = False) -> str:
    """Return JSON with a list ``[algorithm, version, micro-batch size, count]`` for each series of equal micro-configs.

    fresh: whether each call allocates its workspace instead of keeping one; then all lists end with ``"fresh"``.
    """
    runs = [(micro_config, len(list(equal))) for micro_config, equal in groupby(micro_configs)]
    ending = ["fresh"] if fresh else []
    return json.dumps([[m.algorithm, versions[m.algorithm], m.micro_batch_size, count, *ending] for m, count in runs])


def micro_configs_from(key: str, versions: Mapping[str, int], *, fresh: bool = False) -> tuple[MicroConfig, ...] | None:
    """Return the micro-configs (algorithm and micro-batch size) in a key made by ``configuration_key``.

    Returns None for an invalid key, and for a key with other versions or another kind of workspace.
    """
    with suppress(InvalidInputError):
        micro_configs, found, is_fresh = whole_run_from(key)
        if is_fresh == fresh and found.items() <= versions.items():
            return micro_configs
    return None


@lru_cache(maxsize=4096)
def whole_run_from(key: str) -> tuple[tuple[MicroConfig, ...], Mapping[str, int], bool]:
    """Parse a key made by ``configuration_key``; return its micro-configs, its versions, and whether it is ``fresh``.

    Raises ``InvalidInputError`` for any other text.
    """
    with suppress(ValueError, TypeError, LookupError):
        parts = json.loads(key)
        versions, fresh = {part[0]: part[1] for part in parts}, parts[0][4:] == ["fresh"]
        if sum(size * count for _, _, size, count, *_ in parts) > MOST_SAMPLES:
            raise ValueError
        micro_configs = tuple(MicroConfig(name, size) for name, _, size, count, *_ in parts for _ in range(count))
        if configuration_key(micro_configs, versions, fresh=fresh) == key:
            return micro_configs, versions, fresh
    raise InvalidInputError(
        f"configuration is {shown(key)}; it must be as mucudnn writes it: [algorithm, version, micro-batch size, "
        "count] for each run of equal micro-batches"
    )


def seconds_from(text: str) -> list[list[float]]:
    """Return the samples of each call that was timed, from JSON. Raises ``InvalidInputError`` for any other text."""
    with suppress(ValueError, TypeError):
        found = json.loads(text)
        if found and all(of_call and all(isfinite(one) and one >= 0 for one in of_call) for of_call in found):
            return [[float(one) for one in of_call] for of_call in found]
    raise InvalidInputError(f"seconds is {shown(text)}; it must be a list of seconds, at least 0, for each call")
