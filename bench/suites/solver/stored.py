"""Keeps times of the solvers in a result folder, and finds them again. A subject is what is solved."""

from __future__ import annotations

from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.rows import Row
from mucudnn.bench.folders.writing import FolderWriter
from mucudnn.bench.suites.solver.result import SolverTime
from mucudnn.running.environment import Environment

OURS = "mucudnn"


def header_of(wanted: int, environment: Environment) -> Header:
    """Describe a run."""
    return Header("solver", "made-up measurements", {}, environment, subject_columns=("what",), wanted=wanted)


def row_of(time: SolverTime) -> Row:
    return Row({"what": time.what}, OURS, time.samples_s, more={"bar_s": time.bar_s})


def known_time(folder: FolderWriter, what: str) -> SolverTime | None:
    """Return what an earlier run measured; ``None``: nothing."""
    return next((SolverTime.of(what, line["samples_s"], line["bar_s"]) for line in folder.known({"what": what})), None)
