"""A machine whose costs are known, and the benchmarks of convolutions on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support.clock.machine import FakeAlgorithm, FakeClock, fake_machine, linear

from mucudnn.bench.results.reading import ResultFolder, read_folder
from mucudnn.bench.sources.layers import LayerTable
from mucudnn.bench.suites.convolutions import Compared, benchmark_convolutions
from mucudnn.core.config import Config
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Configuration
from mucudnn.measuring.operands import Operands
from mucudnn.measuring.whole_runs import Machine
from mucudnn.store.database import Database


class MadeUpMachine:
    """Torch at 20 ms a sample; ``quick`` at 10 ms with 100 bytes each, ``small`` at 15 ms with none; 1 ms a call.

    pace: how much longer a problem takes. slowdown: how much longer a configuration takes as a whole run.
    """

    def __init__(self, out: Path) -> None:
        self.out, self.clock, self.database = out, FakeClock(), Database(":memory:")
        self.native = FakeAlgorithm("native", self.clock, linear(0.02))
        self.quick = FakeAlgorithm("quick", self.clock, linear(0.01, 0.001), scratch_bytes_per_sample=100)
        self.small = FakeAlgorithm("small", self.clock, linear(0.015, 0.001))
        self.pace: Callable[[ConvProblem], float] = lambda problem: 1.0
        self.slowdown: Callable[[Configuration], float] = lambda configuration: 1.0
        self.before_torch: Callable[[ConvProblem], object] = lambda problem: None
        self.torch_bytes = 0  # beside the result

    @property
    def machine(self) -> Machine:
        algorithms = [self.native, self.quick, self.small]
        machine = fake_machine(self.clock, algorithms, lambda configuration: self.slowdown(configuration))

        def whole_run(problem: ConvProblem, *args: Any, **how: Any) -> Callable[[], None]:
            call = machine.whole_run(problem, *args, **how)

            def run() -> None:
                start_s = self.clock.seconds
                call()
                self.clock.advance((self.pace(problem) - 1) * (self.clock.seconds - start_s))

            return run

        def run_torch(problem: ConvProblem, operands: Operands) -> object:
            self.before_torch(problem)
            machine.run_torch(problem, operands)
            workspace = torch.empty(self.torch_bytes, dtype=torch.uint8)
            return torch.empty_like(operands.y), workspace

        return replace(machine, whole_run=whole_run, run_torch=run_torch)

    @property
    def own(self) -> Mapping[str, Any]:
        """What benchmarks are told of it."""
        return {"machine": self.machine, "database": self.database}

    def benchmark(self, table: LayerTable, compared: Compared, **config: Any) -> ResultFolder:
        asked = Config(operations=(Operation.FORWARD,), **config)
        benchmark_convolutions(table, asked, compared, self.out, **self.own)
        return read_folder(self.out)
