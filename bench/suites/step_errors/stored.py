"""Keeps errors of a step in a result folder, and finds them again.

A subject is a network's step in a memory format. There are no samples: nothing is timed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.rows import Row, Subject
from mucudnn.bench.folders.writing import FolderWriter
from mucudnn.bench.report.records import config_record
from mucudnn.bench.suites.step_errors.result import StepErrors
from mucudnn.running.environment import Environment
from mucudnn.words.config import Config
from mucudnn.words.problem import MemoryFormat

_INNER = ("variant", "memory_format", "gradients")
Wanted = tuple[str, MemoryFormat]  # variant, and the memory format of its step


def header_of(
    network: str,
    batch_size: int,
    memory_formats: Sequence[MemoryFormat],
    config: Config,
    wanted: int,
    environment: Environment,
) -> Header:
    """Describe a run."""
    settings = {
        "batch_sizes": [batch_size],
        "memory_formats": list(memory_formats),
        **config_record(replace(config, database=None)),
    }
    return Header(
        *("errors", network, settings, environment),
        subject_columns=("network", "batch_size", "memory_format"),
        wanted=wanted,
        is_timed=False,
    )


def row_of(network: str, batch_size: int, errors: StepErrors) -> Row:
    """Return the row of a variant; its relative error is that of all gradients together."""
    more = {name: value for name, value in asdict(errors).items() if name not in _INNER}
    subject = _subject(network, batch_size, errors.memory_format)
    return Row(subject, errors.variant, relative_error=errors.gradients, more=more)


def known_errors(
    folder: FolderWriter, network: str, batch_size: int, wanted: Iterable[Wanted]
) -> dict[Wanted, StepErrors]:
    """Return what an earlier run found."""
    found = {}
    for variant, memory_format in wanted:
        for line in folder.known(_subject(network, batch_size, memory_format)):
            if line["contestant"] == variant:
                fields = {name: line[name] for name in StepErrors.__dataclass_fields__ if name not in _INNER}
                errors = StepErrors(variant, memory_format, gradients=line["relative_error"], **fields)
                found[variant, memory_format] = errors
    return found


def _subject(network: str, batch_size: int, memory_format: MemoryFormat) -> Subject:
    return {"network": network, "batch_size": batch_size, "memory_format": str(memory_format)}
