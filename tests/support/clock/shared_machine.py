"""A machine that is shared with others, by a clock that work moves: how busy it is can be told exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from support.clock.machine import FakeClock

from mucudnn.measuring.load import ProcessorUse, Watch


@dataclass(slots=True)
class SharedProcessors:
    """Cores of which others use ``others`` from ``busy_from_s`` until ``quiet_from_s``."""

    cores: int = 2
    threads: int = 2
    others: float = 0.0
    busy_from_s: float = 0.0
    quiet_from_s: float = inf
    throttled: float = 0.0
    seconds: float = 0.0
    busy_s: float = 0.0
    own_s: float = 0.0
    throttled_s: float = 0.0

    def is_busy(self) -> bool:
        return self.busy_from_s <= self.seconds < self.quiet_from_s and self.others > 0

    def work(self, seconds: float, **changes: float) -> None:
        """Let this process work for so long; changes: of the fields, from now on."""
        for name, value in changes.items():
            setattr(self, name, value)
        self._pass(seconds, own_s=seconds * self.threads)

    def rest(self, seconds: float) -> None:
        self._pass(seconds, own_s=0.0)

    def _pass(self, seconds: float, own_s: float) -> None:
        self.busy_s += own_s + seconds * self.others * self.is_busy()
        self.own_s += own_s
        self.throttled_s += seconds * self.throttled
        self.seconds += seconds

    def now(self) -> float:
        return self.seconds

    def use(self) -> ProcessorUse:
        return ProcessorUse(self.seconds, self.busy_s, self.own_s, self.throttled_s, self.cores, self.threads)

    def watch(self, cores: Callable[[], float] | None = None) -> Watch:
        return Watch(self.use, cores, clock=self.now, sleep=self.rest)


class SharedClock(FakeClock):
    """Moves the processors' time with its own."""

    def __init__(self, processors: SharedProcessors) -> None:
        super().__init__()
        self.processors = processors

    def advance(self, seconds: float) -> None:
        self.processors.work(seconds)

    def now(self) -> float:
        return self.processors.seconds
