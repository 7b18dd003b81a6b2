"""A table of two layers, and what is stored of them: costs that are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from support.clock.machine import ENVIRONMENT, FORWARD

from mucudnn.bench.sources.layers import Layer, LayerTable
from mucudnn.core.records import Comparison, Measurement, MicroConfig, Task
from mucudnn.running.environment import Environment

MIB = 2**20
TABLE = LayerTable("mynet", (Layer("one", FORWARD, 8, 2), Layer("two", replace(FORWARD, k=3), 8, 1)))


class Stored:
    """Torch takes 100 ms, ``small`` 80 ms with 10 MiB, ``large`` 50 ms with 100 MiB, in each of the layers."""

    environment: Environment = ENVIRONMENT

    def measurements(self, task: Task) -> Sequence[Measurement]:
        costs = {"native": (0.1, 0), "small": (0.08, 10 * MIB), "large": (0.05, 100 * MIB)}
        return [Measurement(MicroConfig(a, 8), 0.0, step_s, 0, size, 1e-7) for a, (step_s, size) in costs.items()]

    def whole_runs(self, task: Task) -> dict[tuple[MicroConfig, ...], Comparison]:
        return {(m.micro_config,): Comparison(0.1, m.step_s, 0.0) for m in self.measurements(task)}
