"""Keeps steps of data-parallel training in a result folder.

A subject is a step with one size of buckets, its contestants are torch's convolutions and ours. Samples are those of
the rank that was slowest in the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.rows import Row, Subject
from mucudnn.bench.folders.writing import FolderWriter
from mucudnn.bench.report.records import config_record
from mucudnn.bench.suites.data_parallel.result import DataParallelResult, Setting
from mucudnn.running.environment import Environment
from mucudnn.words.config import Config

_OF_SETTING = ("ranks", "batch_size", "dtype", "memory_format", "communication")
_TEXTS = ("memory_format", "communication")
_COLUMNS = ("network", *_OF_SETTING, "bucket_cap_mb")


def header_of(
    setting: Setting, config: Config, bucket_caps: Sequence[float | None], rounds: int, environment: Environment
) -> Header:
    """Describe a run. environment: of each rank."""
    settings = {
        **{name: value for name, value in asdict(setting).items() if name not in ("source", "device")},
        "bucket_caps_mb": list(bucket_caps),
        "rounds": rounds,
        **config_record(replace(config, database=None)),
    }
    return Header(
        *("data-parallel", setting.source, settings, environment), subject_columns=_COLUMNS, wanted=len(bucket_caps)
    )


def is_known(folder: FolderWriter, setting: Setting, bucket_caps: Sequence[float | None]) -> bool:
    """Whether an earlier run has measured all sizes of buckets."""
    return all(folder.known(_subject(setting, cap)) for cap in bucket_caps)


def add_result(folder: FolderWriter, result: DataParallelResult) -> None:
    """Add all steps, which ran in the same rounds."""
    rows = []
    for step in result.steps:
        more = {
            "alone_s": step.alone_s,
            "convolutions_s": step.split.convolutions_s,
            "other_compute_s": step.split.rest_s,
            "exposed_s": step.exposed_s,
            "buckets": len(step.bucket_bytes),
            "compared": step.equality.checked,
            "equal": step.equality.equal,
        }
        subject = _subject(result.setting, step.bucket_cap_mb)
        rows.append(Row(subject, str(step.convolutions), step.samples_s, more=more))
    folder.add(rows)


def _subject(setting: Setting, bucket_cap_mb: float | None) -> Subject:
    values = (str(getattr(setting, name)) if name in _TEXTS else getattr(setting, name) for name in _OF_SETTING)
    return dict(zip(_COLUMNS, (setting.source, *values, bucket_cap_mb), strict=True))
