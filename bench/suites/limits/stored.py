"""Keeps whole runs under workspace limits in a result folder.

A subject is one operation of one layer. Its contestants are torch's variants, without a limit, and under each limit the
best undivided one and ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mucudnn.bench.contests.bounds import MachineLimits
from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.rows import PROBLEM_COLUMNS, Row, Subject, problem_columns
from mucudnn.bench.folders.writing import LeftOut
from mucudnn.bench.report.records import config_record, configuration_record
from mucudnn.bench.sources.layers import LayerTable
from mucudnn.bench.suites.limits.result import ComparedProblem, LimitsComparison, Run
from mucudnn.running.environment import Environment
from mucudnn.words.config import Config
from mucudnn.words.task import Task

OURS, UNDIVIDED = "mucudnn", "undivided"
_NOTHING_FITS = "no configuration is within the limit"


def header_of(
    table: LayerTable,
    config: Config,
    limits: Sequence[int | None],
    rounds: int,
    environment: Environment,
    machine: MachineLimits,
) -> Header:
    """Describe a run. limits: bytes; ``None``: no limit."""
    wanted = table.problems(config.operations)
    dtype = table.layers[0].problem.dtype
    settings = {
        **config_record(replace(config, database=None, workspace_limit=None, workspace_budget=None)),
        "batch_sizes": sorted({layer.batch_size for layer in table.layers}),
        "layers": [layer.name for layer in table.layers],
        "dtype": dtype,
        "memory_format": str(table.layers[0].problem.memory_format),
        "workspace_limit": list(limits),
        "rounds": rounds,
    }
    return Header(
        *("limits", table.source, settings, environment),
        subject_columns=("layer", *PROBLEM_COLUMNS),
        wanted=len(wanted),
        limits={dtype: machine},
    )


def subject_of(task: Task) -> Subject:
    layer = task.name.removesuffix(f", {task.problem}")  # tasks of a table are named after both
    return {"layer": layer, **problem_columns(task.problem, task.batch_size)}


def rows_of(compared: ComparedProblem, policy: str) -> Iterator[Row]:
    """Yield the rows of one problem. policy: of ours."""
    subject, more = subject_of(compared.task), {"count": compared.task.count}
    for name, time in compared.torch.items():
        yield Row(subject, name, time.samples_s, more=more)
    for under in compared.under:
        undivided = Row(subject, UNDIVIDED, policy=UNDIVIDED, limit_bytes=under.limit_bytes, more=more)
        yield _row(undivided, under.rival)
        yield _row(replace(undivided, contestant=OURS, policy=str(policy)), under.ours)


def left_out(comparison: LimitsComparison) -> Iterator[LeftOut]:
    """Yield what failed, and that some were not reached."""
    for one in comparison.failed:
        yield LeftOut(str(one.task), one.reason)
    if missing := comparison.wanted - len(comparison.problems) - len(comparison.failed):
        yield LeftOut(f"{missing} problems", "the time would not have sufficed")


def _row(row: Row, run: Run | None) -> Row:
    """Complete a row with what ran, or with the reason why nothing did."""
    if run is None:
        return replace(row, failure=_NOTHING_FITS)
    return replace(
        row,
        samples_s=run.measured.samples_s,
        **configuration_record(run.configuration),
        more={**row.more, "predicted_s": run.configuration.time_s},
    )
