"""Reads the JSON file of a benchmark (``--json``) as a result folder is read, as far as its columns allow.

Such a file has medians and no samples: each time is the only sample of its row, and no interval is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Any

from mucudnn.bench.contests.names import TORCH
from mucudnn.bench.folders.header import Header, environment_of, read_object, require_version
from mucudnn.bench.folders.reading import ResultFolder, folder_of_lines
from mucudnn.bench.folders.rows import COLUMNS, Line
from mucudnn.words.errors import InvalidInputError

_Record = Mapping[str, Any]
_OURS = "mucudnn"


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of file. key: what tells it from others, beside ``of_each``, a key of each object in that list.

    rows: yields groups of rows that were measured in turns, with the columns of the subject.
    """

    benchmark: str
    key: str
    of_each: str
    subject: tuple[str, ...]
    rows: Callable[[_Record], Iterator[list[Line]]]
    is_timed: bool = True


def read_result_file(path: Path) -> ResultFolder:
    """Read the file of a benchmark.

    Raises ``InvalidInputError`` with the file, and the line where it is no JSON, for what no benchmark of mucudnn wrote
    or has no rows.
    """
    record = read_object(path)
    require_version(path, record)
    kind = next((one for one in _KINDS if _is_of(one, record)), None)
    if kind is None:
        raise InvalidInputError(
            f"{path} has no rows that can be shown: name a JSON file of mucudnn bench {', '.join(_names())}, or a "
            "folder that a benchmark wrote with --out"
        )
    try:
        header = _header(kind, record)
        lines = [
            {**dict.fromkeys(COLUMNS), **line, "turns": turns, "rows_in_turns": len(group), "load": None}
            for turns, group in enumerate(kind.rows(record), start=1)
            for line in group
        ]
    except KeyError as error:
        raise InvalidInputError(f"{path} has no {error}; mucudnn bench {kind.benchmark} wrote no such file") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidInputError(f"{path} has a value that is not understood: {error}") from None
    problem = f"{path} is a file of medians without samples: nothing tells how they are spread"
    return folder_of_lines(path, header, lines, (problem,) if kind.is_timed else ())


def _is_of(kind: _Kind, record: _Record) -> bool:
    found = record.get(kind.key)
    if isinstance(found, list):
        return bool(found) and isinstance(found[0], dict) and kind.of_each in found[0]
    return isinstance(found, dict) and kind.of_each in found


def _names() -> Iterator[str]:
    yield from dict.fromkeys(kind.benchmark for kind in _KINDS)


def _header(kind: _Kind, record: _Record) -> Header:
    config = record.get("config") or {}
    return Header(
        benchmark=kind.benchmark,
        source=str(record.get("network", "")),
        settings={name: value for name, value in config.items() if name != "database"},
        environment=environment_of(record["environment"]),
        subject_columns=kind.subject,
        wanted=0,
        is_timed=kind.is_timed,
        mucudnn=str(record["mucudnn"]),
        date=datetime.fromisoformat(record["date"]),
        identity="",
    )


def _row(contestant: str, time_s: float | None, subject: _Record, **more: Any) -> Line:
    """Return a row with one time; the reason where there is none, or it is no time."""
    if time_s is not None and isfinite(time_s) and time_s > 0:
        return {**subject, "contestant": contestant, "samples_s": [time_s], **more}
    reason = more.pop("failure", None) or "the file has no time"
    return {**subject, "contestant": contestant, "samples_s": [], **more, "failure": reason}


def _network(record: _Record) -> Iterator[list[Line]]:
    for problem in record["problems"]:
        for memory_format, ours in problem["formats"].items():
            subject = {name: problem[name] for name in ("layer", "operation", "batch_size")}
            subject |= {"memory_format": memory_format, "count": problem["count"]}
            configuration = {name: ours[name] for name in ("configuration", "workspace_bytes", "relative_error")}
            end = f"_{memory_format}_s"
            names = [name.removesuffix(end) for name in problem if name.endswith(end)]
            yield [
                _row(name.replace("_", "-"), problem[name + end], subject, **(configuration if name == _OURS else {}))
                for name in names
            ]


def _training(record: _Record) -> Iterator[list[Line]]:
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for cell in record["cells"]:
        subject = {name: cell[name] for name in ("network", "batch_size", "precision", "memory_format")}
        subject["how"] = cell.get("how", "optimize")
        row = _row(cell["variant"], cell["time_s"], subject, peak_bytes=cell["peak_bytes"], failure=cell["failure"])
        groups.setdefault(tuple(subject.values()), []).append(row)
    yield from groups.values()


def _filters(record: _Record) -> Iterator[list[Line]]:
    every = [("the whole model", record["whole"]), *((layer["layer"], layer) for layer in record["layers"])]
    for layer, times in every:
        subject = {"network": record["network"], "part": "kept filters", "layer": layer}
        subject["batch_size"] = record["input_shape"][0]
        names = {TORCH: "torch", "mucudnn-not-kept": "not_kept", _OURS: "kept"}
        yield [_row(name, times[f"{key}_s"], subject) for name, key in names.items()]
    if "runtimes" in record:
        yield from _runtimes(record)


def _runtimes(record: _Record) -> Iterator[list[Line]]:
    subject = {"network": record["network"], "part": "runtimes", "layer": "the whole model"}
    subject["batch_size"] = record["input_shape"][0]
    yield [
        _row(
            *(one["runtime"], one["time_s"], subject),
            version=one["version"],
            relative_difference=one["relative_difference"],
            failure=one["failure"],
        )
        for one in record["runtimes"]
    ]


def _memory(record: _Record) -> Iterator[list[Line]]:
    subject = {"network": record["network"], "batch_size": record["input_shape"][0]}
    for one in record["variants"]:
        bound = one["workspace_budget"] or one["workspace_limit"]
        keys = {name: name.replace("-", "_") for name in (TORCH, one.get("variant", _OURS))}
        yield [
            _row(
                *(name, one[f"{key}_step_s"], {**subject, "bound": bound}),
                allocator_peak_bytes=one[f"{key}_allocator_bytes"],
                resident_peak_bytes=one[f"{key}_resident_bytes"],
                failure=None if name == TORCH else one.get("failure") or None,
            )
            for name, key in keys.items()
        ]


def _solver(record: _Record) -> Iterator[list[Line]]:
    for one in record["rows"]:
        more = {"slowest_s": one["slowest_s"], "bar_s": one["bar_s"]}
        yield [_row(_OURS, one["median_s"], {"what": one["what"]}, **more)]


def _data_parallel(record: _Record) -> Iterator[list[Line]]:
    groups: dict[float | None, list[Line]] = {}
    columns = ("ranks", "batch_size", "dtype", "memory_format", "communication", "bucket_cap_mb")
    for one in record["steps"]:
        subject = {"network": one["source"], **{name: one[name] for name in columns}}
        more = {name: one[name] for name in ("alone_s", "exposed_s", "compared", "equal")}
        groups.setdefault(one["bucket_cap_mb"], []).append(_row(one["convolutions"], one["step_s"], subject, **more))
    yield from groups.values()


def _overhead(record: _Record) -> Iterator[list[Line]]:
    for one in record["overheads"]:
        subject = {name: one[name] for name in ("size", "operation", "algorithm", "micro_batch_size", "in_graph")}
        yield [_row("steps alone", one["steps_s"], subject), _row("divided call", one["call_s"], subject)]


def _errors(record: _Record) -> Iterator[list[Line]]:
    for one in record["rows"]:
        more = {name: value for name, value in one.items() if name not in ("variant", "gradients")}
        subject = {"network": record["network"], "batch_size": record["batch_size"]}
        yield [{**subject, **more, "contestant": one["variant"], "samples_s": [], "relative_error": one["gradients"]}]


def _numerics(record: _Record) -> Iterator[list[Line]]:
    for one in record["rows"]:
        problem = one["problem"]
        subject = {"operation": problem["operation"], "filter": f"{problem['r']}x{problem['s']}"}
        subject |= {"image": f"{problem['h']}x{problem['w']}", "dtype": problem["dtype"]}
        more = {name: value for name, value in one.items() if name not in ("algorithm", "problem")}
        yield [{**subject, **more, "contestant": one["algorithm"], "samples_s": []}]


_OF_STEPS = ("network", "batch_size", "precision", "memory_format", "how")
_OF_RANKS = ("network", "ranks", "batch_size", "dtype", "memory_format", "communication", "bucket_cap_mb")
_OF_CALLS = ("network", "part", "layer", "batch_size")
_KINDS = (
    _Kind("network", "problems", "formats", ("layer", "operation", "batch_size", "memory_format"), _network),
    _Kind("training", "cells", "variant", _OF_STEPS, _training),
    _Kind("inference", "whole", "kept_s", _OF_CALLS, _filters),
    _Kind("inference", "runtimes", "runtime", _OF_CALLS, _runtimes),
    _Kind("memory", "variants", "torch_step_s", ("network", "batch_size", "bound"), _memory),
    _Kind("solver", "rows", "median_s", ("what",), _solver),
    _Kind("data-parallel", "steps", "convolutions", _OF_RANKS, _data_parallel),
    _Kind(
        "overhead", "overheads", "call_s", ("size", "operation", "algorithm", "micro_batch_size", "in_graph"), _overhead
    ),
    _Kind("errors", "rows", "worst_parameter", ("network", "batch_size", "memory_format"), _errors, is_timed=False),
    _Kind("numerics", "rows", "nan_results", ("operation", "filter", "image", "dtype"), _numerics, is_timed=False),
)
