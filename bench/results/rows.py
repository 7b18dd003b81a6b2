"""The file ``rows.jsonl``: the results of one contestant (an implementation) on one subject per line, as JSON.

Rows whose contestants were timed interleaved are written together. Sample i of each of these rows is from round i, so
the samples of a round can be compared in pairs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from mucudnn.bench.results.export import json_line
from mucudnn.bench.results.header import FORMAT_VERSION, Header
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import ConvProblem
from mucudnn.core.values import shown
from mucudnn.measuring.timing.load import Load

Subject = Mapping[str, Any]
Line = dict[str, Any]
Key = tuple[Any, ...]

# Columns of all rows, in addition to those of the subject and of the benchmark.
COLUMNS = (
    "format_version",
    "folder",
    "turns",
    "rows_in_turns",
    "date",
    "contestant",
    "policy",
    "limit_bytes",
    "samples_s",
    "configuration",
    "workspace_bytes",
    "relative_error",
    "failure",
    "load",
    "others_share",
    "throttled_share",
)
_CONTESTANT = ("contestant", "policy", "limit_bytes")  # Columns that distinguish the rows of a subject.
PROBLEM_COLUMNS = (
    *("operation", "batch_size", "c", "h", "w", "k", "r", "s"),
    *("stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w", "groups", "dtype", "memory_format"),
)
_PAIRS = {"stride": "stride", "padding": "pad", "dilation": "dilation"}


def problem_columns(problem: ConvProblem, batch_size: int) -> dict[str, Any]:
    """Return the columns of a row that describe a convolution problem.

    >>> columns = problem_columns(ConvProblem("forward", 3, 8, 8, 16, 3, 3, padding=1), 32)
    >>> columns["batch_size"], columns["pad_h"], columns["dtype"]
    (32, 1, 'float32')
    """
    columns = {"batch_size": batch_size, **asdict(problem)}
    for name, short in _PAIRS.items():
        columns[f"{short}_h"], columns[f"{short}_w"] = columns.pop(name)
    return {name: columns[name] for name in PROBLEM_COLUMNS}


def problem_of(row: Mapping[str, Any]) -> ConvProblem:
    """Return the convolution problem that a row describes. Raises ``InvalidInputError`` if its columns are invalid."""
    single = ("operation", "c", "h", "w", "k", "r", "s", "groups", "dtype", "memory_format")
    fields: dict[str, Any] = {name: row[name] for name in single}
    fields |= {name: (row[f"{short}_h"], row[f"{short}_w"]) for name, short in _PAIRS.items()}
    return ConvProblem(**fields)


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one contestant (such as torch or mucudnn) on one subject (such as an operation of a layer).

    samples_s: seconds, in the order of the rounds; empty if the contestant failed or the benchmark does not time.
    policy, limit_bytes: the batch-size policy and workspace limit under which the configuration was chosen; None for
    contestants without such a choice, and if there is no limit. failure: why the contestant failed, or None. more:
    columns that only this benchmark has.
    """

    subject: Subject
    contestant: str
    samples_s: Sequence[float] = ()
    policy: str | None = None
    limit_bytes: int | None = None
    configuration: str | None = None
    workspace_bytes: int | None = None
    relative_error: float | None = None
    failure: str | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


def lines_of(header: Header, turns: int, rows: Sequence[Row], load: Load) -> str:
    """Return the lines of ``rows.jsonl`` for rows whose contestants were timed interleaved.

    turns: number of this group of rows in the file.
    """
    return "".join(json_line(_record(header, turns, row, len(rows), load)) for row in rows)


def _record(header: Header, turns: int, row: Row, rows_in_turns: int, load: Load) -> Line:
    return {
        "format_version": FORMAT_VERSION,
        "folder": header.identity,
        "turns": turns,
        "rows_in_turns": rows_in_turns,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **{name: row.subject[name] for name in header.subject_columns},
        **{name: getattr(row, name) for name in _CONTESTANT},
        **{name: getattr(row, name) for name in ("configuration", "workspace_bytes", "relative_error", "failure")},
        **row.more,
        "load": load.share,
        **asdict(load),
        "samples_s": list(row.samples_s),
    }


@dataclass(frozen=True, slots=True)
class Rows:
    """The valid rows of ``rows.jsonl``, in the order of the file, and messages about the invalid lines.

    incomplete: numbers of the groups of interleaved rows that lack rows. last_turns: the largest number of such a
    group, or 0 if the file has no rows.
    """

    lines: tuple[Line, ...]
    problems: tuple[str, ...]
    incomplete: frozenset[int] = frozenset()
    last_turns: int = 0


def read_rows(path: Path, header: Header) -> Rows:
    """Read ``rows.jsonl``; invalid lines, and lines of other folders, yield a message instead of a row.

    If a row was measured several times, the last result is used. Raises ``InvalidInputError`` if the file cannot be
    read.
    """
    if not path.exists():
        return Rows((), (f"{path} does not exist: nothing was measured yet",))
    found, problems = checked_lines(path, partial(_checked, header=header))
    last = {row_key(line, header): line for line in found}
    counts = Counter(line["turns"] for line in found)
    incomplete = {line["turns"]: line["rows_in_turns"] for line in last.values()}
    incomplete = {turns: wanted for turns, wanted in incomplete.items() if counts[turns] != wanted}
    problems += [
        f"{path}: turns {turns} has {counts[turns]} of {wanted} rows; a run with the same --out measures it again"
        for turns, wanted in incomplete.items()
    ]
    return Rows(tuple(last.values()), tuple(problems), frozenset(incomplete), max(counts, default=0))


def checked_lines(path: Path, checked: Callable[[str], Line]) -> tuple[list[Line], list[str]]:
    """Parse a file; return the objects of its valid lines, and a message about each invalid one.

    checked: parses a line, or raises ``InvalidInputError``, as this function does if the file cannot be read.
    """
    try:
        lines = path.read_bytes().decode(errors="replace").split("\n")
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror}") from None
    found, problems = list[Line](), list[str]()
    for number, line in enumerate(lines, start=1):
        try:
            if line:
                found.append(checked(line))
        except InvalidInputError as error:
            problems.append(f"{path}, line {number}: {error}; it is left out")
    return found, problems


def subject_key(row: Mapping[str, Any], header: Header) -> Key:
    """Return the key of a row's subject (the thing that was measured, such as a layer's operation)."""
    return tuple(row[name] for name in header.subject_columns)


def row_key(row: Mapping[str, Any], header: Header) -> Key:
    """Return the unique key of a row, which consists of its subject and its contestant."""
    return (*subject_key(row, header), *(row[name] for name in _CONTESTANT))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value) and value >= 0


# A check of a value, and a description of the allowed values.
Check = tuple[Callable[[Any], bool], str]
TEXT: Check = (lambda value: isinstance(value, str), "a text")
FLAG: Check = (lambda value: isinstance(value, bool), "true or false")
COUNT: Check = (lambda value: isinstance(value, int) and value > 0, "a whole number above 0")
NUMBER: Check = (_is_number, "a number of at least 0")
OPTIONAL_NUMBER: Check = (lambda value: value is None or _is_number(value), "a number of at least 0, or null")
TIMES: Check = (
    lambda value: isinstance(value, list) and all(_is_number(one) and one > 0 for one in value),
    "a list of seconds above 0",
)
_CHECKS = {"turns": COUNT, "rows_in_turns": COUNT, "contestant": TEXT, "samples_s": TIMES}
_CHECKS |= dict.fromkeys(("limit_bytes", "workspace_bytes", "relative_error", "load"), OPTIONAL_NUMBER)


def require_valid(record: object, checks: Mapping[str, Check]) -> None:
    """Raise ``InvalidInputError`` unless ``record`` is an object with valid values in the columns of ``checks``."""
    if not isinstance(record, dict) or not checks.keys() <= record.keys():
        raise InvalidInputError(f"{shown(record)} lacks one of {', '.join(checks)}")
    for name, (is_valid, allowed) in checks.items():
        if not is_valid(record[name]):
            raise InvalidInputError(f"{name} is {shown(record[name])}, not {allowed}")


def _checked(text: str, header: Header) -> Line:
    """Parse and validate a line of ``rows.jsonl``. Raises ``InvalidInputError`` if the line is invalid."""
    line = object_of_line(text, header, COLUMNS)
    require_valid(line, _CHECKS | ({"count": COUNT} if "count" in line else {}))
    if line.get("operation") is not None and "c" in line:
        problem_of(line)
    if header.is_timed and not line["samples_s"] and not line["failure"]:
        raise InvalidInputError("samples_s is empty without a failure")
    return line


def object_of_line(text: str, header: Header, columns: Iterable[str]) -> dict[str, Any]:
    """Parse a line as a JSON object.

    Raises ``InvalidInputError`` if the line is invalid or lacks one of ``columns``.
    """
    try:
        line = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise InvalidInputError(f"incomplete, or not JSON: {error.msg}") from None
    except RecursionError:
        raise InvalidInputError("nested too deeply") from None
    if not isinstance(line, dict):
        raise InvalidInputError(f"not a JSON object, but {type(line).__name__}")
    if line.get("format_version") != FORMAT_VERSION:
        raise InvalidInputError(f"format version {line.get('format_version')}, not {FORMAT_VERSION}")
    if line.get("folder") != header.identity:
        raise InvalidInputError(f"a row of another folder, {line.get('folder')}, not of {header.identity}")
    if missing := [name for name in (*columns, *header.subject_columns) if name not in line]:
        raise InvalidInputError(f"no column {', '.join(missing)}")
    return line


def _refuse_constant(name: str) -> float:
    raise InvalidInputError(f"{name} is not a finite number")
