"""The file ``candidates.jsonl``: the candidates measured by tuning and their desirable set, one JSON object per line.

A desirable set is the Pareto front of configurations in time and workspace. The line of a subject (the thing that is
measured, such as a layer) is written before the subject's rows. Benchmarks that do not tune have no such file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mucudnn.bench.results.export import json_line
from mucudnn.bench.results.header import FORMAT_VERSION, Header
from mucudnn.bench.results.rows import (
    COUNT,
    FLAG,
    NUMBER,
    TEXT,
    Line,
    checked_lines,
    object_of_line,
    require_valid,
    subject_key,
)
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.values import shown
from mucudnn.solver.front import desirable_sets

if TYPE_CHECKING:
    from mucudnn.tuning.result import TunedProblem

CANDIDATES_FILE = "candidates.jsonl"
COSTS = ("setup_s", "step_s", "prepared_bytes", "scratch_bytes")
_CHECKS = {
    "candidates": {
        **{"algorithm": TEXT, "micro_batch_size": COUNT, "is_allowed": FLAG},
        **dict.fromkeys(COSTS, NUMBER),
    },
    "desirable": {"configuration": TEXT, "time_s": NUMBER, "workspace_bytes": NUMBER},
}


def line_of(header: Header, subject: Mapping[str, Any], tunings: Sequence[TunedProblem]) -> str:
    """Return the line of ``candidates.jsonl`` for a subject. tunings: the results of tuning it under each setting."""
    from mucudnn.tuning.result import allowed  # Imported here because it loads torch, which readers do not need.

    by_name = {m.micro_config: m for tuned in tunings for m in tuned.measurements}
    measured = [by_name[name] for name in sorted(by_name)]
    usable = allowed(measured, tunings[0].error_bound)
    names = {m.micro_config for m in usable}
    record = {
        "format_version": FORMAT_VERSION,
        "folder": header.identity,
        **{name: subject[name] for name in header.subject_columns},
        "candidates": [
            {
                "algorithm": m.micro_config.algorithm,
                "micro_batch_size": m.micro_config.micro_batch_size,
                "is_allowed": m.micro_config in names,
                **{name: getattr(m, name) for name in COSTS},
            }
            for m in measured
        ],
        "desirable": [
            {"configuration": str(c), "time_s": c.time_s, "workspace_bytes": c.workspace_bytes}
            for c in desirable_sets(usable, tunings[0].batch_size).of(tunings[0].batch_size)
        ],
    }
    return json_line(record)


def read_candidates(path: Path, header: Header) -> tuple[list[Line], list[str]]:
    """Return the valid lines of ``candidates.jsonl``, the last one of each subject, and messages about the others.

    A missing file has no lines. Raises ``InvalidInputError`` if the file cannot be read.
    """
    found, problems = checked_lines(path, partial(_checked, header=header)) if path.exists() else ([], [])
    return [*{subject_key(line, header): line for line in found}.values()], problems


def _checked(text: str, header: Header) -> Line:
    """Parse and validate a line of ``candidates.jsonl``. Raises ``InvalidInputError`` if the line is invalid."""
    line = object_of_line(text, header, _CHECKS)
    for name, checks in _CHECKS.items():
        if not isinstance(line[name], list):
            raise InvalidInputError(f"{name} is {shown(line[name])}, not a list")
        for record in line[name]:
            require_valid(record, checks)
    return line
