"""Tunings made up of known costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from support.clock.machine import ENVIRONMENT

from mucudnn.bench.sources.table_tuning import TableTuning, TunedLayer
from mucudnn.tuning.result import TunedProblem
from mucudnn.words.config import Config
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.results import Configuration, Measurement, MicroConfig

PROBLEM = ConvProblem(Operation.FORWARD, c=2, h=3, w=3, k=2, r=1, s=1)
MIB = 2**20

made_up = Measurement(MicroConfig("native", 1), 0.0, 0.0, 0, 0, relative_error=0.0, noise=0.01, samples=5)


def measured_ms(algorithm: str, size: int, step_ms: float, scratch_bytes: int = 0, **others: float) -> Measurement:
    micro_config = MicroConfig(algorithm, size)
    return replace(  # type: ignore[type-var]
        made_up, micro_config=micro_config, step_s=step_ms / 1e3, scratch_bytes=scratch_bytes, **others
    )


def powers(algorithm: str, up_to: int, step_ms: Callable[[int], float], **others: float) -> list[Measurement]:
    """An algorithm at 1, 2, 4, ... up to ``up_to``, without workspace."""
    sizes = (2**exponent for exponent in range(up_to.bit_length()))
    return [measured_ms(algorithm, size, step_ms(size), **others) for size in sizes]


def layer(
    measurements: Sequence[Measurement], batch_size: int, *, name: str = "conv", count: int = 1, chosen: str = "other"
) -> TunedLayer:
    """``chosen``: the algorithm that whole runs like best."""
    configuration = Configuration((MicroConfig(chosen, batch_size),), 1.0, 0)
    tuned = TunedProblem(
        PROBLEM, batch_size, configuration, 3.0, 2.0, 0.0, "made up", tuple(measurements), error_bound=1e-5
    )
    return TunedLayer((name,), count, tuned)


def tuning(*layers: TunedLayer, limit_bytes: int | None = None, wanted: int | None = None) -> TableTuning:
    config = Config(workspace_limit=limit_bytes)
    return TableTuning("made up", config, ENVIRONMENT, layers, len(layers) if wanted is None else wanted)
