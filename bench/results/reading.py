"""The format of a result folder, and the reading of one into pandas. docs/benchmarks.md describes the files.

``environment.json``, the header, is written before the first measurement: everything that the rows have in common.
``rows.jsonl`` has the result of one contestant (an implementation) on one subject (the thing that is measured, such as
an operation of a layer) per line. Rows whose contestants were timed interleaved are written together: sample i of each
of these rows is from round i, so the samples of a round can be compared in pairs. ``measurements.jsonl``, of benchmarks
that tune, is an export of the database: the rows of the folder's problems. It and ``summary.json`` are written at the
end.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from math import inf, isfinite
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

import pandas

import mucudnn
from mucudnn.bench.results.bounds import MachineLimits
from mucudnn.core.config import Config
from mucudnn.core.errors import DatabaseError, InvalidInputError
from mucudnn.core.problem import ConvProblem
from mucudnn.core.records import Environment, Measurement
from mucudnn.core.statistics import spread
from mucudnn.core.tables import memory_bound
from mucudnn.core.values import grouped, shown
from mucudnn.store.exports import read_profile

FORMAT_VERSION = 1  # Increased when a key or column is removed or changes its meaning, but not when one is added.
HEADER_FILE, ROWS_FILE = "environment.json", "rows.jsonl"
MEASUREMENTS_FILE, SUMMARY_FILE = "measurements.jsonl", "summary.json"
_MOST_NAMED = 12  # the most folders that a message lists

Subject = Mapping[str, Any]
Line = dict[str, Any]
Key = tuple[Any, ...]
Check = tuple[Callable[[Any], bool], str]  # a check of a value, and a description of the allowed values


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value) and value >= 0


_ANY: Check = (lambda _: True, "a value")
_TEXT: Check = (lambda value: isinstance(value, str), "a text")
_COUNT: Check = (lambda value: isinstance(value, int) and value > 0, "a whole number above 0")
_OPTIONAL: Check = (lambda value: value is None or _is_number(value), "a number of at least 0, or null")
_TIMES: Check = (
    lambda value: isinstance(value, list) and all(_is_number(seconds) and seconds > 0 for seconds in value),
    "a list of seconds above 0",
)
# Columns that distinguish the rows of a subject.
CONTESTANT = ("contestant", "policy", "limit_bytes")
# The columns of every row, in addition to those of the subject and of the benchmark.
ROW_COLUMNS: Mapping[str, Check] = {
    **{"format_version": _ANY, "folder": _ANY, "turns": _COUNT, "rows_in_turns": _COUNT, "date": _ANY},
    **{"contestant": _TEXT, "policy": _ANY, "limit_bytes": _OPTIONAL, "samples_s": _TIMES},
    **{"configuration": _ANY, "workspace_bytes": _OPTIONAL, "relative_error": _OPTIONAL, "failure": _ANY},
    **{"load": _OPTIONAL, "others_share": _ANY, "throttled_share": _ANY},
}
OF_VOLUMES = ("d", "t", "stride_d", "pad_d", "dilation_d")  # all 0 for images
PROBLEM_COLUMNS = (
    *("operation", "batch_size", "c", "h", "w", "k", "r", "s"),
    *("stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w", "groups", "dtype", "memory_format"),
    *OF_VOLUMES,
)
_STEPS = {"stride": "stride", "padding": "pad", "dilation": "dilation"}


def problem_columns(problem: ConvProblem, batch_size: int) -> dict[str, Any]:
    """Return the columns of a row that describe a convolution problem.

    >>> columns = problem_columns(ConvProblem("forward", 3, 8, 8, 16, 3, 3, padding=1), 32)
    >>> columns["batch_size"], columns["pad_h"], columns["dtype"]
    (32, 1, 'float32')
    """
    columns = {"batch_size": batch_size, **dict.fromkeys(OF_VOLUMES, 0), **asdict(problem)}
    for name, short in _STEPS.items():
        axes = ("d", "h", "w") if problem.is_volume else ("h", "w")
        columns |= {f"{short}_{axis}": size for axis, size in zip(axes, columns.pop(name), strict=True)}
    return {name: columns[name] for name in PROBLEM_COLUMNS}


def problem_of(row: Mapping[str, Any]) -> ConvProblem:
    """Return the convolution problem that a row describes. Raises ``InvalidInputError`` if its columns are invalid."""
    axes = ("d", "h", "w") if row.get("d") else ("h", "w")
    sizes: dict[str, Any] = {name: tuple(row[f"{short}_{axis}"] for axis in axes) for name, short in _STEPS.items()}
    for name in ("operation", "c", "h", "w", "k", "r", "s", "groups", "dtype", "memory_format"):
        sizes[name] = row[name]
    return ConvProblem(**sizes, d=row.get("d", 0), t=row.get("t", 0))


@dataclass(frozen=True, slots=True)
class Header:
    """The description of a benchmark run: its name, source, settings and environment.

    benchmark: name of the benchmark, such as ``network``.
    settings: JSON values that determine what is measured; a run with different settings cannot resume in the same
    folder.
    subject_columns: columns that together identify the subject of a row.
    wanted: total number of subjects.
    limits: the machine's peak rates, by dtype.
    is_timed: whether rows have time samples.
    identity: stored in every row, so that a row copied from another folder is detected.
    """

    benchmark: str
    source: str
    settings: Mapping[str, Any]
    environment: Environment
    subject_columns: tuple[str, ...]
    wanted: int
    limits: Mapping[str, MachineLimits] = field(default_factory=dict)
    is_timed: bool = True
    mucudnn: str = mucudnn.__version__
    date: datetime = field(default_factory=lambda: datetime.now(UTC).replace(microsecond=0))
    identity: str = field(default_factory=lambda: uuid4().hex[:12])

    def record(self) -> dict[str, Any]:
        """Return the JSON object of ``environment.json``, with lists for tuples as JSON has them."""
        record = {
            "format_version": FORMAT_VERSION,
            "folder": self.identity,
            "mucudnn": self.mucudnn,
            "date": self.date.isoformat(),
            "benchmark": self.benchmark,
            "source": self.source,
            "settings": self.settings,
            "environment": asdict(self.environment),
            "machine_limits": {
                dtype: {name: None if rate == inf else rate for name, rate in asdict(rates).items()}
                for dtype, rates in self.limits.items()
            },
            "subject_columns": self.subject_columns,
            "wanted": self.wanted,
            "is_timed": self.is_timed,
        }
        return dict(json.loads(json.dumps(record)))

    def differences(self, other: Header) -> list[str]:
        """List the settings and the parts of the environment that differ between this run and another, as texts.

        The machine's peak rates are ignored, because they are measured.
        """
        before, after = (
            {
                **{name: record[name] for name in ("benchmark", "source", "mucudnn")},
                **record["environment"],
                **record["settings"],
                "subject_columns": record["subject_columns"],
            }
            for record in (self.record(), other.record())
        )
        differences = []
        for name in dict.fromkeys((*before, *after)):
            values = before.get(name), after.get(name)
            if values[0] != values[1]:
                was, now = ("not set" if value is None else str(value) for value in values)
                differences.append(f"{name} was {was} and is {now}")
        return differences


def read_header(folder: Path) -> Header:
    """Read ``environment.json``.

    Raises ``InvalidInputError`` with file and line if the file is missing, incomplete, or of another format version. If
    only subfolders have the file, as in the folder of a recipe, the error names the subfolders.
    """
    path = folder / HEADER_FILE
    if not path.exists() and (below := folders_below(folder)):
        raise InvalidInputError(
            f"{path} does not exist, but {folder} contains result folders; name one of them: "
            f"{', '.join(map(str, below[:_MOST_NAMED]))}{'' if len(below) <= _MOST_NAMED else ', ...'}"
        )
    record = _read_object(path)
    names = {field.name for field in fields(Environment)}  # later versions of mucudnn may have added some
    try:
        return Header(
            benchmark=str(record["benchmark"]),
            source=str(record["source"]),
            settings=dict(record["settings"]),
            environment=Environment(**{name: value for name, value in record["environment"].items() if name in names}),
            subject_columns=tuple(map(str, record["subject_columns"])),
            wanted=int(record["wanted"]),
            limits={
                dtype: MachineLimits(**{name: inf if rate is None else float(rate) for name, rate in rates.items()})
                for dtype, rates in record["machine_limits"].items()
            },
            is_timed=bool(record["is_timed"]),
            mucudnn=str(record["mucudnn"]),
            date=datetime.fromisoformat(record["date"]),
            identity=str(record["folder"]),
        )
    except KeyError as error:
        raise InvalidInputError(f"{path} has no {error}; it is not the result of a benchmark") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidInputError(f"{path} has an invalid value: {error}") from None


def folders_below(folder: Path) -> list[Path]:
    """Return the result folders up to three levels below a folder; recipes (stored experiments) nest them this way."""
    return sorted(path.parent for depth in ("*", "*/*", "*/*/*") for path in folder.glob(f"{depth}/{HEADER_FILE}"))


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object of this format version from a file.

    Raises ``InvalidInputError`` with file and line if it holds anything else.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidInputError(f"{path} does not exist; name a folder that a benchmark wrote with --out") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path} cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise InvalidInputError(
            f"{path}, line {error.lineno}: invalid JSON: {error.msg}; the file is incomplete: write it again"
        ) from None
    except RecursionError:
        raise InvalidInputError(f"{path}: nested too deeply for the result of a benchmark") from None
    if not isinstance(record, dict):
        raise InvalidInputError(f"{path}, line 1: not a JSON object, but {type(record).__name__}")
    if (version := record.get("format_version")) != FORMAT_VERSION:
        raise InvalidInputError(
            f"{path}: format version {version}; mucudnn {mucudnn.__version__} reads {FORMAT_VERSION}: use the version "
            "of mucudnn that wrote it, or a newer one"
        )
    return record


def read_rows(path: Path, header: Header) -> tuple[list[Line], list[str]]:
    """Read ``rows.jsonl``; return the valid rows, in the order of the file, and messages about the invalid lines.

    Lines of other folders are invalid. If a row was measured several times, the last result is used. Raises
    ``InvalidInputError`` if the file cannot be read.
    """
    if not path.exists():
        return [], [f"{path} does not exist: nothing was measured yet"]
    try:
        texts = path.read_bytes().decode(errors="replace").split("\n")
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror}") from None
    last: dict[Key, Line] = {}
    problems = []
    for number, text in enumerate(texts, start=1):
        try:
            if text:
                line = _checked(text, header)
                last[row_key(line, header)] = line
        except InvalidInputError as error:
            problems.append(f"{path}, line {number}: {error}; it is left out")
    lines = list(last.values())
    problems += [
        f"{path}: turns {turns} has {count} rows; a run with the same --out measures it again"
        for turns, count in incomplete_turns(lines).items()
    ]
    return lines, problems


def incomplete_turns(lines: Iterable[Line]) -> dict[int, str]:
    """Return the numbers of the groups of interleaved rows that lack rows, with the count of those they have."""
    groups = Counter((line["turns"], line["rows_in_turns"]) for line in lines)
    return {turns: f"{count} of {wanted}" for (turns, wanted), count in groups.items() if count != wanted}


def subject_key(row: Mapping[str, Any], header: Header) -> Key:
    """Return the key of a row's subject (the thing that was measured, such as a layer's operation)."""
    return tuple(row[name] for name in header.subject_columns)


def row_key(row: Mapping[str, Any], header: Header) -> Key:
    """Return the unique key of a row, which consists of its subject and its contestant."""
    return (*subject_key(row, header), *(row[name] for name in CONTESTANT))


def _checked(text: str, header: Header) -> Line:
    """Parse and validate a row. Raises ``InvalidInputError`` if it is invalid or lacks a column."""

    def refuse(name: str) -> float:
        raise InvalidInputError(f"{name} is not a finite number")

    try:
        line = json.loads(text, parse_constant=refuse)
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
    if missing := [name for name in (*ROW_COLUMNS, *header.subject_columns) if name not in line]:
        raise InvalidInputError(f"no column {', '.join(missing)}")
    for name, (is_valid, allowed) in {**ROW_COLUMNS, "count": _COUNT}.items():
        if name in line and not is_valid(line[name]):
            raise InvalidInputError(f"{name} is {shown(line[name])}, not {allowed}")
    if line.get("operation") is not None and "c" in line:
        problem_of(line)
    if header.is_timed and not line["samples_s"] and not line["failure"]:
        raise InvalidInputError("samples_s is empty without a failure")
    return line


@dataclass(frozen=True, slots=True, eq=False)
class ResultFolder:
    """The content of a result folder.

    lines: the valid objects of ``rows.jsonl``.
    rows: ``lines`` as a data frame, in the order of the file, with the columns described in docs/benchmarks.md and
    ``time_s``, the median of ``samples_s`` in seconds, NaN without samples.
    measurements: those of ``measurements.jsonl``, by problem.
    left_out: the names of the subjects that the benchmark did not measure, by reason, known when the run has ended.
    problems: messages about unreadable content, with file and line.
    """

    path: Path
    header: Header
    lines: tuple[Line, ...]
    rows: pandas.DataFrame
    measurements: Mapping[ConvProblem, Sequence[Measurement]]
    left_out: Mapping[str, Sequence[str]]
    problems: tuple[str, ...]


def read_folder(path: Path) -> ResultFolder:
    """Read a result folder.

    Raises ``InvalidInputError`` if ``path`` is not a result folder, or if its environment file cannot be read.
    """
    header = read_header(path)
    lines, problems = read_rows(path / ROWS_FILE, header)
    # The measurements that the run chose from.
    measurements: dict[ConvProblem, Sequence[Measurement]] = {}
    file, environment = path / MEASUREMENTS_FILE, header.environment
    try:
        if file.exists():
            with read_profile(file) as stored:
                newest = {name: versions[-1] for name, versions in stored.versions(environment).items()}
                measurements |= stored.measurements_of_all(environment, stored.problems(environment), newest)
    except DatabaseError as error:
        problems.append(str(error))
    # What the run left out.
    left_out: dict[str, list[str]] = {}
    file = path / SUMMARY_FILE
    try:
        if file.exists():
            subjects = _read_object(file)["left_out"]
            left_out = grouped((str(subject["reason"]), str(subject["what"])) for subject in subjects)
        else:
            problems.append(f"{file} does not exist: the run has not ended")
    except (InvalidInputError, KeyError, TypeError) as error:
        told = error if isinstance(error, InvalidInputError) else f"{file}: left_out is invalid: {error}"
        problems.append(f"{file} cannot be read, so it is unknown what was left out: {told}")
    rows = pandas.DataFrame(lines or {name: [] for name in (*ROW_COLUMNS, *header.subject_columns)})
    rows["time_s"] = [float(pandas.Series(samples, dtype=float).median()) for samples in rows["samples_s"]]
    return ResultFolder(path, header, tuple(lines), rows, measurements, left_out, tuple(problems))


def with_time(line: Line) -> Line:
    """Return a row with the median of its samples as ``time_s`` and IQR / median as ``noise``, None without samples."""
    samples = line["samples_s"]
    return {**line, "time_s": median(samples) if samples else None, "noise": spread(samples) if samples else None}


def bound_in_words(settings: Mapping[str, Any]) -> str:
    """Return the workspace limit or budget in a folder's settings as text, such as ``workspace limit 64 MiB``."""
    return memory_bound(Config(**{name: settings[name] for name in ("workspace_limit", "workspace_budget")}))
