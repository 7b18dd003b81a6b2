"""Keeps peaks of memory and times of a training step in a result folder, and finds them again.

The subject is the step; its contestants are torch, and mucudnn with each bound on its workspaces, in the same turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mucudnn.bench.contests.names import TORCH
from mucudnn.bench.contests.peak_memory import PeakComparison
from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.rows import Row, Subject
from mucudnn.bench.folders.writing import FolderWriter
from mucudnn.bench.report.records import config_record
from mucudnn.bench.report.tables import memory_bound
from mucudnn.bench.suites.memory.result import MemoryBenchmark, MemoryVariant
from mucudnn.bench.timing.comparison import Comparison
from mucudnn.running.environment import Environment
from mucudnn.words.config import Config
from mucudnn.words.problem import MemoryFormat

OURS = "mucudnn"


def subject_of(name: str, input_shape: Sequence[int], memory_format: MemoryFormat) -> Subject:
    return {"network": name, "batch_size": input_shape[0], "memory_format": str(memory_format)}


def header_of(
    subject: Subject, input_shape: Sequence[int], config: Config, rounds: int, runs: int, environment: Environment
) -> Header:
    """Describe a run."""
    settings = {
        "input_shape": list(input_shape),
        "rounds": rounds,
        "runs": runs,
        **config_record(replace(config, database=None)),
    }
    return Header(*("memory", str(subject["network"]), settings, environment), subject_columns=tuple(subject), wanted=1)


def add_benchmark(folder: FolderWriter, subject: Subject, benchmark: MemoryBenchmark) -> None:
    """Add torch, and each variant, which all ran in the same rounds."""
    first = benchmark.variants[0]
    assert first.step.samples is not None
    peaks = {
        "allocator_peak_bytes": first.peaks.torch_allocator_bytes,
        "resident_peak_bytes": first.peaks.torch_resident_bytes,
    }
    torchs = Row(subject, TORCH, first.step.samples.baseline_samples_s, more={**peaks, "bound": None})
    folder.add([torchs, *(_row(subject, variant) for variant in benchmark.variants)])


def known_benchmark(
    folder: FolderWriter,
    subject: Subject,
    input_shape: Sequence[int],
    configs: Sequence[Config],
    environment: Environment,
    runs: int,
) -> MemoryBenchmark | None:
    """Return what an earlier run measured; ``None``: nothing."""
    lines = folder.known(subject)
    torchs = next((line for line in lines if line["contestant"] == TORCH), None)
    ours = {line["bound"]: line for line in lines if line["contestant"] == OURS}
    if torchs is None or any(memory_bound(config) not in ours for config in configs):
        return None
    variants = []
    for config in configs:
        line = ours[memory_bound(config)]
        peaks = PeakComparison(
            *(one["allocator_peak_bytes"] for one in (torchs, line)),
            *(one["resident_peak_bytes"] for one in (torchs, line)),
        )
        variants.append(MemoryVariant(config, peaks, Comparison.of(torchs["samples_s"], line["samples_s"])))
    return MemoryBenchmark(str(subject["network"]), tuple(input_shape), environment, tuple(variants), runs)


def _row(subject: Subject, variant: MemoryVariant) -> Row:
    assert variant.step.samples is not None
    more = {
        "allocator_peak_bytes": variant.peaks.mucudnn_allocator_bytes,
        "resident_peak_bytes": variant.peaks.mucudnn_resident_bytes,
        "bound": memory_bound(variant.config),
    }
    limit = None if variant.config.has_headroom_limit else variant.config.workspace_limit_bytes
    samples_s = variant.step.samples.time_samples_s
    return Row(subject, OURS, samples_s, str(variant.config.policy), limit, more=more)
