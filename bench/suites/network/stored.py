"""Keeps results of the network benchmark in a result folder, and finds them again.

A subject is one operation of one layer in one memory format; its contestants are torch's variants and mucudnn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mucudnn.bench.contests.bounds import MachineLimits
from mucudnn.bench.contests.names import TORCH
from mucudnn.bench.contests.timing import MedianTime
from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.rows import PROBLEM_COLUMNS, Line, Row, Subject, problem_columns
from mucudnn.bench.report.records import config_record, configuration_record
from mucudnn.bench.sources.layers import Layer, LayerTable
from mucudnn.bench.suites.network.result import FormatResult
from mucudnn.running.environment import Environment
from mucudnn.tuning.result import TunedProblem
from mucudnn.words.config import Config
from mucudnn.words.problem import MemoryFormat

OURS = "mucudnn"


def header_of(
    table: LayerTable,
    config: Config,
    memory_formats: Sequence[MemoryFormat],
    rounds: int,
    environment: Environment,
    limits: MachineLimits,
) -> Header:
    """Describe a run."""
    wanted = table.problems(config.operations)
    batch_sizes = sorted({layer.batch_size for layer, _ in wanted})
    dtype = table.layers[0].problem.dtype
    settings = {
        "batch_sizes": batch_sizes,
        "dtype": dtype,
        "layers": [layer.name for layer in table.layers],
        "memory_formats": list(memory_formats),
        "rounds": rounds,
        **config_record(replace(config, database=None)),
    }
    return Header(
        *("network", table.source, settings, environment),
        subject_columns=("layer", *PROBLEM_COLUMNS),
        wanted=len(wanted) * len(memory_formats),
        limits={dtype: limits},
    )


def rows_of(layer: Layer, result: FormatResult, config: Config) -> list[Row]:
    """Return the rows of one subject."""
    tuned = result.tuned
    subject, more = subject_of(layer, tuned), {"count": layer.count}
    torchs = {TORCH: result.torch, **result.torch_benchmarks}
    ours = Row(
        *(subject, OURS, result.mucudnn.samples_s, str(config.policy), config.workspace_limit_bytes),
        **configuration_record(tuned.configuration),
        relative_error=tuned.relative_error,
        more={**more, "solve_s": tuned.account and tuned.account.solve_time_s},
    )
    return [*(Row(subject, name, time.samples_s, more=more) for name, time in torchs.items()), ours]


def subject_of(layer: Layer, tuned: TunedProblem) -> Subject:
    return {"layer": layer.name, **problem_columns(tuned.problem, tuned.batch_size)}


def known_result(lines: Sequence[Line], tuned: TunedProblem) -> FormatResult | None:
    """Return what an earlier run measured of a subject; ``None``: nothing, or of another configuration."""
    by_contestant = {line["contestant"]: line for line in lines}
    ours = by_contestant.pop(OURS, None)
    if ours is None or ours["configuration"] != str(tuned.configuration):
        return None
    times: Mapping[str, MedianTime] = {
        name: MedianTime.of_samples(line["samples_s"]) for name, line in by_contestant.items()
    }
    benchmarks = {name: time for name, time in times.items() if name != TORCH}
    return FormatResult(times[TORCH], MedianTime.of_samples(ours["samples_s"]), tuned, benchmarks)
