"""The data of the pictures of each layer, which the page draws when a layer is picked: lists of rounded numbers."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas

from mucudnn.bench.folders.candidates import COSTS
from mucudnn.bench.pages.drawing import with_series
from mucudnn.bench.pages.material import Material, Subject, name_of
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.results import counts_in

MOST_SAMPLES = 31  # of a contestant: of more samples those at even steps through the sorted ones
_DIGITS = 4
_MIB = 2**20
_Data = dict[str, Any]
_Record = Mapping[Hashable, Any]


@dataclass(frozen=True, slots=True)
class _Names:
    """Names that are written once, and numbers for them."""

    numbers: dict[str, int] = field(default_factory=dict)

    def number(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers))


def layer_pictures(material: Material) -> _Data:
    """Return the data of all layers, for ``templates/layers.js``; ``layers`` is empty where rows have no layers.

    contestants, algorithms: names, to which numbers refer. layers: each with ``name`` and ``parts``, one for each
    operation and memory format: ``title``, ``n`` (the mini-batch); ``samples``: [contestant, ms, ...] a contestant;
    ``cuts``: [contestant, [algorithm, micro-batch size, count], ...] a configuration; ``front``: [MiB, ms] a point of
    the desirable set; ``candidates``: [algorithm, micro-batch size, ms of setup, ms of a step, MiB, error] each, the
    error being negative where it bars the algorithm.
    """
    contestants, algorithms = _Names(), _Names()
    layers: dict[str, list[_Data]] = {}
    if "layer" in material.rows and len(material.rows):
        tuned = {subject.name: subject for subject in material.subjects}  # names are told apart by layer
        rows = with_series(material.rows)
        for _, of in rows.groupby(list(material.subject_columns), sort=False, dropna=False):
            first = of.iloc[0].to_dict()
            part = _part(first, of, tuned.get(name_of(first)), contestants, algorithms)
            layers.setdefault(str(first["layer"]), []).append(part)
    return {
        "contestants": [*contestants.numbers],
        "algorithms": [*algorithms.numbers],
        "layers": [{"name": name, "parts": parts} for name, parts in layers.items()],
    }


def _part(
    first: _Record, rows: pandas.DataFrame, subject: Subject | None, contestants: _Names, algorithms: _Names
) -> _Data:
    """Return what is drawn of one subject. first: its first row."""
    without_layer = {name: value for name, value in first.items() if name != "layer"}
    title = name_of(without_layer) if "operation" in first else ""
    part: _Data = {"title": title.replace("_", " "), "n": int(first.get("batch_size", 0)), "samples": [], "cuts": []}
    for row in _records(rows, ("series", "samples_s", "configuration")):
        number = contestants.number(row["series"])
        part["samples"].append([number, *(_rounded(each * 1e3) for each in _some(row["samples_s"]))])
        part["cuts"].append([number, *_cuts(row, algorithms)])
    part["samples"] = [one for one in part["samples"] if len(one) > 1]
    part["cuts"] = [one for one in part["cuts"] if len(one) > 1]
    if subject is not None:
        points = zip(subject.desirable["workspace_bytes"], subject.desirable["time_s"], strict=True)
        part["front"] = [[_rounded(size / _MIB), _rounded(time_s * 1e3)] for size, time_s in points]
        records = _records(subject.measured, (*COSTS, "algorithm", "micro_batch_size", "relative_error", "is_allowed"))
        part["candidates"] = [_candidate(record, algorithms) for record in records]
    return part


def _records(rows: pandas.DataFrame, columns: Sequence[str]) -> Iterator[_Record]:
    """Yield these columns of each row: of a few rows quicker than by pandas, which seeks columns by place."""
    for values in zip(*(rows[name].tolist() for name in columns), strict=True):
        yield dict(zip(columns, values, strict=True))


def _some(samples_s: list[float]) -> list[float]:
    if len(samples_s) <= MOST_SAMPLES:
        return samples_s
    places = np.linspace(0, len(samples_s) - 1, MOST_SAMPLES).round().astype(int)
    return [sorted(samples_s)[place] for place in places]


def _cuts(row: _Record, algorithms: _Names) -> list[list[int]]:
    """Return the pieces of the mini-batch; none where there is no configuration, or its text is not understood."""
    if not isinstance(row["configuration"], str):
        return []
    try:
        counts = counts_in(row["configuration"])
    except InvalidInputError:
        return []
    return [[algorithms.number(of.algorithm), of.micro_batch_size, count] for of, count in counts]


def _candidate(record: _Record, algorithms: _Names) -> list[float]:
    error = record["relative_error"]
    error = 0.0 if error is None or error != error else error
    return [
        algorithms.number(record["algorithm"]),
        record["micro_batch_size"],
        *(_rounded(record[name] * 1e3) for name in ("setup_s", "step_s")),
        _rounded((record["prepared_bytes"] + record["scratch_bytes"]) / _MIB),
        _rounded(error if record["is_allowed"] else -error),
    ]


def _rounded(value: float) -> float:
    """Return the value with as many digits as can be seen; whole numbers without a point.

    >>> _rounded(12.34567), _rounded(0.0), _rounded(3.0)
    (12.35, 0, 3)
    """
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short.is_integer() else short
