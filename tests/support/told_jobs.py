"""Jobs whose measurements and whole runs are told, not made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from mucudnn.core.records import Configuration, Measurement, MicroConfig, Task
from mucudnn.tuning.job import Job, Outcome


class ToldRuns(dict[tuple[MicroConfig, ...], Outcome]):
    """Whole runs that a function makes when they are first asked for; it gets the configuration's predicted time."""

    def __init__(self, run: Callable[[Configuration], Outcome], measurements: Sequence[Measurement]) -> None:
        super().__init__()
        self.run, self.costs = run, {m.micro_config: m for m in measurements}

    def get(self, parts: tuple[MicroConfig, ...], default: Outcome = None) -> Outcome:  # type: ignore[override]
        if parts not in self:
            known = [self.costs[part] for part in parts if part in self.costs]
            setups = {m.micro_config.algorithm: m.setup_s for m in known}
            time_s = sum(setups.values()) + sum(m.step_s for m in known) if known else inf
            self[parts] = self.run(Configuration(parts, time_s, 0))
        return self[parts]


def told_job(
    task: Task,
    measurements: Sequence[Measurement],
    run: Callable[[Configuration], Outcome],
    declared_bytes: int | None = None,
) -> Job:
    results = {m.micro_config: m for m in measurements}
    runs = ToldRuns(run, measurements)
    return Job(task, inf, (), (), {**results}, outcomes=runs, declared_bytes=declared_bytes, is_own=False)
