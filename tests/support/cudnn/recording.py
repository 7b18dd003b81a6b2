"""What cuDNN 9.19 offers for an H200, recorded by ``mucudnn.bench.suites.gpu.record_engines``: no cuDNN is needed."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from support.places import DATA

from mucudnn.kernels.cudnn.constants import BehaviorNote, NumericalNote
from mucudnn.kernels.cudnn.engines import Engine, EngineConfig
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation

RECORDING = DATA / "cudnn_919_h200.json.gz"
Offers = dict[ConvProblem, dict[int, list[Engine]]]


@dataclass
class RecordedDevice:
    """Stands for a ``Device``; ``asked`` gathers (micro-batch size, every)."""

    name: str
    library: SimpleNamespace
    offers: Offers
    asked: list[tuple[int, bool]] = field(default_factory=list)

    def engines(self, problem: ConvProblem, n: int, *, every: bool = False) -> list[Engine]:
        self.asked.append((n, every))
        return self.offers[problem][n]


@lru_cache(maxsize=1)
def recorded() -> dict[str, Any]:
    return json.loads(gzip.decompress(RECORDING.read_bytes()))


@lru_cache(maxsize=1)
def recorded_offers() -> Offers:
    return {
        _problem(entry["problem"]): {int(n): [_engine(*row) for row in rows] for n, rows in entry["engines"].items()}
        for entry in recorded()["problems"]
    }


def recorded_device() -> RecordedDevice:
    library = SimpleNamespace(version_text=recorded()["cudnn"])
    return RecordedDevice(recorded()["device"]["deviceName"], library, recorded_offers())


def _problem(values: dict[str, Any]) -> ConvProblem:
    pairs = {name: tuple(values[name]) for name in ("stride", "padding", "dilation")}
    kinds = {"operation": Operation(values["operation"]), "memory_format": MemoryFormat(values["memory_format"])}
    return ConvProblem(**{**values, **pairs, **kinds})


def _engine(name: str, numerical: list[int], behavior: list[int], workspace_bytes: int) -> Engine:
    notes = frozenset(map(NumericalNote, numerical)), frozenset(map(BehaviorNote, behavior))
    return Engine(EngineConfig.named(name), *notes, workspace_bytes)
