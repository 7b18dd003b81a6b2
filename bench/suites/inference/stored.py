"""Keeps times of inference in a result folder, and finds them again.

A subject is a call of the whole model, or of one convolution module. There are two parts, which have turns of their
own: kept filters, beside torch and filters that are not kept; and runtimes, in processes of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mucudnn.bench.contests.timing import MedianTime
from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.rows import Line, Row, Subject
from mucudnn.bench.folders.writing import FolderWriter
from mucudnn.bench.report.records import config_record
from mucudnn.bench.suites.inference.result import RuntimeResult, RuntimesComparison, Variants
from mucudnn.bench.suites.inference.runtime import Runtime
from mucudnn.running.environment import Environment
from mucudnn.words.config import Config
from mucudnn.words.problem import MemoryFormat

_VARIANTS = {"torch": "torch", "mucudnn-not-kept": "not_kept", "mucudnn": "kept"}  # contestant -> field
FILTERS, RUNTIMES = "kept filters", "runtimes"
_COLUMNS = ("network", "part", "layer", "batch_size", "memory_format")


@dataclass(frozen=True, slots=True)
class InferenceFolder:
    """A folder of one model with one input. folder: ``None``: nothing is kept, and nothing known."""

    folder: FolderWriter | None
    name: str
    input_shape: tuple[int, ...]
    memory_format: MemoryFormat

    def variants(self, layer: str | None) -> Variants | None:
        """Return what an earlier run measured of a layer; ``None`` instead of a layer: the whole model."""
        times = {
            _VARIANTS[line["contestant"]]: MedianTime.of_samples(line["samples_s"])
            for line in self._known(FILTERS, layer)
            if line["contestant"] in _VARIANTS
        }
        return Variants(**times) if len(times) == len(_VARIANTS) else None

    def add_variants(self, layer: str | None, variants: Variants) -> None:
        """Keep what was measured of a layer, or of the whole model."""
        if self.folder is not None:
            subject = self._subject(FILTERS, layer)
            times = {name: getattr(variants, each) for name, each in _VARIANTS.items()}
            self.folder.add([Row(subject, name, time.samples_s) for name, time in times.items()])

    def runtimes(self, asked: Sequence[Runtime]) -> tuple[RuntimeResult, ...] | None:
        """Return what an earlier run measured of these runtimes, if it did of all."""
        lines = {line["contestant"]: line for line in self._known(RUNTIMES, None)}
        if any(runtime not in lines for runtime in asked):
            return None
        return tuple(_result_of(lines[runtime]) for runtime in asked)

    def add_runtimes(self, comparison: RuntimesComparison) -> None:
        """Keep what was measured of runtimes."""
        if self.folder is not None:
            subject = self._subject(RUNTIMES, None)
            self.folder.add([_row_of(subject, result) for result in comparison.runtimes])

    def _known(self, part: str, layer: str | None) -> list[Line]:
        return [] if self.folder is None else self.folder.known(self._subject(part, layer))

    def _subject(self, part: str, layer: str | None) -> Subject:
        values = (self.name, part, layer, self.input_shape[0], str(self.memory_format))
        return dict(zip(_COLUMNS, values, strict=True))


def header_of(
    name: str,
    input_shape: Sequence[int],
    memory_format: MemoryFormat,
    config: Config,
    rounds: int,
    parts: Sequence[str],
    environment: Environment,
) -> Header:
    """Describe a run. wanted: the parts, of which one has as many subjects as the model has convolutions, and one."""
    settings = {
        "input_shape": list(input_shape),
        "memory_formats": [str(memory_format)],
        "rounds": rounds,
        "parts": list(parts),
        **config_record(replace(config, database=None)),
    }
    return Header(*("inference", name, settings, environment), subject_columns=_COLUMNS, wanted=len(parts))


def _row_of(subject: Subject, result: RuntimeResult) -> Row:
    more = {
        "version": result.version,
        "relative_difference": result.difference,
        "ready_after_s": result.ready_after_s,
        "kinds_s": dict(result.kinds_s),
    }
    samples_s = () if result.time is None else result.time.samples_s
    return Row(subject, result.runtime, samples_s, failure=result.failure, more=more)


def _result_of(line: Line) -> RuntimeResult:
    return RuntimeResult(
        Runtime(line["contestant"]),
        line["version"],
        MedianTime.of_samples(line["samples_s"]) if line["samples_s"] else None,
        line["relative_difference"],
        line["ready_after_s"],
        line["failure"],
        line["kinds_s"],
    )
