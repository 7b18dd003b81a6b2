"""One run of the inference benchmark: its result folder, and the columns that all of its rows share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.writing import FolderWriter, open_folder
from mucudnn.bench.report.records import config_record
from mucudnn.measuring.timing.timer import Clock, WallClock
from mucudnn.running.environment import current_environment
from mucudnn.words.config import Config
from mucudnn.words.problem import MemoryFormat

FILTERS, RUNTIMES = "kept filters", "runtimes"  # the parts of the benchmark
NOT_KEPT, KEPT = "mucudnn-not-kept", "mucudnn"  # contestants of the part FILTERS, beside torch
WHOLE = "the whole model"  # in place of a layer
_COLUMNS = ("network", "part", "layer", "batch_size", "memory_format")


@dataclass(frozen=True, slots=True)
class InferenceRun:
    """A run of the inference benchmark on one model with one input.

    clock: times calls, not tuning; the processes of runtimes have clocks of their own.
    """

    folder: FolderWriter
    name: str
    batch_size: int
    memory_format: MemoryFormat
    rounds: int
    clock: Clock = field(default_factory=WallClock)

    @classmethod
    @contextmanager
    def opened(
        cls,
        out: Path,
        name: str,
        input_shape: Sequence[int],
        memory_format: MemoryFormat,
        config: Config,
        rounds: int,
        parts: Sequence[str],
    ) -> Iterator[InferenceRun]:
        """Open the result folder ``out`` for a run. parts: the parts of the run, each with its contestants.

        Raises the errors of ``open_folder``.
        """
        settings = {
            "input_shape": list(input_shape),
            "memory_formats": [str(memory_format)],
            "rounds": rounds,
            "parts": list(parts),
            **config_record(config),
        }
        header = Header(*("inference", name, settings, current_environment()), _COLUMNS, wanted=len(parts))
        with open_folder(out, header) as folder:
            try:
                yield cls(folder, name, input_shape[0], memory_format, rounds)
            finally:
                folder.write_summary()

    def subject(self, part: str, layer: str = WHOLE) -> dict[str, Any]:
        """Return the columns that identify the result rows of a layer or of the whole model."""
        values = (self.name, part, layer, self.batch_size, str(self.memory_format))
        return dict(zip(_COLUMNS, values, strict=True))

    def is_known(self, part: str, layer: str = WHOLE) -> bool:
        """Return whether the result folder already has the rows of this layer."""
        return bool(self.folder.known(self.subject(part, layer)))
