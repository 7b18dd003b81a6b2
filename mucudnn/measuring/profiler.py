"""Measures the micro-configs of one problem: their error and their time, or why they fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median
from typing import Self

from mucudnn.kernels.contract.out_of_memory import is_out_of_memory
from mucudnn.measuring.candidates import Candidate
from mucudnn.measuring.proofs import UnprovenError
from mucudnn.measuring.timing.candidate_errors import (
    UnsoundError,
    give_back_cache,
    without_frames,
)
from mucudnn.measuring.timing.load import Watch
from mucudnn.measuring.timing.processor_use import ProcessorUse
from mucudnn.measuring.timing.rounds import measure_in_turns
from mucudnn.measuring.timing.timer import Clock, Stop, Timer, WallClock
from mucudnn.measuring.workbench import Workbench
from mucudnn.words.errors import BrokenDeviceError, first_line
from mucudnn.words.problem import ConvProblem
from mucudnn.words.results import Failure, Measurement, MicroConfig
from mucudnn.words.samples import MeasuredSamples
from mucudnn.words.torch_settings import TORCHS_OWN

# Most that a larger micro-batch is faster, per sample, than the best smaller one of the same algorithm. The factor is
# smaller against times of an earlier run: what that run passed over must not be measured later for mere noise.
_OPTIMISM = 2.0
_OPTIMISM_WHEN_STORED = 1.2
_MARGIN = 1.1  # a lead below this may be noise, however steady the samples are
_FIRST_MARGIN = 1.5  # after a single sample


@dataclass(slots=True)
class KnownTimes:
    """Times known so far, and what they say about a candidate.

    A micro-config is hopeless if a rival is faster for the whole mini-batch, by more than the noise can explain. The
    rival needs no more workspace, and its micro-batch divides the other's: so no configuration gains by using the
    hopeless one. Since only divisors count, the smallest sizes stay; remainders and small workspace limits need them.

    ``may_keep``: what a candidate prepares may be cached from call to call, so that it is judged without its setup.
    """

    batch_size: int
    measurements: dict[MicroConfig, Measurement] = field(default_factory=dict)
    stored: frozenset[str] = frozenset()  # algorithms with times from an earlier run
    fastest_s: dict[MicroConfig, float] = field(default_factory=dict)
    may_keep: bool = False

    def add(self, measurement: Measurement, fastest_s: float) -> None:
        """Add the time of a candidate, and its fastest sample.

        It is judged by its fastest sample: a slow moment of the machine is not its fault. As a rival it counts with its
        median.
        """
        self.measurements[measurement.micro_config] = measurement
        self.fastest_s[measurement.micro_config] = fastest_s

    def is_beaten(self, measurement: Measurement) -> bool:
        """Whether a measured micro-config is hopeless. The fewer and the noisier the samples, the more it takes."""
        rivals = self._rivals(measurement.micro_config, _workspace_bytes(measurement))
        total_s = self._setup_s(measurement) + self._steps_s(measurement, self._fastest_s(measurement))
        return any(total_s > _margin(measurement, rival) * self._total_s(rival) for rival in rivals)

    def is_outclassed(self, candidate: Candidate) -> bool:
        """Whether an unmeasured micro-config is hopeless, even if it is far better than its smaller sizes.

        It needs no less workspace than these. So its own workspace is not asked for, unless it is known without
        running.
        """
        name, size = candidate.algorithm.name, candidate.micro_batch_size
        own = [m for c, m in self.measurements.items() if c.algorithm == name and c.micro_batch_size < size]
        if not own:
            return False
        optimism = _OPTIMISM_WHEN_STORED if name in self.stored else _OPTIMISM
        per_sample_s = min(self._fastest_s(m) / m.micro_config.micro_batch_size for m in own) / optimism
        total_s = self._setup_s(own[0]) + per_sample_s * self.batch_size
        workspace_bytes = candidate.handed_bytes if candidate.from_source else max(map(_workspace_bytes, own))
        rivals = self._rivals(candidate.micro_config, workspace_bytes)
        return any(total_s > self._total_s(rival) for rival in rivals)

    def error_of(self, algorithm: str) -> float | None:
        """Relative error of an algorithm that has been measured."""
        errors = [m.relative_error for m in self.measurements.values() if m.micro_config.algorithm == algorithm]
        return max(errors, default=None)

    def _rivals(self, micro_config: MicroConfig, workspace_bytes: int) -> list[Measurement]:
        return [
            m
            for m in self.measurements.values()
            if m.micro_config != micro_config
            and micro_config.micro_batch_size % m.micro_config.micro_batch_size == 0
            and _workspace_bytes(m) <= workspace_bytes
        ]

    def _fastest_s(self, measurement: Measurement) -> float:
        return self.fastest_s.get(measurement.micro_config, measurement.step_s)

    def _setup_s(self, candidate: Measurement) -> float:
        return 0.0 if self.may_keep else candidate.setup_s

    def _total_s(self, rival: Measurement) -> float:
        return rival.setup_s + self._steps_s(rival, rival.step_s)

    def _steps_s(self, measurement: Measurement, step_s: float) -> float:
        """Seconds for the whole mini-batch; fractions of a micro-batch count as such."""
        return self.batch_size / measurement.micro_config.micro_batch_size * step_s


def _workspace_bytes(measurement: Measurement) -> int:
    return measurement.prepared_bytes + measurement.scratch_bytes


def _margin(one: Measurement, other: Measurement) -> float:
    if min(one.samples, other.samples) < 2:
        return _FIRST_MARGIN
    return max(_MARGIN, 1 + 2 * (one.noise + other.noise))


@dataclass(frozen=True, slots=True)
class ProfilingJob:
    """Candidates of one problem that are to be measured, and the bounds of measuring.

    known, known_failures: results of earlier runs, not made again. limit_bytes: candidates that need more workspace are
    left out, except torch's own. max_relative_error: an algorithm above it is measured once and no more. time_limit_s:
    limit of all measuring together; torch's own, and the first that fits the limit, are measured even if it is over.
    may_keep: what algorithms prepare may be cached from call to call; then neither its bytes nor the setup count.
    baseline_exempt: the limit does not hold torch's own, undivided.
    watch: of the machine's load.
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
    baseline_exempt: bool = False
    device: str = "cpu"
    clock: Clock = field(default_factory=WallClock)
    watch: Watch = field(default_factory=Watch)

    def missing(self) -> list[Candidate]:
        """Candidates that may need measuring, in the order in which to look at them; none if all is known."""
        times = self.known_times()
        failed = {failure.micro_config for failure in self.known_failures if not failure.is_passed_over}
        done = failed | set(times.measurements)
        return [c for c in self.candidates if c.micro_config not in done and self.is_wanted(c, times)]

    @property
    def is_done(self) -> bool:
        """Whether nothing is missing."""
        return not self.missing()

    def hurried(self) -> list[Candidate]:
        """Known candidates that can still win, and of which a time limit allowed too few samples."""
        times, rule = self.known_times(), self.clock.step_rule
        measured = [(c, m) for c in self.candidates if (m := times.measurements.get(c.micro_config)) is not None]
        few = [(c, m) for c, m in measured if m.samples < rule.min_samples]
        quick = [(c, m) for c, m in few if (m.samples + 1) * m.step_s < rule.time_limit_s]  # samples, and a warm-up
        return [c for c, m in quick if self.can_win(c, m.relative_error) and not times.is_beaten(m)]

    def can_win(self, candidate: Candidate, relative_error: float) -> bool:
        """Whether error and workspace allow the candidate to win."""
        return relative_error <= self.max_relative_error and self.fits(candidate)

    def is_wanted(self, candidate: Candidate, times: KnownTimes) -> bool:
        """Whether the candidate is worth a first sample.

        Torch's own always is: everything is compared with it. Only running it tells its workspace, which is then in the
        database.
        """
        if candidate.algorithm.is_torchs_own:
            return True
        error = times.error_of(candidate.algorithm.name)
        if error is not None and error > self.max_relative_error:
            return False
        return self.fits(candidate) and not times.is_outclassed(candidate)

    def fits(self, candidate: Candidate) -> bool:
        """Whether the candidate's workspace is within the limit."""
        if self.baseline_exempt and self.is_baseline(candidate):
            return True
        kept_bytes = candidate.workspace.prepared_bytes if self.may_keep else 0
        return candidate.fits(None if self.limit_bytes is None else self.limit_bytes + kept_bytes)

    def is_baseline(self, candidate: Candidate) -> bool:
        """Whether this is torch's own, undivided, with which everything is compared."""
        return candidate.micro_config == MicroConfig(TORCHS_OWN, self.batch_size)

    def known_times(self) -> KnownTimes:
        """Times of the candidates that are known beforehand."""
        of_candidates = {candidate.micro_config for candidate in self.candidates}
        times = {m.micro_config: m for m in self.known if m.micro_config in of_candidates}
        return KnownTimes(self.batch_size, times, frozenset(m.algorithm for m in times), may_keep=self.may_keep)

    def knowing(self, results: Sequence[Measurement | Failure], spent_s: float) -> Self:
        """Return the job as it is when these are known too, and so much of its time is over."""
        left_s = None if self.time_limit_s is None else max(0.0, self.time_limit_s - spent_s)
        measured = [result for result in results if isinstance(result, Measurement)]
        failed = [result for result in results if isinstance(result, Failure)]
        known, failures = [*self.known, *measured], [*self.known_failures, *failed]
        return replace(self, known=known, known_failures=failures, time_limit_s=left_s)

    def measure(self) -> Iterator[Measurement | Failure]:
        """Measure what is missing, and yield each result as soon as it is final.

        First each candidate that is not out of the question has one sample. Then those that can still win have more, in
        turns. The measurements of the others are kept, with their few samples.

        Raises ``BrokenDeviceError`` after the failure of a candidate that left the device unusable, and
        ``UnavailableError`` where there is no memory for a single sample.
        """
        if missing := self.missing():
            yield from Session(self, missing).measure()


@dataclass(slots=True)
class Entry:
    """A candidate that is being measured: the timer of its steps, and what is known beside that.

    is_look: its only sample is a quick look, of a step that found things in the caches.
    """

    candidate: Candidate
    timer: Timer
    setup_samples_s: tuple[float, ...]
    relative_error: float
    began: ProcessorUse  # what the watch saw before the first sample
    watch: Watch
    is_look: bool = False

    def final(self) -> Measurement:
        """Return what all samples say, with them and with the load meanwhile."""
        load = self.watch.since(self.began)
        samples = (self.setup_samples_s, tuple(self.timer.samples_s))
        raw = MeasuredSamples(*samples, stolen=load.stolen_share, clock_hz=load.clock_hz)
        return replace(self.measurement(), load=load.share, raw=raw)

    def measurement(self) -> Measurement:
        """Return what the samples say so far, and no more: the pruning reads it all the time."""
        return Measurement(
            micro_config=self.candidate.micro_config,
            setup_s=median(self.setup_samples_s),
            step_s=self.timer.median_s,
            prepared_bytes=self.candidate.workspace.prepared_bytes,
            scratch_bytes=self.candidate.scratch_bytes,
            relative_error=self.relative_error,
            noise=self.timer.noise,
            samples=len(self.timer.samples_s),
        )


class Session:
    """Measuring of one job, on a workbench."""

    def __init__(self, job: ProfilingJob, missing: Sequence[Candidate], *, checks_samples: bool = False) -> None:
        self.job, self.missing = job, missing
        self.times = job.known_times()
        self.workbench = Workbench(job.problem, job.batch_size, job.device, checks_samples=checks_samples)
        self.entries: dict[MicroConfig, Entry] = {}
        self.tried: set[MicroConfig] = set()
        self.setup_samples_s: dict[str, tuple[float, ...]] = {}  # by algorithm
        self.relative_error: dict[str, float] = {}  # by algorithm, for those that are checked once
        self.deadline = job.clock.now() + (inf if job.time_limit_s is None else job.time_limit_s)

    def measure(self) -> Iterator[Measurement | Failure]:
        limit = inf if self.job.limit_bytes is None else self.job.limit_bytes
        yield from self._prove(c for c in self.missing if c.algorithm.is_torchs_own or c.handed_bytes <= limit)
        yield from self._first_samples()
        for entry in filter(self._is_beaten, list(self.entries.values())):
            entry.timer.sample()  # the first sample may have met a slow moment of the machine
            self._add(entry)
            if entry.timer.error is not None:
                yield from self._end(entry)
        yield from self._first_samples()  # larger sizes of those that had
        yield from self._refine(list(self.entries.values()))

    def _prove(self, candidates: Iterable[Candidate]) -> Iterator[Failure]:
        """Have foreign candidates proven in one batch, and yield the failures of those that are barred.

        What a source offers is proven one by one, as far as there is time.
        """
        wanted = [c for c in candidates if c.is_foreign and not c.from_source]
        if not wanted or (proofs := wanted[0].proofs) is None:
            return
        proofs.ask(wanted)
        for candidate in wanted:
            if (error := proofs.error_of(candidate)) is not None:
                self.tried.add(candidate.micro_config)
                yield from self._failed(candidate, error)

    def _first_samples(self) -> Iterator[Measurement | Failure]:
        """Take one sample of each candidate that is still wanted. Yields the results that are final with that."""
        for candidate in self.missing:
            always = candidate.algorithm.is_torchs_own and not candidate.algorithm.is_search
            in_time = always or self.job.clock.now() <= self.deadline or not self._has_answer()
            tried = candidate.micro_config in self.tried
            if tried or not in_time or not self.job.is_wanted(candidate, self.times):
                continue
            self.tried.add(candidate.micro_config)
            entry = self._try_first_sample(candidate)
            if isinstance(entry, Exception):
                yield from self._failed(candidate, entry)
                continue
            self._add(entry)
            if self.job.can_win(candidate, entry.relative_error):
                self.entries[candidate.micro_config] = entry
            else:
                yield entry.final()

    def _has_answer(self) -> bool:
        """Whether something that fits was measured. Until then, time is not up."""
        known = (c for c in self.job.candidates if c.micro_config in self.times.measurements)
        fitting = (c for c in known if c.fits(self.job.limit_bytes))
        return any(self.job.batch_size % c.micro_batch_size == 0 for c in fitting)

    def _try_first_sample(self, candidate: Candidate) -> Entry | Exception:
        try:
            return self._first_sample(candidate)
        except candidate.errors as error:
            return without_frames(error)

    def _first_sample(self, candidate: Candidate) -> Entry:
        """Check the result, then take a sample. Raises what the candidate raises."""
        relative_error = self._relative_error(candidate)
        began = self.job.watch.mark()
        setup_samples_s = self._setup_samples_s(candidate)
        clock = self.job.clock
        timer = Timer(self.workbench.stream(candidate), clock, clock.step_rule, self.workbench.slice_count(candidate))
        timer.sample()
        if timer.error is not None:
            raise timer.error
        return Entry(candidate, timer, setup_samples_s, relative_error, began, self.job.watch)

    def _relative_error(self, candidate: Candidate) -> float:
        """Return the relative error of a candidate.

        Our algorithms are tested at every size, so that one check tells how exact they are here. Foreign code is proven
        at each.
        """
        if candidate.is_foreign:
            proof = candidate.proof()
            return self.workbench.relative_error(candidate) if proof is None else proof.relative_error
        name = candidate.algorithm.name
        if name not in self.relative_error:
            self.relative_error[name] = self.workbench.relative_error(candidate)
        return self.relative_error[name]

    def _setup_samples_s(self, candidate: Candidate) -> tuple[float, ...]:
        name = candidate.algorithm.name
        if name not in self.setup_samples_s:
            timer = self._setup_timer(self.workbench.set_up(candidate))
            for _ in measure_in_turns([timer]):
                pass
            if timer.error is not None:
                raise timer.error
            self.setup_samples_s[name] = tuple(timer.samples_s)
        return self.setup_samples_s[name]

    def _setup_timer(self, set_up: Callable[[], object]) -> Timer:
        return Timer(set_up, self.job.clock, self.job.clock.setup_rule)

    def _failed(self, candidate: Candidate, error: Exception) -> Iterator[Failure]:
        """Yield the failure. Raise an error, if nothing else can be measured in this process."""
        if broken := self._why_unusable():
            reason = f"{_who(candidate)} left the device unusable: {broken}"
            yield Failure(candidate.micro_config, reason)
            passed_over = "" if self.job.is_baseline(candidate) else ". That is stored, and the next run passes over it"
            raise BrokenDeviceError(
                f"{self.job.problem}, micro-batches of {candidate.micro_batch_size}: {reason}{passed_over}: start "
                "the process anew, and tune again"
            )
        is_unproven = isinstance(error, UnprovenError)
        is_lasting = not (is_unproven or is_out_of_memory(error))
        named = is_lasting and isinstance(error, UnsoundError) and candidate.is_foreign
        reason = f"{_who(candidate)}: {error}" if named else first_line(error)
        if not is_lasting:
            give_back_cache()
        yield Failure(candidate.micro_config, reason, is_lasting, is_unproven=is_unproven)

    def _why_unusable(self) -> str | None:
        """The error that the device reports for ever (CUDA calls it sticky); ``None``: it can be used."""
        try:
            self.job.clock.now()
        except RuntimeError as error:
            return first_line(error)
        return None

    def _add(self, entry: Entry) -> None:
        self.times.add(entry.measurement(), min(entry.timer.samples_s))

    def _is_beaten(self, entry: Entry) -> bool:
        return self.times.is_beaten(entry.measurement())

    def _refine(self, entries: Sequence[Entry]) -> Iterator[Measurement | Failure]:
        of_timer = {id(entry.timer): entry for entry in entries}

        def is_hopeless(timer: Timer) -> bool:
            entry = of_timer[id(timer)]
            self._add(entry)
            return self._is_beaten(entry) or self.job.clock.now() > self.deadline

        for entry in entries:  # only now, after all first samples, are all rivals known
            if entry.timer.stop is None and is_hopeless(entry.timer):
                entry.timer.stop = Stop.DROPPED
        for timer in measure_in_turns([entry.timer for entry in entries], is_hopeless):
            yield from self._end(of_timer[id(timer)])

    def _end(self, entry: Entry) -> Iterator[Measurement | Failure]:
        del self.entries[entry.candidate.micro_config]
        if entry.timer.error is None:
            yield entry.final()
        else:
            yield from self._failed(entry.candidate, entry.timer.error)


def _who(candidate: Candidate) -> str:
    """Name and version, as a library counts: ``library:67 k2=5 (version 91900)``."""
    return f"{candidate.algorithm.name} (version {candidate.algorithm.version})"
