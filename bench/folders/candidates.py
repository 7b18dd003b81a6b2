"""The file ``candidates.jsonl``: the candidates measured by tuning and their desirable set, one JSON object per line.

A desirable set is the Pareto front of configurations in time and workspace. The line of a subject (the thing that is
measured, such as a layer) is written before the subject's rows. Benchmarks that do not tune have no such file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas

from mucudnn.bench.folders.header import FORMAT_VERSION, Header
from mucudnn.bench.folders.rows import (
    COUNT,
    FLAG,
    NUMBER,
    OPTIONAL_NUMBER,
    TEXT,
    TIMES,
    Line,
    checked_lines,
    lines_in,
    object_of_line,
    require_valid,
    subject_key,
)
from mucudnn.bench.report.export import json_line
from mucudnn.solver.front import desirable_sets
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.results import Measurement, MicroConfig
from mucudnn.words.values import shown

if TYPE_CHECKING:
    from mucudnn.tuning.result import TunedProblem

CANDIDATES_FILE = "candidates.jsonl"
COSTS = ("setup_s", "step_s", "prepared_bytes", "scratch_bytes")
_CANDIDATE = {"algorithm": TEXT, "micro_batch_size": COUNT, **dict.fromkeys(COSTS, NUMBER)}
_CANDIDATE |= {"relative_error": OPTIONAL_NUMBER, "is_allowed": FLAG, "step_samples_s": TIMES}
_POINT = {"configuration": TEXT, "time_s": NUMBER, "workspace_bytes": NUMBER}


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The content of ``candidates.jsonl`` as data frames, whose rows have the subject's columns and its number.

    lines: the valid objects of the file. measured: a row for each algorithm and micro-batch size, with its costs in
    seconds and bytes; ``is_allowed``, whether its error is within the bound; ``step_samples_s``, empty if the times
    came from the database. desirable: a row for each point of the desirable sets, smallest workspace first, with its
    ``configuration`` and costs. problems: messages about unreadable lines, with file and line.
    """

    lines: tuple[dict[str, Any], ...]
    measured: pandas.DataFrame
    desirable: pandas.DataFrame
    problems: tuple[str, ...] = field(default=())


def line_of(header: Header, subject: Mapping[str, Any], tunings: Sequence[TunedProblem]) -> str:
    """Return the line of ``candidates.jsonl`` for a subject. tunings: the results of tuning it under each setting."""
    from mucudnn.tuning.result import allowed  # Imported here because it loads torch, which readers do not need.

    measured = _merged(tunings)
    usable = allowed(measured, tunings[0].error_bound)
    names = {m.micro_config for m in usable}
    record = {
        "format_version": FORMAT_VERSION,
        "folder": header.identity,
        **{name: subject[name] for name in header.subject_columns},
        "candidates": [_candidate(m, is_allowed=m.micro_config in names) for m in measured],
        "desirable": [
            {"configuration": str(c), "time_s": c.time_s, "workspace_bytes": c.workspace_bytes}
            for c in desirable_sets(usable, tunings[0].batch_size).of(tunings[0].batch_size)
        ],
    }
    return json_line(record)


def _merged(tunings: Iterable[TunedProblem]) -> list[Measurement]:
    """Return one measurement for each micro-config (algorithm and size), preferring measurements that have samples."""
    found: dict[MicroConfig, Measurement] = {}
    for measurement in (m for tuned in tunings for m in tuned.measurements):
        if measurement.raw is not None or measurement.micro_config not in found:
            found[measurement.micro_config] = measurement
    return [found[key] for key in sorted(found)]


def _candidate(measurement: Measurement, *, is_allowed: bool) -> dict[str, Any]:
    return {
        "algorithm": measurement.micro_config.algorithm,
        "micro_batch_size": measurement.micro_config.micro_batch_size,
        **{name: getattr(measurement, name) for name in COSTS},
        "relative_error": measurement.relative_error,
        "is_allowed": is_allowed,
        "step_samples_s": [] if measurement.raw is None else list(measurement.raw.step_samples_s),
    }


def read_candidates(path: Path, header: Header) -> Candidates:
    """Read ``candidates.jsonl``; return empty data frames if the file does not exist.

    Raises ``InvalidInputError`` if the file cannot be read.
    """
    return candidates_of_lines(f"{path}, line", lines_in(path) if path.exists() else (), header)


def candidates_of_lines(where: str, lines: Iterable[str], header: Header) -> Candidates:
    """Parse the lines of a candidates file; if a subject has several lines, use the last one.

    where: prefix of the line number in messages.
    """
    every, problems = checked_lines(where, lines, partial(_checked, header=header))
    found = {subject_key(line, header): line for line in every}
    measured = _frame(found, "candidates", _CANDIDATE, header)
    return Candidates(tuple(found.values()), measured, _frame(found, "desirable", _POINT, header), tuple(problems))


def _checked(text: str, header: Header) -> Line:
    """Parse and validate a line of ``candidates.jsonl``. Raises ``InvalidInputError`` if the line is invalid."""
    line = object_of_line(text, header, ("candidates", "desirable"))
    for name, checks in (("candidates", _CANDIDATE), ("desirable", _POINT)):
        if not isinstance(line[name], list):
            raise InvalidInputError(f"{name} is {shown(line[name])}, not a list")
        for record in line[name]:
            require_valid(record, checks)
    return line


def _frame(
    found: Mapping[tuple[Any, ...], Mapping[str, Any]], name: str, columns: Iterable[str], header: Header
) -> pandas.DataFrame:
    def records() -> Iterator[tuple[Any, ...]]:
        for number, (subject, line) in enumerate(found.items()):
            for record in line[name]:
                yield (number, *subject, *(record[column] for column in columns))

    names = ("subject", *header.subject_columns, *columns)
    return pandas.DataFrame(list(records()), columns=pandas.Index(names))
