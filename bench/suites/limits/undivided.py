"""Finds and runs the rivals of micro-batches: whole mini-batches on one algorithm.

On CUDA they are cuDNN's engine configurations: the fastest within a limit is what cudnnFind with a cap would give. They
run as torch runs an engine: straight into the new result, with the engine's own workspace and nothing else. Mucudnn's
own call of an engine takes a temporary more for dw, which a rival must not pay for. Elsewhere they are all algorithms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mucudnn.bench.measure.operands import Operands
from mucudnn.bench.measure.whole_runs import Machine
from mucudnn.kernels.cudnn.algorithms import CudnnEngine, Plan, Pointers
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.results import Configuration, Measurement
from mucudnn.words.task import Task


@dataclass(frozen=True, slots=True)
class Undivided:
    """Rivals of one task that were measured, fastest first, with the workspace that they need.

    engines: those of cuDNN, by name.
    """

    configurations: Sequence[Configuration]
    engines: Mapping[str, CudnnEngine]

    @classmethod
    def of(cls, task: Task, machine: Machine, measurements: Sequence[Measurement]) -> Undivided:
        """Rivals among measurements that the config allows."""
        n = task.batch_size
        offered = (a for source in machine.sources for a in source.offered(task.problem, [n]))
        engines = {a.name: a for a in offered if isinstance(a, CudnnEngine) and not a.adds_in_place}
        rivals = [
            Configuration((m.micro_config,), m.setup_s + m.step_s, _workspace_bytes(task, m, engines))
            for m in measurements
            if m.micro_config.micro_batch_size == n and (not machine.sources or m.micro_config.algorithm in engines)
        ]
        return cls(sorted(rivals, key=lambda c: (c.time_s, c.workspace_bytes)), engines)

    def within(self, limit_bytes: int | None, most: int) -> list[Configuration]:
        """The fastest within the limit, at most ``most`` of them."""
        fitting = [c for c in self.configurations if limit_bytes is None or c.workspace_bytes <= limit_bytes]
        return fitting[:most]

    def engine(self, configuration: Configuration) -> CudnnEngine | None:
        """The engine that ``run_engine`` runs; ``None`` for what is no engine of cuDNN's."""
        return self.engines.get(configuration.algorithms[0])


def run_engine(engine: CudnnEngine, problem: ConvProblem, operands: Operands) -> Tensor:
    """Run the whole mini-batch on one engine. Returns a new tensor with the result. Not run on a GPU yet."""
    x, w, y = operands.x, operands.w, operands.y
    match problem.operation:
        case Operation.FORWARD:
            written = y = torch.empty_like(y)
        case Operation.BACKWARD_DATA:
            written = x = torch.empty_like(x)
        case Operation.BACKWARD_FILTER:
            written = w = torch.empty_like(w)
    plan = _plan(engine, problem, operands.batch_size)
    workspace = torch.empty(engine.backend.engine(plan).workspace_bytes, dtype=torch.uint8, device=x.device)
    stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
    engine.backend.execute(plan, Pointers(x.data_ptr(), w.data_ptr(), y.data_ptr()), workspace.data_ptr(), stream)
    return written


def _workspace_bytes(task: Task, measurement: Measurement, engines: Mapping[str, CudnnEngine]) -> int:
    engine = engines.get(measurement.micro_config.algorithm)
    if engine is None:
        return measurement.prepared_bytes + measurement.scratch_bytes
    return engine.backend.engine(_plan(engine, task.problem, task.batch_size)).workspace_bytes


def _plan(engine: CudnnEngine, problem: ConvProblem, n: int) -> Plan:
    return Plan(engine.config, problem, n)
