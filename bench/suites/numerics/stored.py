"""Keeps numbers of algorithms in a result folder, and finds them again.

A subject is an algorithm on a problem. There are no samples: nothing is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.rows import Row, Subject
from mucudnn.bench.folders.writing import FolderWriter
from mucudnn.bench.suites.numerics.result import SAMPLES, AlgorithmNumerics
from mucudnn.running.environment import Environment
from mucudnn.words.problem import ConvProblem, Operation

_INNER = ("algorithm", "problem", "relative_error")


def header_of(operations: Sequence[Operation], dtype: str, wanted: int, environment: Environment) -> Header:
    """Describe a run. wanted: algorithms times problems."""
    settings = {"operations": list(operations), "dtype": dtype, "samples": SAMPLES}
    return Header(
        *("numerics", "small images", settings, environment),
        subject_columns=("operation", "filter", "image", "dtype"),
        wanted=wanted,
        is_timed=False,
    )


def row_of(numerics: AlgorithmNumerics) -> Row:
    more = {name: value for name, value in asdict(numerics).items() if name not in _INNER}
    return Row(_subject(numerics.problem), numerics.algorithm, relative_error=numerics.relative_error, more=more)


def known_numerics(folder: FolderWriter, name: str, problem: ConvProblem) -> AlgorithmNumerics | None:
    """Return what an earlier run found; ``None``: nothing."""
    for line in folder.known(_subject(problem)):
        if line["contestant"] == name:
            fields = {one: line[one] for one in AlgorithmNumerics.__dataclass_fields__ if one not in _INNER}
            return AlgorithmNumerics(name, problem, relative_error=line["relative_error"], **fields)
    return None


def _subject(problem: ConvProblem) -> Subject:
    return {
        "operation": str(problem.operation),
        "filter": f"{problem.r}x{problem.s}",
        "image": f"{problem.h}x{problem.w}",
        "dtype": problem.dtype,
    }
