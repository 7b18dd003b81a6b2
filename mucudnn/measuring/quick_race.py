"""The quick race: measure the candidates of a problem that can win, and probe the others once or not at all.

``QuickPlan`` determines the order. The reason for skipping a candidate is stored. Close candidates are decided later by
whole runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf

from mucudnn.measuring.candidates import Candidate
from mucudnn.measuring.prior import Prior
from mucudnn.measuring.quick_plan import QuickPlan
from mucudnn.measuring.race import Entry, Race
from mucudnn.measuring.thresholds import (
    CLOSE,
    HOPELESS,
    HOPELESS_PART,
    HOPELESS_PROOF,
    LEAST_SLOW_PROOF_S,
    SECOND,
)
from mucudnn.measuring.timing.timer import StoppingRule
from mucudnn.words.results import Failure, Measurement


@dataclass(eq=False)
class QuickRace(Race):
    """A race that follows a ``QuickPlan`` to measure only candidates that can win, and checks errors by sampling.

    prior, every_size, flops_per_s: as in ``QuickPlan``; the results are added to the prior.
    """

    prior: Prior = field(default_factory=Prior)
    every_size: bool = False
    flops_per_s: float = inf

    warms_up = False  # the check serves as warm-up
    checks_samples = True

    def __post_init__(self) -> None:
        if any(c.smaller is not None for c in self.candidates):  # counting their workspace may take a run
            self.candidates = [replace(c, smaller=None) for c in self.candidates]
        super().__post_init__()
        self.rule = replace(self.machine.clock.every_round, max_calls=4)
        self.setup_rule = StoppingRule(time_limit_s=0.0)  # one sample
        # A candidate too large under another limit may fit.
        kept = [f for f in self.stored_failures if f.needed_bytes is None or f.needed_bytes > self.limit]
        self.failed = {failure.micro_config: failure for failure in kept}
        self._plan = QuickPlan(self, self.known, self.failed, self.prior, self.every_size, self.flops_per_s)
        self._has_run: set[str] = set()  # algorithms that have run at another size
        self._hopeless_parts: set[str] = set()  # algorithms that were hopeless on a small part

    def missing(self) -> list[Candidate]:
        return self._plan.unseen() or self._plan.sizes()

    @property
    def is_done(self) -> bool:
        """Whether every candidate has the results it needs. The baseline is checked first, which needs no run."""
        return not (self._plan.baselines() or self.missing())

    def _run(self) -> Iterator[Measurement | Failure]:
        plan = self._plan
        yield from self._prove(plan.foreign())
        for candidate in plan.baselines():
            yield from self._look_at(candidate)
        yield from self._look_at_parts()
        while unseen := self._in_time(self._unseen()):
            for candidate in unseen:
                yield from self._look_unless_hopeless(candidate)
        yield from plan.too_large()
        yield from self._compare_closely(HOPELESS, CLOSE)
        while sizes := self._in_time(plan.sizes()):
            yield from self._prove(sizes)
            for candidate in sizes:
                if candidate.micro_config not in self.failed:
                    yield from self._look_at(candidate)
            yield from self._compare_closely(inf, SECOND)  # sizes are compared by full samples, not by probes
        self.prior.learn(self.task.problem, [*self.known.values(), *self.failed.values()])

    def _in_time(self, candidates: list[Candidate]) -> list[Candidate]:
        """Return all candidates; after the time limit, only the baseline or the first one if there is no answer yet."""
        if not self._is_late():
            return candidates
        return [c for c in candidates if self.is_baseline(c)] or ([] if self._has_answer() else candidates[:1])

    def _unseen(self) -> list[Candidate]:
        return [c for c in self._plan.unseen() if c.algorithm.name not in self._hopeless_parts]

    def _look_unless_hopeless(self, candidate: Candidate) -> Iterator[Measurement | Failure]:
        if self._plan.is_spared(candidate):
            return
        if (failure := self._plan.hopeless(candidate)) is not None:
            self.failed[candidate.micro_config] = failure
            yield failure
        else:
            yield from self._look_at(candidate)

    def _look_at_parts(self) -> Iterator[Measurement | Failure]:
        """Probe algorithms on small parts of the mini-batch; drop hopeless ones and unneeded last resorts."""
        looks = [self._try_first_sample(part) for part in self._plan.parts() if not self._is_late()]
        entries = [entry for entry in looks if isinstance(entry, Entry)]  # failures on a part are retried on the whole
        self._has_run |= {entry.candidate.algorithm.name for entry in entries}
        beside = self._plan.beside({entry.candidate.micro_config: entry.measurement() for entry in entries})
        for entry in entries:
            margin = beside.margin(entry.candidate, entry.measurement())
            if margin > HOPELESS_PART or beside.is_spared(entry.candidate):
                self._hopeless_parts.add(entry.candidate.algorithm.name)
                self._add(entry)
                yield entry.final()

    def _look_at(self, candidate: Candidate) -> Iterator[Measurement | Failure]:
        """Probe a candidate. If it is hopeless, yield its result; otherwise keep it in the race."""
        if self._is_late() and self._has_answer() and not self.is_baseline(candidate):
            return
        if (proven := self._slow_in_proof(candidate)) is not None:
            self.known[candidate.micro_config] = proven
            yield proven
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

    def _slow_in_proof(self, candidate: Candidate) -> Measurement | None:
        """Return the times of the candidate's run in the proving process, if they show that it is hopeless."""
        proof = None if candidate.proofs is None else candidate.proofs.known(candidate)
        is_whole = candidate.micro_batch_size == self.task.batch_size and not self.is_baseline(candidate)
        if proof is None or not is_whole or proof.time_s < LEAST_SLOW_PROOF_S:
            return None
        measured = candidate.at_any_time()
        measured = replace(measured, setup_s=0.0, step_s=proof.time_s, relative_error=proof.relative_error)
        return measured if self._plan.margin(candidate, measured) > HOPELESS_PROOF else None

    def _compare_closely(self, first: float, second: float) -> Iterator[Measurement | Failure]:
        """Replace probes by interleaved samples with cold caches, then take another sample of each candidate.

        Candidates slower than ``first`` times the fastest get no sample, and those slower than ``second`` times no
        second one.
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
                self._has_run.add(entry.candidate.algorithm.name)
                entry.timer.sample()
                if entry.timer.error is not None:
                    yield from self._end(entry)
                else:
                    self._add(entry)

    def _can_win(self, entry: Entry, margin: float) -> bool:
        """Whether the candidate's fastest sample is within ``margin`` times the fastest candidate's time."""
        own = replace(entry.measurement(), step_s=min(entry.timer.samples_s))
        return self._plan.margin(entry.candidate, own) <= margin

    def _is_look(self, candidate: Candidate) -> bool:
        """Whether the first sample is only a probe, since the first run may have to load or build code."""
        own = not (candidate.is_foreign or candidate.algorithm.is_torchs_own)
        return not (own and candidate.algorithm.name in self._has_run)

    def _relative_error(self, candidate: Candidate) -> float:
        """Return a candidate's error; check our own algorithms on few samples, and on more only if that check fails.

        Few samples are enough for our own algorithms, which are tested at every size.
        """
        own = [c for c in self.candidates if c.algorithm.name == candidate.algorithm.name and not c.is_foreign]
        smaller = [c for c in own if c.micro_batch_size < candidate.micro_batch_size]
        for part in [c for c in smaller if self._plan.is_large_enough(c)][:1]:
            with suppress(*candidate.errors):
                return super()._relative_error(part)
        return super()._relative_error(candidate)
