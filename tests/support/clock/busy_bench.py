"""A machine on which others work for a while: what runs on it is slower then, one algorithm more than the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from support.clock.machine import FORWARD, FakeAlgorithm, FakeClock, fake_machine
from support.clock.shared_machine import SharedProcessors

from mucudnn.core.config import Config
from mucudnn.core.problem import ConvProblem
from mucudnn.measuring.whole_runs import Machine
from mucudnn.store.database import Database
from mucudnn.tuning.tuner import Tuning, tune

BATCH = 8
NO_LIMIT = Config(workspace_limit=None)


class SharedClock(FakeClock):
    """Moves the processors' time with its own."""

    def __init__(self, processors: SharedProcessors) -> None:
        super().__init__()
        self.processors = processors

    def advance(self, seconds: float) -> None:
        self.processors.work(seconds)

    def now(self) -> float:
        return self.processors.seconds


class BusyBench:
    """Torch at 20 ms a sample, ``quick`` at 10 ms. While others work: torch at 40 ms, quick at 80 ms."""

    def __init__(self, processors: SharedProcessors) -> None:
        self.processors = processors
        self.clock = SharedClock(processors)
        self.native = FakeAlgorithm("native", self.clock, self._linear(0.02, 0.04))
        self.quick = FakeAlgorithm("quick", self.clock, self._linear(0.01, 0.08))
        self.database = Database(":memory:")
        self.told: list[str] = []

    def _linear(self, quiet_s: float, busy_s: float) -> Callable[[int], float]:
        return lambda size: size * (busy_s if self.processors.is_busy() else quiet_s)

    @property
    def machine(self) -> Machine:
        made = fake_machine(self.clock, [self.native, self.quick])
        return replace(made, watch=self.processors.watch())

    def progress(self, text: str, fraction: float) -> None:
        self.told.append(text)

    def tune(self, *problems: ConvProblem, config: Config = NO_LIMIT) -> Tuning:
        given = (problems or [FORWARD], BATCH, config)
        return tune(*given, database=self.database, machine=self.machine, progress=self.progress)

    @property
    def steps(self) -> int:
        return len(self.native.sizes_run) + len(self.quick.sizes_run)
