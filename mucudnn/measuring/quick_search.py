"""The quick search: measures those candidates of a problem that can win, and looks at the others once or not at all.

``QuickPlan`` says which come next. Of what is passed over, a row with the reason is stored. Whole runs decide between
those that are close, as they always do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from math import inf

from mucudnn.measuring.candidates import Candidate
from mucudnn.measuring.profiler import Entry, Session
from mucudnn.measuring.quick_plan import HOPELESS, SECOND, QuickPlan
from mucudnn.measuring.timing.timer import EVERY_ROUND, Clock, StoppingRule, Timer
from mucudnn.words.results import Failure, Measurement

_HOPELESS_PART = 2.5  # for a small part of the mini-batch: calls have shares that are not divided
_CLOSE = 1.15  # after a sample with empty caches
_SETUP = StoppingRule(time_limit_s=0.0)  # one sample


class QuickSearch(QuickPlan):
    """A search for the fastest candidates of a job, in the order of its plan."""

    def measure(self) -> Iterator[Measurement | Failure]:
        """Measure what is missing, and yield each result as soon as it is final. Raises as ``ProfilingJob.measure``."""
        if not self.is_done:
            yield from _QuickSession(self).measure()


class _QuickSession(Session):
    """Measuring of one search, on a workbench that compares results at some places only."""

    def __init__(self, search: QuickSearch) -> None:
        super().__init__(search.job, [], checks_samples=True)
        self.search = search
        self.rule = replace(EVERY_ROUND, sample_s=self.job.clock.step_rule.sample_s, max_calls=4)
        self.failures = search.failed
        self.has_run: set[str] = set()  # algorithms that have run at another size
        self.hopeless_parts: set[str] = set()  # algorithms that were hopeless on one

    def measure(self) -> Iterator[Measurement | Failure]:
        yield from self._prove(self.search.foreign(self.times.measurements, self.failures))
        for candidate in self.search.baselines(self.times.measurements, self.failures):
            yield from self._look_at(candidate)
        yield from self._look_at_parts()
        while unseen := self._in_time(self._unseen()):
            for candidate in unseen:
                yield from self._look_unless_hopeless(candidate)
        yield from self.search.too_large(self.times.measurements, self.failures)
        yield from self._compare_closely(HOPELESS, _CLOSE)
        while sizes := self._in_time(self.search.sizes(self.times.measurements, self.failures)):
            yield from self._prove(sizes)
            for candidate in sizes:
                if candidate.micro_config not in self.failures:
                    yield from self._look_at(candidate)
            yield from self._compare_closely(inf, SECOND)  # a size is compared with others, and never by a quick look
        self.search.prior.learn(self.job.problem, self.times.measurements.values())

    def _failed(self, candidate: Candidate, error: Exception) -> Iterator[Failure]:
        for failure in super()._failed(candidate, error):
            self.failures[candidate.micro_config] = failure
            yield failure

    def _in_time(self, candidates: list[Candidate]) -> list[Candidate]:
        """Return all, unless time is up: then torch's own alone, and others only until something fits."""
        if not self._is_late():
            return candidates
        return [c for c in candidates if self.job.is_baseline(c)] or ([] if self._has_answer() else candidates[:1])

    def _unseen(self) -> list[Candidate]:
        unseen = self.search.unseen(self.times.measurements, self.failures)
        return [c for c in unseen if c.algorithm.name not in self.hopeless_parts]

    def _look_unless_hopeless(self, candidate: Candidate) -> Iterator[Measurement | Failure]:
        if self.search.is_spared(candidate, self.times.measurements):
            return
        if (failure := self.search.hopeless(candidate, self.times.measurements)) is not None:
            self.failures[candidate.micro_config] = failure
            yield failure
        else:
            yield from self._look_at(candidate)

    def _look_at_parts(self) -> Iterator[Measurement | Failure]:
        """Look at algorithms on small parts of the mini-batch. Those that are hopeless, or spared, end with that."""
        parts = self.search.parts(self.times.measurements, self.failures)
        looks = [self._try_first_sample(part) for part in parts if not self._is_late()]
        entries = [entry for entry in looks if isinstance(entry, Entry)]  # what fails on a part is tried on all
        self.has_run |= {entry.candidate.algorithm.name for entry in entries}
        of_parts = {entry.candidate.micro_config: entry.measurement() for entry in entries}
        known = {**self.times.measurements, **of_parts}
        for entry in entries:
            margin = self.search.margin(entry.candidate, entry.measurement(), known)
            if margin > _HOPELESS_PART or self.search.is_spared(entry.candidate, known):
                self.hopeless_parts.add(entry.candidate.algorithm.name)
                self._add(entry)
                yield entry.final()

    def _look_at(self, candidate: Candidate) -> Iterator[Measurement | Failure]:
        """Look at one. If it is not hopeless it stays in the race; else the result is yielded."""
        if self._is_late() and self._has_answer() and not self.job.is_baseline(candidate):
            return
        entry = self._try_first_sample(candidate)
        if isinstance(entry, Exception):
            yield from self._failed(candidate, entry)
            return
        self._add(entry)
        if self._can_win(entry, HOPELESS):
            self.entries[candidate.micro_config] = entry
        else:
            yield entry.final()

    def _compare_closely(self, first: float, second: float) -> Iterator[Measurement | Failure]:
        """Replace quick looks by samples with empty caches, in turns, then take another sample of each.

        What is slower by more than these margins ends with what it has.
        """
        yield from self._sample_within(first, looks_only=True)
        yield from self._sample_within(second)
        for entry in list(self.entries.values()):
            yield from self._end(entry)

    def _sample_within(self, margin: float, *, looks_only: bool = False) -> Iterator[Measurement | Failure]:
        for entry in list(self.entries.values()):
            if not self._can_win(entry, margin) or self._is_late():
                yield from self._end(entry)
            elif entry.is_look or not looks_only:
                if entry.is_look:
                    entry.is_look = False
                    entry.timer.samples_s.clear()
                self.has_run.add(entry.candidate.algorithm.name)
                entry.timer.sample()
                if entry.timer.error is not None:
                    yield from self._end(entry)
                else:
                    self._add(entry)

    def _can_win(self, entry: Entry, margin: float) -> bool:
        """Whether it is at most so many times slower than the fastest, by its fastest sample."""
        own = replace(entry.measurement(), step_s=min(entry.timer.samples_s))
        return self.search.margin(entry.candidate, own, self.times.measurements) <= margin

    def _is_late(self) -> bool:
        return self.job.clock.now() > self.deadline

    def _first_sample(self, candidate: Candidate) -> Entry:
        """Check the result, then take a quick look: one step, with what the check has left in the caches.

        Another size of an algorithm of ours has a sample at once, with empty caches.
        """
        relative_error = self._relative_error(candidate)
        began = self.job.watch.mark()
        clock = self.job.clock
        setup_samples_s = self._setup_samples_s(candidate)
        stream, slices = self.workbench.stream(candidate), self.workbench.slice_count(candidate)
        timer = Timer(stream, clock, self.rule, slices, warms_up=False)
        is_look = not self._is_warm(candidate)
        if is_look:
            timer.samples_s.append(_seconds_of(stream, clock))
        else:
            timer.sample()
            if timer.error is not None:
                raise timer.error
        return Entry(candidate, timer, setup_samples_s, relative_error, began, self.job.watch, is_look)

    def _is_warm(self, candidate: Candidate) -> bool:
        """Whether it has run at another size, and has nothing to load or to build for this one."""
        own = not (candidate.is_foreign or candidate.algorithm.is_torchs_own)
        return own and candidate.algorithm.name in self.has_run

    def _setup_samples_s(self, candidate: Candidate) -> tuple[float, ...]:
        """Sample the setup once; what prepares nothing finds nothing in caches that would make it faster."""
        name = candidate.algorithm.name
        if name not in self.setup_samples_s and not candidate.workspace.prepared_bytes:
            self.setup_samples_s[name] = (_seconds_of(self.workbench.set_up(candidate), self.job.clock),)
        return super()._setup_samples_s(candidate)

    def _relative_error(self, candidate: Candidate) -> float:
        """Check an algorithm of ours on few samples: it is tested at every size. Where that fails, on all of them."""
        for part in self._checked_parts(candidate)[:1]:
            with suppress(*candidate.errors):
                return super()._relative_error(part)
        return super()._relative_error(candidate)

    def _checked_parts(self, candidate: Candidate) -> list[Candidate]:
        """Return the same algorithm on parts of the mini-batch, the smallest first; none for foreign code."""
        own = [c for c in self.job.candidates if c.algorithm.name == candidate.algorithm.name and not c.is_foreign]
        smaller = [c for c in own if c.micro_batch_size < candidate.micro_batch_size]
        return [c for c in smaller if self.search.is_large_enough(c)]

    def _setup_timer(self, set_up: Callable[[], object]) -> Timer:
        return Timer(set_up, self.job.clock, _SETUP, warms_up=False)  # the check has set it up before


def _seconds_of(call: Callable[[], object], clock: Clock) -> float:
    """Time a call with whatever is in the caches."""
    began_s = clock.now()
    call()
    return clock.now() - began_s
