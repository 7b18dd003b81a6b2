"""The race of one problem's candidates, in which each is checked and timed on a ``Workbench``, or recorded as failed.

This is the common part: ``thorough_race.py`` measures all candidates that can win, ``quick_race.py`` only the likely
winners.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median
from typing import ClassVar, Self

from mucudnn.kernels.contract.out_of_memory import is_out_of_memory
from mucudnn.measuring.candidates import Candidate
from mucudnn.measuring.proofs import BarredError, UnprovenError
from mucudnn.measuring.timing.candidate_errors import UnsoundError, give_back_cache, without_frames
from mucudnn.measuring.timing.load import Watch
from mucudnn.measuring.timing.processor_use import ProcessorUse
from mucudnn.measuring.timing.timer import Clock, Timer, measure_in_turns
from mucudnn.measuring.whole_runs import Machine
from mucudnn.measuring.workbench import Workbench
from mucudnn.words.errors import BrokenDeviceError, first_line
from mucudnn.words.results import Failure, Measurement, MicroConfig
from mucudnn.words.samples import MeasuredSamples
from mucudnn.words.task import Task

_LONG_PROBE_S = 0.05  # a library may compile for 1 to 20 ms
_SHORT_S = 0.0005  # loading code takes up to 0.1 ms


@dataclass(slots=True)
class Entry:
    """A candidate being measured: the timer of its steps (one micro-batch each), and its other results so far.

    is_look: whether its only sample is a probe: the fastest of one to three steps, of which the first had a warm cache.
    """

    candidate: Candidate
    timer: Timer
    setup_samples_s: tuple[float, ...]
    relative_error: float
    began: ProcessorUse  # processor use before the first sample
    watch: Watch
    is_look: bool = False

    def final(self) -> Measurement:
        """Return the candidate's measurement with its raw samples, and the machine's load while they were taken."""
        load = self.watch.since(self.began)
        raw = MeasuredSamples(self.setup_samples_s, tuple(self.timer.samples_s))
        return replace(self.measurement(), load=load.share, raw=raw)

    def measurement(self) -> Measurement:
        """Return the candidate's measurement so far, without raw samples, as the race reads it after every round.

        Of fewer than three samples the fastest counts, since disturbances only add time.
        """
        samples_s = self.timer.samples_s
        return Measurement(
            micro_config=self.candidate.micro_config,
            setup_s=median(self.setup_samples_s),
            step_s=median(samples_s) if len(samples_s) > 2 else min(samples_s),
            prepared_bytes=self.candidate.workspace.prepared_bytes,
            scratch_bytes=self.candidate.scratch_bytes,
            relative_error=self.relative_error,
            noise=self.timer.noise,
            samples=len(samples_s),
        )


@dataclass(eq=False)
class Race(ABC):
    """A race of a task's candidates on a machine. Subclasses decide which candidates run, in which order and how often.

    Candidates that need more workspace than the task's limit are left out, except the baseline. stored,
    stored_failures: results of earlier runs, not measured again. max_relative_error: an algorithm above it gets one
    sample at most. time_limit_s: limit for the whole race; the baseline and the first fitting candidate are measured
    even after it. may_keep: whether prepared filters may be cached between calls; then neither their bytes nor the
    setup time count. warms_up: whether a warm-up call precedes the samples of a step and of a setup. checks_samples:
    see ``Workbench``. rule, setup_rule: stopping rules of steps and setups.
    """

    task: Task
    candidates: Sequence[Candidate]
    machine: Machine
    stored: Sequence[Measurement] = ()
    stored_failures: Sequence[Failure] = ()
    max_relative_error: float = inf
    time_limit_s: float | None = None
    may_keep: bool = False

    warms_up: ClassVar = True
    checks_samples: ClassVar = False

    def __post_init__(self) -> None:
        self.rule, self.setup_rule = self.machine.clock.step_rule, self.machine.clock.setup_rule
        of_candidates = {candidate.micro_config for candidate in self.candidates}
        self.known = {m.micro_config: m for m in self.stored if m.micro_config in of_candidates}
        self.failed = {failure.micro_config: failure for failure in self.stored_failures}
        self.fastest_s: dict[MicroConfig, float] = {}  # fastest samples in this race
        self.entries: dict[MicroConfig, Entry] = {}
        self._setup_samples_s: dict[str, tuple[float, ...]] = {}  # by algorithm
        self._relative_errors: dict[str, float] = {}  # by algorithm, for algorithms that are checked only once

    @property
    def limit(self) -> float:
        """The workspace limit in bytes; inf without one."""
        return inf if self.task.limit_bytes is None else self.task.limit_bytes

    def can_win(self, candidate: Candidate, relative_error: float) -> bool:
        """Whether the candidate's error and workspace are within their limits, so that it may be chosen."""
        return relative_error <= self.max_relative_error and self.fits(candidate)

    def fits(self, candidate: Candidate) -> bool:
        """Whether the candidate's workspace is within the limit."""
        if self.task.baseline_exempt and self.is_baseline(candidate):
            return True
        kept_bytes = candidate.workspace.prepared_bytes if self.may_keep else 0
        return candidate.fits(None if self.task.limit_bytes is None else self.task.limit_bytes + kept_bytes)

    def is_baseline(self, candidate: Candidate) -> bool:
        """Whether the candidate is torch's own convolution, undivided, with which all others are compared."""
        return candidate.micro_config == self.task.baseline

    @abstractmethod
    def missing(self) -> list[Candidate]:
        """Return the candidates that may still need measuring, in order; empty if all results are known."""

    @property
    def is_done(self) -> bool:
        """Whether no candidate needs measuring any more."""
        return not self.missing()

    def knowing(self, results: Sequence[Measurement | Failure], spent_s: float) -> Self:
        """Return a new race that knows these results too, with a time limit reduced by ``spent_s``."""
        left_s = None if self.time_limit_s is None else max(0.0, self.time_limit_s - spent_s)
        stored = [*self.stored, *(result for result in results if isinstance(result, Measurement))]
        failures = [*self.stored_failures, *(result for result in results if isinstance(result, Failure))]
        return replace(self, stored=stored, stored_failures=failures, time_limit_s=left_s)

    def measure(self) -> Iterator[Measurement | Failure]:
        """Measure the missing candidates, and yield each result as soon as it is final.

        Raises ``BrokenDeviceError`` if a failing candidate left the device unusable, and ``UnavailableError`` if there
        is not enough memory for a single sample.
        """
        if self.is_done:
            return
        problem, n, device = self.task.problem, self.task.batch_size, self.machine.device
        self.workbench = Workbench(problem, n, device, checks_samples=self.checks_samples)
        self.deadline = self.machine.clock.now() + (inf if self.time_limit_s is None else self.time_limit_s)
        yield from self._run()

    @abstractmethod
    def _run(self) -> Iterator[Measurement | Failure]:
        """Measure the missing candidates on the workbench until the deadline, and yield their results."""

    def _prove(self, candidates: Iterable[Candidate]) -> Iterator[Failure]:
        """Prove foreign candidates (run them in a separate process); yield failures of barred ones.

        They are proven in one batch, or one by one until the time limit. Candidates of an ``AlgorithmSource`` are
        proven later, before their first sample.
        """
        wanted = [c for c in candidates if c.is_foreign and not c.from_source]
        if not wanted or (proofs := wanted[0].proofs) is None:
            return
        for batch in [wanted] if self.time_limit_s is None else [[candidate] for candidate in wanted]:
            if self._is_late() and not any(map(self.is_baseline, batch)):
                continue
            proofs.ask(batch)
            for candidate in batch:
                if (error := proofs.error_of(candidate)) is not None:
                    yield from self._failed(candidate, error)

    def _is_late(self) -> bool:
        return self.machine.clock.now() > self.deadline

    def _has_answer(self) -> bool:
        """Return whether a candidate within the workspace limit was measured; the time limit applies from then on."""
        known = (c for c in self.candidates if c.micro_config in self.known)
        fitting = (c for c in known if c.fits(self.task.limit_bytes))
        return any(self.task.batch_size % c.micro_batch_size == 0 for c in fitting)

    def _try_first_sample(self, candidate: Candidate) -> Entry | Exception:
        try:
            return self._first_sample(candidate)
        except candidate.errors as error:
            return without_frames(error)

    def _first_sample(self, candidate: Candidate) -> Entry:
        """Check the candidate's result, then take one sample or a probe of its time. Raises the candidate's errors."""
        relative_error = self._relative_error(candidate)
        began = self.machine.watch.mark()
        setup_samples_s = self._samples_of_setup(candidate)
        clock, slices = self.machine.clock, self.workbench.slice_count(candidate)
        timer = Timer(self.workbench.stream(candidate), clock, self.rule, slices, warms_up=self.warms_up)
        is_look = self._is_look(candidate)
        if is_look:
            timer.samples_s.append(_seconds_of_probe(timer.function, clock))
        else:
            timer.sample()
        if timer.error is not None:
            raise timer.error
        if not self.warms_up and timer.samples_s[0] < self._repeated_below_s(candidate, is_look):
            timer.samples_s[0] = min(timer.samples_s[0], clock.time(timer.function, 1, slices))
        return Entry(candidate, timer, setup_samples_s, relative_error, began, self.machine.watch, is_look)

    def _repeated_below_s(self, candidate: Candidate, is_look: bool) -> float:
        """Return the seconds below which a candidate's first sample is taken twice, since a first call loads code."""
        if is_look:
            return _LONG_PROBE_S if self.is_baseline(candidate) else 0.0
        return _SHORT_S

    def _is_look(self, candidate: Candidate) -> bool:
        """Whether the candidate's first sample is a probe: one step, with caches still warm from the check."""
        return False

    def _relative_error(self, candidate: Candidate) -> float:
        """Return the relative error of a candidate.

        One check is enough for our own algorithms, which are tested at every size. Foreign code is checked at each
        size.
        """
        if candidate.is_foreign:
            proof = candidate.proof()
            return self.workbench.relative_error(candidate) if proof is None else proof.relative_error
        name = candidate.algorithm.name
        if name not in self._relative_errors:
            self._relative_errors[name] = self.workbench.relative_error(candidate)
        return self._relative_errors[name]

    def _samples_of_setup(self, candidate: Candidate) -> tuple[float, ...]:
        """Time the setup of a candidate's algorithm, once for all its micro-batch sizes, and return the seconds.

        Caches are cold, unless the race has no warm-up, and the setup is short. The setup of an algorithm that prepares
        nothing counts as 0: on a GPU the clock shows more than 1 us for it, and algorithms with a setup time make the
        solver's problem much larger.
        """
        if not candidate.workspace.prepared_bytes:
            return (0.0,)
        name = candidate.algorithm.name
        if name not in self._setup_samples_s:
            set_up, clock = self.workbench.set_up(candidate), self.machine.clock
            warm_s = inf if self.warms_up else _seconds_of_probe(set_up, clock)
            if warm_s < _SHORT_S:
                self._setup_samples_s[name] = (warm_s,)
            else:
                timer = Timer(set_up, clock, self.setup_rule, warms_up=self.warms_up)
                for _ in measure_in_turns([timer]):
                    pass
                if timer.error is not None:
                    raise timer.error
                self._setup_samples_s[name] = tuple(timer.samples_s)
        return self._setup_samples_s[name]

    def _add(self, entry: Entry) -> None:
        """Add this entry's samples to the known results, with which other candidates are compared."""
        self.known[entry.candidate.micro_config] = entry.measurement()
        self.fastest_s[entry.candidate.micro_config] = min(entry.timer.samples_s)

    def _end(self, entry: Entry) -> Iterator[Measurement | Failure]:
        del self.entries[entry.candidate.micro_config]
        if entry.timer.error is None:
            yield entry.final()
        else:
            yield from self._failed(entry.candidate, entry.timer.error)

    def _failed(self, candidate: Candidate, error: Exception) -> Iterator[Failure]:
        """Record the candidate's failure and yield it. Raise ``BrokenDeviceError`` if the device is unusable."""
        if broken := self._why_unusable():
            reason = f"{_who(candidate)} left the device unusable: {broken}"
            yield Failure(candidate.micro_config, reason)
            passed_over = "" if self.is_baseline(candidate) else ". That is stored, and the next run passes over it"
            raise BrokenDeviceError(
                f"{self.task.problem}, micro-batches of {candidate.micro_batch_size}: {reason}{passed_over}: start "
                "the process anew, and tune again"
            )
        is_unproven = isinstance(error, UnprovenError)
        is_lasting = not (is_unproven or is_out_of_memory(error))
        named = is_lasting and isinstance(error, UnsoundError) and candidate.is_foreign
        reason = f"{_who(candidate)}: {error}" if named else first_line(error)
        if not is_lasting:
            give_back_cache()
        least_s = error.least_s if isinstance(error, BarredError) else None
        failure = Failure(candidate.micro_config, reason, is_lasting, is_unproven=is_unproven, least_s=least_s)
        self.failed[candidate.micro_config] = failure
        yield failure

    def _why_unusable(self) -> str | None:
        """Return the text of a sticky CUDA error, with which every call on the device fails; None if calls work."""
        try:
            self.machine.clock.now()
        except RuntimeError as error:
            return first_line(error)
        return None


def _seconds_of_probe(call: Callable[[], object], clock: Clock) -> float:
    """Return the seconds of one call; of a short one, the faster of two, since the first may compile code."""
    first_s = _seconds_of(call, clock)
    return first_s if first_s > _LONG_PROBE_S else min(first_s, _seconds_of(call, clock))


def _seconds_of(call: Callable[[], object], clock: Clock) -> float:
    """Return the seconds of one call, with warm caches."""
    began_s = clock.now()
    call()
    return clock.now() - began_s


def _who(candidate: Candidate) -> str:
    """Return the algorithm's name and version, such as ``library:67 k2=5 (version 91900)``."""
    return f"{candidate.algorithm.name} (version {candidate.algorithm.version})"
