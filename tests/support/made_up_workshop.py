"""A workshop that measures nothing: what it would choose, and how long that takes, is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from support.clock.machine import FakeClock

from mucudnn.core.answers import TunedProblem
from mucudnn.core.config import Config
from mucudnn.core.problem import ConvProblem
from mucudnn.core.records import Configuration, Measurement, MicroConfig, Task
from mucudnn.enabling import switch
from mucudnn.enabling.session import Session

Hook = Callable[[Task], None]


@dataclass
class MadeUpWorkshop:
    """Chooses one algorithm for all, a sample a step, twice as fast as torch's own.

    stored: tasks that the database has; True: all.
    near: tasks of other sizes that it has.
    fails: what tuning raises.
    while_tuning: is called meanwhile.
    """

    algorithm: str = "gemm"
    stored: bool = False
    near: Sequence[Task] = ()
    takes_s: float = 1.0
    fails: Exception | None = None
    while_tuning: Hook = lambda task: None
    clock: FakeClock = field(default_factory=FakeClock)
    prepared: int = 0
    looked_up: list[Task] = field(default_factory=list)
    tuned: list[Task] = field(default_factory=list)

    def prepare(self) -> None:
        self.prepared += 1

    def may_know(self, w_shape: Sequence[int], device: torch.device) -> bool:
        return self.stored or bool(self.near)

    def may_have(self, problem: ConvProblem, device: torch.device) -> bool:
        return self.stored

    def look_up(self, task: Task, device: torch.device) -> TunedProblem | None:
        self.looked_up.append(task)
        return self._choice(task) if self.stored else None

    def look_up_nearest(self, task: Task, device: torch.device) -> list[TunedProblem]:
        return [self._choice(task) for task in self.near]

    def tune(self, task: Task, device: torch.device) -> TunedProblem:
        self.tuned.append(task)
        self.clock.advance(self.takes_s)
        self.while_tuning(task)
        if self.fails is not None:
            raise self.fails
        return self._choice(task)

    def _choice(self, task: Task) -> TunedProblem:
        n = task.batch_size
        configuration = Configuration((MicroConfig(self.algorithm, 1),) * n, time_s=0.01 * n, workspace_bytes=0)
        if self.algorithm == "native":
            configuration = Configuration((MicroConfig("native", n),), time_s=0.02 * n, workspace_bytes=0)
        measured = (
            Measurement(MicroConfig(self.algorithm, 1), 0.0, 0.01, 0, 0, 1e-7),
            Measurement(MicroConfig("native", n), 0.0, 0.02 * n, 0, 0, 1e-7),
        )
        time_s = configuration.time_s
        return TunedProblem(
            task.problem, n, configuration, 0.02 * n, time_s, 1e-7, "made up", measured, (), task.limit_bytes
        )

    @property
    def operations(self) -> list[str]:
        return [str(task.problem.operation) for task in self.tuned]


@contextmanager
def enabled(workshop: MadeUpWorkshop, config: Config | None = None, *, patience: float = 0.0) -> Iterator[Session]:
    """Have everything in the process tuned by a made-up workshop inside; without patience, at the first call."""
    session = Session(config or Config(workspace_limit=None, keep_heap=False), workshop, workshop.clock.now)  # type: ignore[arg-type]
    with switch._state.nesting(session), patch("mucudnn.enabling.session.PATIENCE", patience):
        yield session
