"""Keys of whole runs (timed complete calls) in the database: micro-configs and special conditions, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import groupby, product
from typing import Any

from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import MOST_SAMPLES
from mucudnn.words.results import (
    ACTIVATIONS,
    How,
    MicroConfig,
    WithEpilogue,
    WithFreshWorkspace,
)
from mucudnn.words.values import shown

_EPILOGUES = {
    str(one): one
    for one in (WithEpilogue(*of) for of in product((None, *ACTIVATIONS), (False, True)) if of != (None, False))
}


def configuration_key(micro_configs: Sequence[MicroConfig], versions: Mapping[str, int], how: How = None) -> str:
    """Return JSON with a list ``[algorithm, version, micro-batch size, count]`` for each series of equal micro-configs.

    With a fresh workspace all lists end with ``"fresh"``. With
    an epilogue (operations after the convolution) all lists end with its text, such as ``"with ReLU"``.
    """
    parts = _parts(micro_configs, versions)
    if how is not None:
        parts = [[*part, "fresh" if isinstance(how, WithFreshWorkspace) else str(how)] for part in parts]
    return json.dumps(parts)


def micro_configs_from(key: str, versions: Mapping[str, int], how: How = None) -> tuple[MicroConfig, ...] | None:
    """Return the micro-configs (algorithm and micro-batch size) in a key made by ``configuration_key``.

    Returns None for an invalid key, and for a key with other versions or conditions.
    """
    with suppress(InvalidInputError):
        micro_configs, found, special = whole_run_from(key)
        if special == how and found.items() <= versions.items():
            return micro_configs
    return None


@lru_cache(maxsize=4096)
def whole_run_from(key: str) -> tuple[tuple[MicroConfig, ...], Mapping[str, int], How]:
    """Parse a key made by ``configuration_key``; return its micro-configs, versions and special condition.

    Raises ``InvalidInputError`` for any other text.
    """
    with suppress(ValueError, TypeError, LookupError):
        every = json.loads(key)
        versions = {part[0]: part[1] for part in every}
        (*_, ending) = every[0]
        how: How = WithFreshWorkspace() if ending == "fresh" else _EPILOGUES.get(ending)
        micro_configs = _expanded(every)
        if configuration_key(micro_configs, versions, how) == key:
            return micro_configs, versions, how
    raise InvalidInputError(
        f"configuration is {shown(key)}; it must be as mucudnn writes it: [algorithm, version, micro-batch size, "
        "count] for each run of equal micro-batches"
    )


def _expanded(parts: Sequence[Sequence[Any]]) -> tuple[MicroConfig, ...]:
    if sum(size * count for _, _, size, count, *_ in parts) > MOST_SAMPLES:
        raise ValueError
    return tuple(MicroConfig(name, size) for name, _, size, count, *_ in parts for _ in range(count))


def _parts(micro_configs: Sequence[MicroConfig], versions: Mapping[str, int]) -> list[list[str | int]]:
    runs = [(micro_config, len(list(equal))) for micro_config, equal in groupby(micro_configs)]
    return [[m.algorithm, versions[m.algorithm], m.micro_batch_size, count] for m, count in runs]
