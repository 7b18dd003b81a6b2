"""Finds and runs the rivals of micro-batches: whole mini-batches on one algorithm.

Where a library offers algorithms, the rivals are these: the fastest within a limit is what the library's own search
with a cap would give. They run as torch runs them: straight into the new result, with the library's own workspace and
nothing else. Mucudnn's own call takes a temporary more for dw, which a rival must not pay for. Elsewhere all algorithms
are rivals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from mucudnn.kernels.contract.algorithm import WholeBatch
from mucudnn.measuring.operands import Operands
from mucudnn.measuring.whole_runs import Machine
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.results import Configuration, Measurement
from mucudnn.words.task import Task


@dataclass(frozen=True, slots=True)
class Undivided:
    """Rivals of one task that were measured, fastest first, with the workspace that they need.

    offered: those that a library offers, by name.
    """

    configurations: Sequence[Configuration]
    offered: Mapping[str, WholeBatch]

    @classmethod
    def of(cls, task: Task, machine: Machine, measurements: Sequence[Measurement]) -> Undivided:
        """Rivals among measurements that the config allows."""
        n = task.batch_size
        offered = dict(chain.from_iterable(s.undivided(task.problem, n).items() for s in machine.sources))
        rivals = [
            Configuration((m.micro_config,), m.setup_s + m.step_s, _workspace_bytes(m, offered))
            for m in measurements
            if m.micro_config.micro_batch_size == n and (not machine.sources or m.micro_config.algorithm in offered)
        ]
        return cls(sorted(rivals, key=lambda c: (c.time_s, c.workspace_bytes)), offered)

    def within(self, limit_bytes: int | None, most: int) -> list[Configuration]:
        """The fastest within the limit, at most ``most`` of them."""
        fitting = [c for c in self.configurations if limit_bytes is None or c.workspace_bytes <= limit_bytes]
        return fitting[:most]

    def of_library(self, configuration: Configuration) -> WholeBatch | None:
        """The rival that ``run_alone`` runs; ``None`` for what no library offers."""
        return self.offered.get(configuration.algorithms[0])


def run_alone(rival: WholeBatch, problem: ConvProblem, operands: Operands) -> Tensor:
    """Compute the whole mini-batch as a library does. Returns what the operation writes, newly allocated."""
    x, w, y = operands.x, operands.w, operands.y
    match problem.operation:
        case Operation.FORWARD:
            written = y = torch.empty_like(y)
        case Operation.BACKWARD_DATA:
            written = x = torch.empty_like(x)
        case Operation.BACKWARD_FILTER:
            written = w = torch.empty_like(w)
    rival.run(x, w, y)
    return written


def _workspace_bytes(measurement: Measurement, offered: Mapping[str, WholeBatch]) -> int:
    rival = offered.get(measurement.micro_config.algorithm)
    return measurement.prepared_bytes + measurement.scratch_bytes if rival is None else rival.workspace_bytes
