"""Policy for busy machines: wait before measuring, and repeat disturbed measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mucudnn.core.errors import say_once
from mucudnn.core.problem import ConvProblem
from mucudnn.core.records import Configuration, Failure, Measurement, MicroConfig, is_busy
from mucudnn.core.terminal import Progress
from mucudnn.measuring.load import Load, Watch

MOST_WAITED_S = 3.0  # total of all waits in a run; results under load are marked and can be measured again
BUSY_TEXT = (
    "other programs were running: some timings may be too high, and are marked; the next tuning on a quiet machine "
    "measures them again"
)


@dataclass(slots=True)
class Quiet:
    """What is known of the load during one tuning, and how long it may still wait for a quiet machine.

    progress, at: the user's callback, which is told the reason of a wait, and the fraction of the tuning that is done.
    patience_s: limit on the total of all further waits, in seconds.
    disturbed: what other processes disturbed when it was last measured.
    """

    watch: Watch
    progress: Progress
    patience_s: float = MOST_WAITED_S
    at: float = 0.0
    disturbed: set[tuple[ConvProblem, MicroConfig | Configuration]] = field(default_factory=set)
    _load_unknown: bool = False

    def observe(self) -> bool:
        """Observe the load, for half a second if it is not known; return whether the machine is known to be quiet."""
        self._warn_of_shortage()
        if self.watch.current().share is None and not self._load_unknown:
            self.watch.pause()
            self._load_unknown = self.watch.current().share is None
        return not self._load_unknown and self.watch.current().is_quiet

    def wait(self) -> Load:
        """Wait for free cores, at most for the remaining waiting time; return the load afterwards."""
        self._warn_of_shortage()
        self.patience_s -= self.watch.wait(lambda text: self.progress(text, self.at), self.patience_s)
        return self.watch.current()

    def remember(self, problem: ConvProblem, subject: MicroConfig | Configuration, load: float | None) -> None:
        """Record whether the last measurement of a micro-config or configuration was disturbed by other processes."""
        self.disturbed.discard((problem, subject))
        if is_busy(load):
            self.disturbed.add((problem, subject))

    def trusted(self, results: Sequence[Measurement | Failure]) -> Sequence[Measurement | Failure]:
        """Return the stored results; if the machine is quiet now, leave out disturbed ones, so these are repeated."""
        sound = undisturbed(results)
        return sound if len(sound) < len(results) and self.observe() else results

    def end(self) -> None:
        """Warn, once in a process, if disturbed results remain."""
        if self.disturbed:
            say_once(BUSY_TEXT)

    def _warn_of_shortage(self) -> None:
        """Warn, once in a process, if there are more threads than cores."""
        if shortage := self.watch.shortage():
            say_once(shortage)


def undisturbed(results: Sequence[Measurement | Failure]) -> list[Measurement | Failure]:
    """Return the results that no other process disturbed.

    If there are others, candidates that were skipped after a comparison with them are left out, too.
    """
    measurements = [result for result in results if isinstance(result, Measurement)]
    if not any(measurement.is_disturbed for measurement in measurements):
        return [*results]
    return [r for r in results if not (r.is_disturbed if isinstance(r, Measurement) else r.is_passed_over)]
