"""Computes what dividing gains over our best undivided algorithm, by layer and limit, as the authors' bars show it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas

from mucudnn.bench.folders.speedups import speedup_of
from mucudnn.bench.pages.layer_rows import OPERATIONS
from mucudnn.bench.pages.measured import LAYER, has_problems
from mucudnn.bench.sources.published import DIVIDED_GEOMETRY, published_gains

_UNDIVIDED, _OURS = "undivided", "mucudnn"
_NO_LIMIT = -1
_Samples = dict[str, list[float]]  # by operation


def gains(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Return a row for each layer, policy and limit, of what ``measured`` returned; in its order.

    Columns: ``layer``, those of ``LAYER``, ``policy``, ``limit_bytes``; ``gain``, the sum of the undivided's medians
    over that of ours, with ``gain_low`` and ``gain_high``: see ``speedup_of``. All operations of the layer that both
    were timed on together; NaN where one was timed on fewer.
    """
    if not has_problems(rows):
        return pandas.DataFrame()
    return pandas.DataFrame(list(_gains(rows.assign(layer=rows["layer"] if "layer" in rows else rows["kind"]))))


def _gains(rows: pandas.DataFrame) -> Iterator[dict[str, Any]]:
    for key, (undivided, every) in _timed(rows).items():
        for (policy, limit), ours in every.items():
            if limit not in undivided:
                continue
            samples = undivided[limit], ours
            names = [name for name in OPERATIONS if any(name in of for of in samples)]
            found = speedup_of(*([of.get(name, ()) for name in names] for of in samples))
            yield {
                **dict(zip(("layer", *LAYER), key, strict=True)),
                "policy": policy,
                "limit_bytes": None if limit == _NO_LIMIT else limit,
                "gain": found.ratio,
                "gain_low": found.low,
                "gain_high": found.high,
            }


def _timed(rows: pandas.DataFrame) -> Mapping[tuple[Any, ...], tuple[dict[Any, _Samples], dict[Any, _Samples]]]:
    """Return for each layer the samples of the undivided by limit, and of ours by policy and limit."""
    rows = rows.dropna(subset=["layer", "policy"])
    layers = rows[["layer", *LAYER]].itertuples(index=False, name=None)
    names = ("contestant", "policy", "operation", "samples_s")
    limits = rows["limit_bytes"].fillna(_NO_LIMIT)
    found: dict[tuple[Any, ...], tuple[dict[Any, _Samples], dict[Any, _Samples]]] = {}
    every = zip(layers, limits, *(rows[name] for name in names), strict=True)
    for layer, limit, contestant, policy, operation, samples in every:
        undivided, ours = found.setdefault(layer, ({}, {}))
        if contestant == _UNDIVIDED:
            undivided.setdefault(limit, {})[operation] = samples
        elif contestant == _OURS:
            ours.setdefault((policy, limit), {})[operation] = samples
    return found


def published_gains_of(layers: pandas.DataFrame) -> pandas.DataFrame:
    """Return the published bars of what ``gains`` returned: ``layer``, and a column for each limit.

    Only layers that the authors' have too: those of the same geometry, whatever their mini-batch.
    """
    ours = layers.drop_duplicates("layer")[["layer", *DIVIDED_GEOMETRY]]
    return ours.merge(published_gains(), on=list(DIVIDED_GEOMETRY)).drop(columns=list(DIVIDED_GEOMETRY))
