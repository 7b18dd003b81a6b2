"""Measuring the micro-configs of one problem: their error, their time, and those that fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite

from mucudnn.bench.race import Candidate, Race
from mucudnn.bench.timer import CANDIDATE_ERRORS, Clock, Stop, StoppingRule, Timer, WallClock, measure_in_turns
from mucudnn.bench.workbench import Workbench
from mucudnn.configuration import Failure, Measurement, MicroConfig
from mucudnn.problem import ConvProblem

_STEP_RULE = StoppingRule()
_SETUP_RULE = StoppingRule(noise=0.05, time_limit_s=0.05, sample_s=0.002)


@dataclass(frozen=True, slots=True)
class Profile:
    """What is to be measured, and under which bounds.

    known, known_failures: results of earlier runs, not made again. limit_bytes: candidates that need more workspace are
    left out, except torch's own. max_relative_error: an algorithm above it is measured once and no more. time_limit_s:
    of all measuring together; torch's own, and the first that fits the limit, are measured even if it is over.
    may_keep: what algorithms prepare may be kept from call to call: then it does not count against the limit, nor their
    setup against them.
    """

    problem: ConvProblem
    batch_size: int
    candidates: Sequence[Candidate]
    known: Sequence[Measurement] = ()
    known_failures: Sequence[Failure] = ()
    limit_bytes: int | None = None
    max_relative_error: float = inf
    time_limit_s: float | None = None
    may_keep: bool = False
    device: str = "cpu"
    clock: Clock = field(default_factory=WallClock)

    def missing(self) -> list[Candidate]:
        """Candidates that may need measuring, in the order in which to look at them; none if all is known."""
        race = self.race()
        done = set(race.times) | {failure.micro_config for failure in self.known_failures}
        return [c for c in self.candidates if c.micro_config not in done and self.is_wanted(c, race)]

    def is_wanted(self, candidate: Candidate, race: Race) -> bool:
        """Whether it is worth a first sample, as far as the race has come.

        Torch's own always is: everything is compared with it, and its workspace, which only running it tells, is then
        in the database.
        """
        if candidate.is_native:
            return True
        error = race.error_of(candidate.algorithm.name)
        if error is not None and error > self.max_relative_error:
            return False
        return self.fits(candidate) and not race.is_outclassed(candidate)

    def fits(self, candidate: Candidate) -> bool:
        """Whether the candidate's workspace is within the limit."""
        kept_bytes = candidate.workspace.prepared_bytes if self.may_keep else 0
        return candidate.fits(None if self.limit_bytes is None else self.limit_bytes + kept_bytes)

    def race(self) -> Race:
        """The start of the race: what is known of the candidates."""
        of_candidates = {candidate.micro_config for candidate in self.candidates}
        times = {m.micro_config: m for m in self.known if m.micro_config in of_candidates}
        return Race(self.batch_size, times, frozenset(m.algorithm for m in times), may_keep=self.may_keep)

    def measure(self) -> Iterator[Measurement | Failure]:
        """Measure what is missing, and yield each result as soon as it is final.

        First one sample of each candidate that is not yet out of the question, then more, in turns, of those that can
        still win. The measurements of those that cannot are kept, with their few samples.
        """
        if missing := self.missing():
            yield from _Session(self, missing).measure()


@dataclass(slots=True)
class _Entry:
    """A candidate in the race: the timer of its steps, and what its algorithm has beside that."""

    candidate: Candidate
    timer: Timer
    setup_s: float
    relative_error: float

    def result(self) -> Measurement | Failure:
        return self.measurement() if self.timer.error is None else _failure(self.candidate, self.timer.error)

    def measurement(self) -> Measurement:
        return Measurement(
            micro_config=self.candidate.micro_config,
            setup_s=self.setup_s,
            step_s=self.timer.median_s,
            prepared_bytes=self.candidate.workspace.prepared_bytes,
            scratch_bytes=self.candidate.scratch_bytes,
            relative_error=self.relative_error,
            noise=self.timer.noise,
            samples=len(self.timer.samples_s),
        )


class _Session:
    """The measuring of one profile: a race, on a workbench."""

    def __init__(self, profile: Profile, missing: Sequence[Candidate]) -> None:
        self.profile, self.missing = profile, missing
        self.race = profile.race()
        self.workbench = Workbench(profile.problem, profile.batch_size, profile.device)
        self.entries: dict[MicroConfig, _Entry] = {}
        self.tried: set[MicroConfig] = set()
        self.of_algorithm: dict[str, tuple[float, float]] = {}  # seconds of setup, relative error
        self.deadline = profile.clock.now() + (inf if profile.time_limit_s is None else profile.time_limit_s)

    def measure(self) -> Iterator[Measurement | Failure]:
        yield from self._first_samples()
        for entry in filter(self._is_beaten, list(self.entries.values())):
            entry.timer.sample()  # it may have met a slow moment of the machine
            self._add(entry)
        yield from self._first_samples()  # larger sizes of those that did
        yield from self._refine(list(self.entries.values()))

    def _first_samples(self) -> Iterator[Measurement | Failure]:
        """One sample of each candidate that is still wanted; yields those that are over with that."""
        for candidate in self.missing:
            in_time = candidate.is_native or self.profile.clock.now() <= self.deadline or not self._has_answer()
            tried = candidate.micro_config in self.tried
            if tried or not in_time or not self.profile.is_wanted(candidate, self.race):
                continue
            self.tried.add(candidate.micro_config)
            outcome = self._first_sample(candidate)
            if isinstance(outcome, Failure):
                yield outcome
            else:
                self._add(outcome)
                if self._can_win(outcome):
                    self.entries[candidate.micro_config] = outcome
                else:
                    yield outcome.measurement()

    def _has_answer(self) -> bool:
        """Whether something that fits was measured: until then, time is not up."""
        known = (c for c in self.profile.candidates if c.micro_config in self.race.times)
        fitting = (c for c in known if self.profile.fits(c))
        return any(self.profile.batch_size % c.micro_batch_size == 0 for c in fitting)

    def _first_sample(self, candidate: Candidate) -> _Entry | Failure:
        try:
            setup_s, relative_error = self._of_algorithm(candidate)
            timer = Timer(self.workbench.stream(candidate), self.profile.clock, _STEP_RULE)
        except CANDIDATE_ERRORS as error:
            return _failure(candidate, error)
        if not isfinite(relative_error):
            return Failure(candidate.micro_config, "the result is not finite")
        timer.sample()
        if timer.error is not None:
            return _failure(candidate, timer.error)
        return _Entry(candidate, timer, setup_s, relative_error)

    def _add(self, entry: _Entry) -> None:
        self.race.add(entry.measurement(), min(entry.timer.samples_s))

    def _is_beaten(self, entry: _Entry) -> bool:
        return self.race.is_beaten(entry.measurement())

    def _of_algorithm(self, candidate: Candidate) -> tuple[float, float]:
        """Seconds of setup and relative error, found with the algorithm's first candidate: correct before fast."""
        name = candidate.algorithm.name
        if name not in self.of_algorithm:
            relative_error = self.workbench.relative_error(candidate)
            timer = Timer(self.workbench.set_up(candidate), self.profile.clock, _SETUP_RULE)
            for _ in measure_in_turns([timer]):
                pass
            if timer.error is not None:
                raise timer.error
            self.of_algorithm[name] = (timer.median_s, relative_error)
        return self.of_algorithm[name]

    def _can_win(self, entry: _Entry) -> bool:
        allowed = entry.relative_error <= self.profile.max_relative_error
        return allowed and self.profile.fits(entry.candidate)

    def _refine(self, entries: Sequence[_Entry]) -> Iterator[Measurement | Failure]:
        of_timer = {id(entry.timer): entry for entry in entries}

        def is_hopeless(timer: Timer) -> bool:
            entry = of_timer[id(timer)]
            self._add(entry)
            return self._is_beaten(entry) or self.profile.clock.now() > self.deadline

        for entry in entries:  # after the last first sample, since only now all rivals are known
            if entry.timer.stop is None and is_hopeless(entry.timer):
                entry.timer.stop = Stop.DROPPED
        for timer in measure_in_turns([entry.timer for entry in entries], is_hopeless):
            yield of_timer[id(timer)].result()


def _failure(candidate: Candidate, error: Exception) -> Failure:
    """The first line says what happened; torch appends stack traces."""
    text = str(error).strip() or type(error).__name__
    return Failure(candidate.micro_config, text.splitlines()[0])
