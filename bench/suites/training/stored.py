"""Keeps results of the training benchmark in a result folder.

A subject is a network in one setting, its contestants are the variants of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.rows import Row, Subject
from mucudnn.bench.folders.writing import FolderWriter
from mucudnn.bench.report.records import config_record
from mucudnn.bench.suites.training.benchmark import TrainingOptions
from mucudnn.bench.suites.training.result import Precision, Setting, VariantResult
from mucudnn.running.environment import Environment
from mucudnn.words.problem import MemoryFormat

_COLUMNS = ("network", "batch_size", "precision", "memory_format", "how")


def header_of(
    networks: Sequence[str],
    batch_sizes: Sequence[int],
    precisions: Sequence[Precision],
    memory_formats: Sequence[MemoryFormat],
    options: TrainingOptions,
    environment: Environment,
) -> Header:
    """Describe a run. batch_sizes: one for each network."""
    settings = {
        "batch_sizes": list(batch_sizes),
        "precisions": list(precisions),
        "memory_formats": list(memory_formats),
        "rounds": options.rounds,
        "how": options.how,
        **({} if options.variants is None else {"variants": list(options.variants)}),
        **config_record(replace(options.config, database=None)),
    }
    return Header(
        *("training", ", ".join(networks), settings, environment),
        subject_columns=_COLUMNS,
        wanted=len(set(zip(networks, batch_sizes, strict=True))) * len(precisions) * len(memory_formats),
    )


def is_known(folder: FolderWriter, setting: Setting) -> bool:
    """Whether an earlier run has measured a setting."""
    return bool(folder.known(_subject(setting)))


def add_group(folder: FolderWriter, group: Sequence[VariantResult]) -> None:
    """Add the variants of a setting, which ran in turns."""
    folder.add([_row(result) for result in group])


def _row(result: VariantResult) -> Row:
    subject, cost = _subject(result.setting), result.cost
    if cost is None:
        return Row(subject, result.variant, failure=result.failure)
    more = {"peak_bytes": cost.peak_bytes, "kinds_s": dict(cost.kinds_s)}
    return Row(subject, result.variant, cost.samples_s, more=more)


def _subject(setting: Setting) -> Subject:
    return {name: getattr(setting, name) for name in _COLUMNS}
