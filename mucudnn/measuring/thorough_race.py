"""The thorough race: every candidate is timed once, and those that can still win are timed again, interleaved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mucudnn.measuring.candidates import Candidate
from mucudnn.measuring.race import Entry, Race
from mucudnn.measuring.thresholds import FIRST_MARGIN, MARGIN, OPTIMISM, OPTIMISM_WHEN_STORED
from mucudnn.measuring.timing.timer import Stop, Timer, measure_in_turns
from mucudnn.words.results import Failure, Measurement, MicroConfig


class ThoroughRace(Race):
    """A race that drops only hopeless candidates, whose few samples are kept.

    A candidate is hopeless if a rival that needs no more workspace, and whose micro-batch size divides the candidate's,
    is faster for the whole mini-batch by more than the noise: then no configuration gains by the candidate. The
    condition on divisors keeps the smallest sizes, which remainders and small workspace limits need.

    A candidate is judged by its fastest sample, in case the machine was slow for a moment, but its rivals by their
    medians. If prepared filters may be cached between calls, it is judged without its setup time.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._algorithms_before = frozenset(micro_config.algorithm for micro_config in self.known)
        self._tried: set[MicroConfig] = set()

    def missing(self) -> list[Candidate]:
        failed = {of for of, failure in self.failed.items() if not failure.is_passed_over}
        done = failed | set(self.known)
        return [c for c in self.candidates if c.micro_config not in done and self._is_wanted(c)]

    def hurried(self) -> list[Candidate]:
        """Return measured candidates that can still win, but have too few samples because of an earlier time limit."""
        measured = [(c, m) for c in self.candidates if (m := self.known.get(c.micro_config)) is not None]
        few = [(c, m) for c, m in measured if m.samples < self.rule.min_samples]
        # One more, for the warm-up.
        quick = [(c, m) for c, m in few if (m.samples + 1) * m.step_s < self.rule.time_limit_s]
        return [c for c, m in quick if self.can_win(c, m.relative_error) and not self._is_beaten(m)]

    def _run(self) -> Iterator[Measurement | Failure]:
        missing = self.missing()
        ahead = [c for c in missing if c.algorithm.is_torchs_own or c.handed_bytes <= self.limit]
        yield from self._prove(c for c in ahead if self.time_limit_s is None or self.is_baseline(c))
        yield from self._first_samples(missing)
        for entry in list(self.entries.values()):
            if self._is_beaten(entry.measurement()):
                entry.timer.sample()  # the machine may have been slow during the first sample
                self._add(entry)
                if entry.timer.error is not None:
                    yield from self._end(entry)
        yield from self._first_samples(missing)  # larger sizes of the known ones
        yield from self._refine(list(self.entries.values()))

    def _first_samples(self, candidates: Sequence[Candidate]) -> Iterator[Measurement | Failure]:
        """Take one sample of each candidate worth measuring; yield the results of those that get no further sample."""
        for candidate in candidates:
            in_time = self.is_baseline(candidate) or not self._is_late() or not self._has_answer()
            if candidate.micro_config in self._tried or not in_time or not self._is_wanted(candidate):
                continue
            self._tried.add(candidate.micro_config)
            entry = self._try_first_sample(candidate)
            if isinstance(entry, Exception):
                yield from self._failed(candidate, entry)
                continue
            self._add(entry)
            if self.can_win(candidate, entry.relative_error):
                self.entries[candidate.micro_config] = entry
            else:
                yield entry.final()

    def _failed(self, candidate: Candidate, error: Exception) -> Iterator[Failure]:
        self._tried.add(candidate.micro_config)
        yield from super()._failed(candidate, error)

    def _refine(self, entries: Sequence[Entry]) -> Iterator[Measurement | Failure]:
        of_timer = {id(entry.timer): entry for entry in entries}

        def is_hopeless(timer: Timer) -> bool:
            entry = of_timer[id(timer)]
            self._add(entry)
            return self._is_beaten(entry.measurement()) or self._is_late()

        for entry in entries:  # only now, after all first samples, are all rivals known
            if entry.timer.stop is None and is_hopeless(entry.timer):
                entry.timer.stop = Stop.DROPPED
        for timer in measure_in_turns([entry.timer for entry in entries], is_hopeless):
            yield from self._end(of_timer[id(timer)])

    def _is_wanted(self, candidate: Candidate) -> bool:
        """Whether the candidate is worth a first sample.

        Torch's own always is, since everything is compared with it, and only a run shows its workspace.
        """
        if candidate.algorithm.is_torchs_own:
            return True
        name = candidate.algorithm.name
        errors = (m.relative_error for m in self.known.values() if m.micro_config.algorithm == name)
        if max(errors, default=0.0) > self.max_relative_error:
            return False
        return self.fits(candidate) and not self._is_outclassed(candidate)

    def _is_beaten(self, measurement: Measurement) -> bool:
        """Whether a measured candidate is hopeless; the margin grows with fewer and noisier samples."""
        rivals = self._rivals(measurement.micro_config, _workspace_bytes(measurement))
        total_s = self._setup_s(measurement) + self._steps_s(measurement, self._fastest_s(measurement))
        return any(total_s > _margin(measurement, rival) * self._total_s(rival) for rival in rivals)

    def _is_outclassed(self, candidate: Candidate) -> bool:
        """Whether an unmeasured candidate is hopeless even if it scales much better than its smaller micro-batch sizes.

        The candidate needs at least as much workspace as those sizes, so its own workspace is used only if it is known
        without a run.
        """
        name, size = candidate.algorithm.name, candidate.micro_batch_size
        own = [m for c, m in self.known.items() if c.algorithm == name and c.micro_batch_size < size]
        if not own:
            return False
        optimism = OPTIMISM_WHEN_STORED if name in self._algorithms_before else OPTIMISM
        per_sample_s = min(self._fastest_s(m) / m.micro_config.micro_batch_size for m in own) / optimism
        total_s = self._setup_s(own[0]) + per_sample_s * self.task.batch_size
        workspace_bytes = candidate.handed_bytes if candidate.from_source else max(map(_workspace_bytes, own))
        rivals = self._rivals(candidate.micro_config, workspace_bytes)
        return any(total_s > self._total_s(rival) for rival in rivals)

    def _rivals(self, micro_config: MicroConfig, workspace_bytes: int) -> list[Measurement]:
        return [
            m
            for m in self.known.values()
            if m.micro_config != micro_config
            and micro_config.micro_batch_size % m.micro_config.micro_batch_size == 0
            and _workspace_bytes(m) <= workspace_bytes
        ]

    def _fastest_s(self, measurement: Measurement) -> float:
        return self.fastest_s.get(measurement.micro_config, measurement.step_s)

    def _setup_s(self, measurement: Measurement) -> float:
        return 0.0 if self.may_keep else measurement.setup_s

    def _total_s(self, rival: Measurement) -> float:
        return rival.setup_s + self._steps_s(rival, rival.step_s)

    def _steps_s(self, measurement: Measurement, step_s: float) -> float:
        """Return the seconds of the whole mini-batch at ``step_s`` per micro-batch; remainders count in proportion."""
        return self.task.batch_size / measurement.micro_config.micro_batch_size * step_s


def _workspace_bytes(measurement: Measurement) -> int:
    return measurement.prepared_bytes + measurement.scratch_bytes


def _margin(one: Measurement, other: Measurement) -> float:
    if min(one.samples, other.samples) < 2:
        return FIRST_MARGIN
    return max(MARGIN, 1 + 2 * (one.noise + other.noise))
