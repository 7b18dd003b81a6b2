"""Policy for busy machines: wait before measuring, and repeat disturbed measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mucudnn.core.errors import say_once
from mucudnn.core.problem import ConvProblem
from mucudnn.core.records import Comparison, Configuration, Failure, Measurement, MicroConfig, is_busy
from mucudnn.measuring.load import Load, Watch
from mucudnn.tuning.race import Race

MOST_WAITED_S = 3.0  # total of all waits in a run; results under load are marked and can be measured again

Outcomes = Sequence[Comparison | Exception | None]
_BUSY = (
    "other programs were running: some timings may be too high, and are marked; the next tuning on a quiet machine "
    "measures them again"
)


class Quiet:
    """Policy on a busy machine: wait, repeat measurements that other processes disturbed, and warn once if some remain.

    tell: called with the reason of a wait. most_s: limit on the total of all waits, in seconds.
    """

    def __init__(self, watch: Watch, tell: Callable[[str], None], most_s: float = MOST_WAITED_S) -> None:
        self.watch, self._tell = watch, tell
        self._patience_s = most_s
        self._has_begun = self._load_unknown = False
        self._doubtful: set[tuple[ConvProblem, MicroConfig | Configuration]] = set()

    def is_now(self) -> bool:
        """Return whether the machine is known to be quiet; this may observe the load for half a second."""
        self._begin()
        if self.watch.current().share is None and not self._load_unknown:
            self.watch.pause()
            self._load_unknown = self.watch.current().share is None
        return not self._load_unknown and self.watch.current().is_quiet

    def wait(self) -> Load:
        """Wait for free cores, at most for the remaining waiting time; return the load afterwards."""
        self._begin()
        self._patience_s -= self.watch.wait(self._tell, self._patience_s)
        return self.watch.current()

    def measured(self, race: Race) -> Iterator[Measurement | Failure]:
        """Measure a race's missing candidates, then disturbed ones again if the machine is quiet; yield all results.

        A later result of a candidate replaces an earlier one.
        """
        if race.is_done:
            return
        self.wait()
        began_s, results = race.machine.clock.now(), list[Measurement | Failure]()
        for result in self._remembered(race):
            results.append(result)
            yield result
        sound = _undisturbed(results)
        spent_s = race.machine.clock.now() - began_s
        if len(sound) < len(results) and self.wait().is_quiet:
            for result in results:  # only results that may still win matter
                self._doubtful.discard((race.task.problem, result.micro_config))
            yield from self._remembered(race.knowing(_undoubted(sound), spent_s))

    def compared(
        self,
        problem: ConvProblem,
        configurations: Sequence[Configuration],
        compare: Callable[[Sequence[Configuration]], Outcomes],
    ) -> Outcomes:
        """Compare whole calls of configurations; repeat once if they were disturbed and the machine is quiet now."""
        if not configurations:
            return []
        self.wait()
        outcomes = compare(configurations)
        if any(isinstance(one, Comparison) and is_busy(one.load) for one in outcomes) and self.wait().is_quiet:
            outcomes = compare(configurations)
        for configuration, outcome in zip(configurations, outcomes, strict=True):
            self._remember(problem, configuration, outcome.load if isinstance(outcome, Comparison) else None)
        return outcomes

    def believed(self, run: Comparison | None) -> Comparison | None:
        """Return the stored whole run, or None if it was disturbed and can be repeated now, on a quiet machine."""
        return None if run is None or (run.is_disturbed and self.is_now()) else run

    def believed_results(self, results: Sequence[Measurement | Failure]) -> list[Measurement | Failure]:
        """Return the stored results; if the machine is quiet now, leave out disturbed ones, so these are repeated."""
        sound = _undisturbed(results)
        return _undoubted(sound) if len(sound) < len(results) and self.is_now() else [*results]

    def end(self) -> None:
        """Warn, once in a process, if disturbed results remain."""
        if self._doubtful:
            say_once(_BUSY)

    def _begin(self) -> None:
        """Warn on the first call if there are more threads than cores."""
        if self._has_begun:
            return
        self._has_begun = True
        if shortage := self.watch.shortage():
            say_once(shortage)

    def _remembered(self, race: Race) -> Iterator[Measurement | Failure]:
        for result in race.measure():
            self._remember(
                race.task.problem, result.micro_config, result.load if isinstance(result, Measurement) else None
            )
            yield result

    def _remember(self, problem: ConvProblem, of: MicroConfig | Configuration, load: float | None) -> None:
        """Record whether the last measurement of a micro-config or configuration was disturbed by other processes."""
        if is_busy(load):
            self._doubtful.add((problem, of))
        else:
            self._doubtful.discard((problem, of))


def _undisturbed(results: Sequence[Measurement | Failure]) -> list[Measurement | Failure]:
    return [result for result in results if not (isinstance(result, Measurement) and result.is_disturbed)]


def _undoubted(sound: Sequence[Measurement | Failure]) -> list[Measurement | Failure]:
    """Drop skipped candidates from the results, since they were skipped after a comparison with disturbed results."""
    return [result for result in sound if isinstance(result, Measurement) or not result.is_passed_over]
