"""A machine with two algorithms whose costs are known, and a database of its own."""

from __future__ import annotations

from collections.abc import Callable

from support.clock.machine import FORWARD, FakeAlgorithm, FakeClock, fake_machine, linear

from mucudnn.core.config import Config
from mucudnn.core.problem import ConvProblem
from mucudnn.core.records import Configuration
from mucudnn.measuring.whole_runs import Machine
from mucudnn.store.database import Database
from mucudnn.tuning.tuner import Tuning, tune

BATCH = 8
NO_LIMIT = Config(workspace_limit=None)


class Bench:
    """Torch at 20 ms a sample without workspace; ``quick`` at 10 ms a sample, with 100 + 10 bytes a sample."""

    def __init__(self, slowdown: Callable[[Configuration], float] = lambda _: 1.0) -> None:
        self.clock = FakeClock()
        self.native = FakeAlgorithm("native", self.clock, linear(0.02))
        self.quick = FakeAlgorithm(
            "quick", self.clock, linear(0.01), prepared_bytes=100, scratch_bytes_per_sample=10, error=1e-4
        )
        self.quick.error = 0.0
        self.database = Database(":memory:")
        self.slowdown = slowdown

    @property
    def machine(self) -> Machine:
        return fake_machine(self.clock, [self.native, self.quick], self.slowdown)

    def tune(self, *problems: ConvProblem, config: Config = NO_LIMIT) -> Tuning:
        of = {"database": self.database, "machine": self.machine, "progress": self.progress}
        return tune(problems or [FORWARD], BATCH, config, **of)

    def progress(self, text: str, fraction: float) -> None:
        """Do nothing with what tuning tells."""

    @property
    def steps(self) -> int:
        return len(self.native.sizes_run) + len(self.quick.sizes_run)
