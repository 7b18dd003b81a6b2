"""Keeps peaks of memory and times of a training step in a result folder, and finds them again.

The subject is the step; its contestants are torch, torch compiled, and mucudnn with each bound on its workspaces, in
the same turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mucudnn.bench.contests.variants import Variant
from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.rows import Line, Row, Subject
from mucudnn.bench.folders.writing import FolderWriter
from mucudnn.bench.report.records import config_record
from mucudnn.bench.report.tables import memory_bound
from mucudnn.bench.suites.memory.benchmark import contestants_of
from mucudnn.bench.suites.memory.result import Contestant, MemoryBenchmark, StepMemory
from mucudnn.running.environment import Environment
from mucudnn.words.config import Config
from mucudnn.words.problem import MemoryFormat


def subject_of(name: str, input_shape: Sequence[int], memory_format: MemoryFormat) -> Subject:
    return {"network": name, "batch_size": input_shape[0], "memory_format": str(memory_format)}


def header_of(
    subject: Subject,
    input_shape: Sequence[int],
    config: Config,
    rounds: int,
    runs: int,
    variants: Sequence[Variant] | None,
    environment: Environment,
) -> Header:
    """Describe a run. variants: those asked for; ``None``: all."""
    settings = {
        "input_shape": list(input_shape),
        "rounds": rounds,
        "runs": runs,
        **({} if variants is None else {"variants": list(variants)}),
        **config_record(replace(config, database=None)),
    }
    return Header(*("memory", str(subject["network"]), settings, environment), subject_columns=tuple(subject), wanted=1)


def add_benchmark(folder: FolderWriter, subject: Subject, benchmark: MemoryBenchmark) -> None:
    """Add torch and the others, which all ran in the same rounds."""
    folder.add([_row(subject, one) for one in (benchmark.torchs, *benchmark.others)])


def known_benchmark(
    folder: FolderWriter,
    subject: Subject,
    input_shape: Sequence[int],
    config: Config,
    variants: Sequence[Variant],
    environment: Environment,
    runs: int,
) -> MemoryBenchmark | None:
    """Return what an earlier run measured; ``None``: not all of it."""
    contestants = contestants_of(config, variants)
    lines = {(line["contestant"], line["bound"]): line for line in folder.known(subject)}
    if any(_key(one) not in lines for one in contestants):
        return None
    torchs, *others = (_found(one, lines[_key(one)]) for one in contestants)
    name = str(subject["network"])
    return MemoryBenchmark(name, tuple(input_shape), environment, config, torchs, tuple(others), runs)


def _key(one: Contestant) -> tuple[str, str | None]:
    return str(one.variant), None if one.config is None else memory_bound(one.config)


def _found(one: Contestant, line: Line) -> StepMemory:
    peaks = line["allocator_peak_bytes"], line["resident_peak_bytes"]
    return StepMemory(one, *peaks, tuple(line["samples_s"]), line["failure"] or "")


def _row(subject: Subject, one: StepMemory) -> Row:
    name, bound = _key(one.contestant)
    more = {"allocator_peak_bytes": one.allocator_bytes, "resident_peak_bytes": one.resident_bytes, "bound": bound}
    row = Row(subject, name, one.samples_s, failure=one.failure or None, more=more)
    config = one.contestant.config
    if config is None:
        return row
    limit_bytes = None if config.has_headroom_limit else config.workspace_limit_bytes
    return replace(row, policy=str(config.policy), limit_bytes=limit_bytes)
