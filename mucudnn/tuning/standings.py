"""The standings of a race: what is known of each candidate, what may still win, and what to measure next.

Each algorithm is probed with the largest micro-batch that fits the workspace limit, unless a small
part of the mini-batch shows that the algorithm is hopeless. Only the best algorithms are then measured at other sizes
too. Algorithms that were hopeless in similar problems are skipped. docs/decisions.md has more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

from mucudnn.core.records import Failure, FailureKind, Measurement, MicroConfig, Task, allowed
from mucudnn.core.torch_settings import TORCHS_OWN
from mucudnn.measuring.candidates import Candidate, Counted
from mucudnn.tuning.prior import Expectation, Prior

# Thresholds. Unless stated otherwise, they are multiples of the whole mini-batch's time with the fastest candidate
# within the workspace limit. An algorithm slower than these multiples gets no more samples.
HOPELESS = 1.6  # after a probe at its largest size: neither noise nor another size makes up for this
_HOPELESS_PART = 2.5  # after a probe at a small part of the mini-batch, where fixed costs weigh more: probed on the
# whole, `direct` once took 1.2 s against 16 ms
_SHORT_S = 0.002  # of a mini-batch: noise may double the time of a small part, and to measure the whole takes no time
SECOND = 1.1  # an algorithm this close to the best is measured at half the size too
_HOPELESS_ARITHMETIC = 1.25  # by its FLOPs at peak rate, which load can hide: a probe that saw 87 of 204 GFLOP/s once
# ruled out `pointwise` for most 1x1 layers of ResNet-50
_SMALL_PART = 4  # at most 1/4 of the mini-batch is a small part
_CHECKED_PART = 8  # at least 1/8 of the mini-batch is compared with float64
_MAPPED_BYTES = 32 * 2**20  # glibc's DEFAULT_MMAP_THRESHOLD_MAX: larger blocks are mapped and zeroed anew in each call,
# so that two halves can be faster than the whole

_HOPELESS_KINDS = (FailureKind.HOPELESS, FailureKind.TOO_MANY_FLOPS)


@dataclass
class Standings:
    """A table of what is known of a race's candidates, and what follows from it. Asking it runs and changes nothing.

    max_relative_error: an algorithm above it gets one sample at most.
    may_keep: whether prepared filters may be cached between calls; then neither their bytes nor the setup time count.
    prior: expected times from similar problems.
    every_size: whether all sizes of competitive algorithms are measured, since each is an option when a workspace
    budget is divided.
    flops_per_s: returns the device's peak rate, which takes time to measure; inf if unknown.
    known: the measurements so far, which the race updates, as it does the next two.
    failed: the failures so far.
    counted: the scratch bytes of candidates that were counted. One that was not is assumed to need what it declares.
    """

    task: Task
    candidates: Sequence[Candidate]
    max_relative_error: float = inf
    may_keep: bool = False
    prior: Prior = field(default_factory=Prior)
    every_size: bool = False
    flops_per_s: Callable[[], float] = lambda: inf
    known: dict[MicroConfig, Measurement] = field(default_factory=dict)
    failed: dict[MicroConfig, Failure] = field(default_factory=dict)
    counted: Counted = field(default_factory=dict)

    # Workspaces

    @property
    def limit(self) -> float:
        """The workspace limit in bytes; inf without one."""
        return inf if self.task.limit_bytes is None else self.task.limit_bytes

    def fits(self, candidate: Candidate) -> bool:
        """Whether the candidate's workspace is within the limit, as far as it is known."""
        if self.task.baseline_exempt and self.is_baseline(candidate):
            return True
        prepared_bytes = 0 if self.may_keep else candidate.workspace.prepared_bytes
        return prepared_bytes + self._scratch_bytes(candidate) <= self.limit

    def fastest_uncounted(self) -> list[Candidate]:
        """Return the candidate to count first: if the fastest in similar problems fits, others are hopeless."""
        if self.limit == inf or self.every_size:
            return []
        fastest = [c for _, c in self._by_expectation if self.fits(c)][:1]
        return [c for c in fastest if not self._is_counted(c)]

    def uncounted(self) -> list[Candidate]:
        """Return the other candidates to count; empty if enough is known to say which candidates to measure.

        Those that are over the limit by their declaration are never counted, and without a limit only torch's own is.
        """
        asked = [c for c in self.candidates if self.is_baseline(c)]
        if self.limit < inf:
            asked += [c for c in self.unseen() if not (self.is_baseline(c) or self.hopeless(c))]
            asked += self.parts()
        return [c for c in asked if self.fits(c) and not self._is_counted(c)]

    def too_large(self) -> list[Failure]:
        """Return failures for candidates whose bytes, as counted, exceed the workspace limit, to prevent reruns."""
        barred = [c for c in self.candidates if self._is_new(c) and not self.fits(c)]
        counted = [(c, self.counted.get(c.micro_config)) for c in barred]
        needed = {c.micro_config: c.workspace.prepared_bytes + size for c, size in counted if size is not None}
        reason = "needs {} bytes of workspace"
        return [Failure(large, reason.format(size), FailureKind.TOO_LARGE, size) for large, size in needed.items()]

    def _scratch_bytes(self, candidate: Candidate) -> float:
        """Return the scratch bytes as measured or counted, else as declared; inf if they could not be counted.

        Those of an ``AlgorithmSource`` are as declared.
        """
        if candidate.from_source:
            return candidate.workspace.scratch_bytes
        measured = self.known.get(candidate.micro_config)
        if measured is not None:
            return measured.scratch_bytes
        scratch_bytes = self.counted.get(candidate.micro_config, candidate.workspace.scratch_bytes)
        return inf if scratch_bytes is None else scratch_bytes

    def _is_counted(self, candidate: Candidate) -> bool:
        return candidate.from_source or candidate.micro_config in self.known or candidate.micro_config in self.counted

    # What to measure next

    def is_baseline(self, candidate: Candidate) -> bool:
        """Whether the candidate is torch's own convolution, undivided, with which all others are compared."""
        return candidate.micro_config == self.task.baseline

    def is_complete(self) -> bool:
        """Whether every candidate has the results it needs."""
        return not (self.baselines() or self.missing())

    def has_answer(self) -> bool:
        """Return whether a candidate within the workspace limit was measured; the time limit applies from then on."""
        fitting = [c for c, m in self._measured() if m.prepared_bytes + m.scratch_bytes <= self.limit]
        return any(self.task.batch_size % c.micro_batch_size == 0 for c in fitting)

    def missing(self) -> list[Candidate]:
        """Return the candidates that may still need measuring, in order; empty if all results are known."""
        return self.unseen() or self.sizes()

    def baselines(self) -> list[Candidate]:
        """Return the baseline (torch's own, undivided) if it has no result yet, even if it exceeds the limit."""
        return [c for c in self.candidates if self.is_baseline(c) and self._is_new(c)]

    def foreign(self) -> list[Candidate]:
        """Return the foreign candidates to prove first: of each algorithm the largest that fits by its declaration.

        Algorithms that were hopeless in similar problems are left out.
        """
        declared = [c for c in self.candidates if c.is_foreign and c.handed_bytes <= self.limit]
        largest = {c.algorithm.name: c for c in sorted(declared, key=_by_size)}
        return [c for c in largest.values() if self._is_new(c) and not self.hopeless(c)]

    def parts(self) -> list[Candidate]:
        """Return, for each algorithm without results, a candidate with a small part of the mini-batch as micro-batch.

        Foreign algorithms are left out: they have to be proven at each size. Last resorts (slow algorithms for tight
        limits) are left out unless a workspace budget is divided, since then they may be part of the division.
        """
        seen = {TORCHS_OWN} | {micro_config.algorithm for micro_config in (*self.known, *self.failed)}
        small = [c for c in self.candidates if _SMALL_PART * c.micro_batch_size <= self.task.batch_size]
        parts: dict[str, Candidate] = {}
        for candidate in sorted(small, key=_by_size):
            if candidate.algorithm.name not in seen and not candidate.is_foreign and self.is_large_enough(candidate):
                parts.setdefault(candidate.algorithm.name, candidate)
        resorts = [c for c in parts.values() if c.algorithm.is_last_resort and self.every_size]
        usual = [c for c in parts.values() if not (c.algorithm.is_last_resort or self.hopeless(c))]
        return [c for c in (*usual, *resorts) if self.fits(c)]

    def is_large_enough(self, candidate: Candidate) -> bool:
        """Whether the candidate's micro-batch is a large enough part of the mini-batch to be representative."""
        return _CHECKED_PART * candidate.micro_batch_size >= self.task.batch_size

    def leads(self) -> list[Candidate]:
        """Return the candidate to probe first of each algorithm: the largest one that fits and has not failed.

        The baseline (torch's own, undivided) comes first even if it does not fit, since everything is compared with it.
        Then come algorithms that were fast in similar problems, algorithms with few FLOPs, the others, and last
        resorts. Torch's own is also probed divided if it does not fit or needs fresh pages. Foreign code that failed
        its proof is not tried at another size. Algorithms found hopeless here are left out. Of those that were
        hopeless in similar problems, the largest is included whether it fits or not.
        """
        leads: dict[str, Candidate] = {}
        baselines = [c for c in self.candidates if self.is_baseline(c)]
        fitting = [c for c in baselines if self.fits(c)]
        undivided = {c.algorithm.name for c in fitting if not _MAPPED_BYTES <= self._scratch_bytes(c) < inf}
        without = undivided | self._hopeless_algorithms()
        divided = [c for c in self.candidates if c not in baselines and c.algorithm.name not in without]
        for candidate in sorted(divided, key=_by_size, reverse=True):
            name, failure = candidate.algorithm.name, self.failed.get(candidate.micro_config)
            is_barred = failure is not None and candidate.is_foreign and failure.is_lasting
            stays = failure is None or is_barred or failure.kind in _HOPELESS_KINDS
            needs_no_run = is_barred or self._is_expected_hopeless(candidate)
            if name not in leads and stays and (needs_no_run or self.fits(candidate)):
                leads[name] = candidate
        return [*baselines, *sorted(leads.values(), key=self._promise)]

    def unseen(self) -> list[Candidate]:
        """Return the candidates to measure first: those of ``leads`` (one of each algorithm) without a result."""
        return [c for c in self.leads() if c.micro_config not in self.known and self._may_run(c)]

    def sizes(self) -> list[Candidate]:
        """Return smaller micro-batches to measure: all of the best algorithm, the next smaller one of a close second.

        If a budget is divided over problems, return all sizes of each algorithm that is the fastest or nearly the
        fastest among the algorithms that need no more workspace.
        """
        ranked = self._ranked()
        wanted: list[Candidate] = []
        for rank, (lead, total_s) in enumerate(ranked if self.every_size else ranked[:2]):
            if rank and total_s > SECOND * self.fastest_s(self._bytes_of(self.known[lead.micro_config])):
                continue
            if self.is_baseline(lead) and not self.every_size:
                continue
            sizes = [c for c in self.candidates if c.algorithm.name == lead.algorithm.name]
            smaller = [c for c in sizes if c.micro_batch_size < lead.micro_batch_size]
            smaller.sort(key=_by_size, reverse=True)
            wanted += smaller if self.every_size or not rank else smaller[:1]
        return [c for c in wanted if self._is_new(c)]

    def _is_new(self, candidate: Candidate) -> bool:
        return candidate.micro_config not in self.known and candidate.micro_config not in self.failed

    def _measured(self) -> list[tuple[Candidate, Measurement]]:
        return [(c, self.known[c.micro_config]) for c in self.candidates if c.micro_config in self.known]

    def _may_run(self, candidate: Candidate) -> bool:
        """Whether a candidate may be probed: it has not failed, or the reason for which it was skipped may be gone."""
        if self.is_spared(candidate):
            return False
        failure = self.failed.get(candidate.micro_config)
        if failure is None:
            return True
        # A higher rate may have been measured by now, and it may have been skipped under another limit.
        is_doubtful = (
            failure.kind in _HOPELESS_KINDS if self.limit < inf else failure.kind is FailureKind.TOO_MANY_FLOPS
        )
        return is_doubtful and self.hopeless(candidate) is None

    def _ranked(self) -> list[tuple[Candidate, float]]:
        """Return the best measured candidate of each algorithm that may win, with its seconds, fastest first."""
        measured = [(c, self.known[c.micro_config]) for c in self.leads() if c.micro_config in self.known]
        winning = [(c, self.total_s(m)) for c, m in measured if self.can_win(c, m.relative_error)]
        best: dict[str, tuple[Candidate, float]] = {}
        for candidate, total_s in sorted(winning, key=lambda pair: pair[1]):
            best.setdefault(candidate.algorithm.name, (candidate, total_s))
        return list(best.values())

    def _promise(self, candidate: Candidate) -> tuple[bool, bool, float]:
        """Return a sort key for candidates: by expected time, then by FLOPs, with last resorts at the end."""
        expected = self._expected(candidate)
        rank = self._least_flops(candidate) or inf if expected is None else expected.ratio
        return candidate.algorithm.is_last_resort, expected is None, rank

    # What may win

    def can_win(self, candidate: Candidate, relative_error: float) -> bool:
        """Whether the candidate's error and workspace are within their limits, so that it may be chosen."""
        return relative_error <= self.max_relative_error and self.fits(candidate)

    def total_s(self, measurement: Measurement) -> float:
        """Return the seconds of the whole mini-batch with this micro-config only; a remainder counts in proportion."""
        setup_s = 0.0 if self.may_keep else measurement.setup_s
        return setup_s + self.task.batch_size / measurement.micro_config.micro_batch_size * measurement.step_s

    def fastest_s(self, within_bytes: float = inf, size: int | None = None) -> float:
        """Return the seconds of the fastest candidate within the workspace limit and error bound; inf if there is none.

        within_bytes: largest workspace of the candidates to consider, if a budget is divided.
        size: micro-batch size of the candidates to consider; all if None.
        """
        winning = [m for c, m in self._measured() if self.can_win(c, m.relative_error)]
        if size is not None:
            winning = [m for m in winning if m.micro_config.micro_batch_size == size]
        if self.every_size:
            winning = [m for m in winning if self._bytes_of(m) <= within_bytes]
        return min(map(self.total_s, winning), default=inf)

    def margin(self, candidate: Candidate, measurement: Measurement) -> float:
        """Return a candidate's time as a multiple of the fastest one's; inf if its error or workspace is too large."""
        if not self.can_win(candidate, measurement.relative_error):
            return inf
        return self.total_s(measurement) / self.fastest_s(self._bytes_of(measurement))

    def is_spared(self, candidate: Candidate) -> bool:
        """Whether a candidate's algorithm is a last resort and not needed, since another one is within all limits."""
        usual = [(c, m) for c, m in self._measured() if not c.algorithm.is_last_resort]
        return candidate.algorithm.is_last_resort and any(self.can_win(c, m.relative_error) for c, m in usual)

    def hopeless(self, candidate: Candidate) -> Failure | None:
        """Return a failure with the reason why a candidate that has not run cannot win; None if it is worth a probe."""
        if self.is_baseline(candidate):
            return None
        expected = self._expected(candidate)
        if expected is not None and self._is_expected_hopeless(candidate):
            reason = f"{expected.ratio:.1f} times the fastest in like problems"
            return Failure(candidate.micro_config, reason, FailureKind.HOPELESS)
        times = self._least_s(candidate) / self.fastest_s(self._least_bytes(candidate))
        if times <= _HOPELESS_ARITHMETIC:
            return None
        reason = f"{times:.1f} times the fastest by its arithmetic alone"
        return Failure(candidate.micro_config, reason, FailureKind.TOO_MANY_FLOPS)

    def _hopeless_algorithms(self) -> set[str]:
        """Return the names of algorithms that were too inexact or far slower than the fastest at all measured sizes."""
        hopeful = {
            measurement.micro_config.algorithm
            for measurement in allowed(self.known.values(), self.max_relative_error)
            if self.is_hopeful(measurement)
        }
        return {micro_config.algorithm for micro_config in self.known} - hopeful

    def is_hopeful(self, measurement: Measurement) -> bool:
        """Whether a measured size shows that its algorithm may win at another one.

        A small part of the mini-batch shows less than a large one. If torch's own was measured at that size, too, as by
        tuning a smaller mini-batch, it is enough to be fast at it. What is short is measured at any rate.
        """
        total_s, nbytes = self.total_s(measurement), self._bytes_of(measurement)
        size = measurement.micro_config.micro_batch_size
        is_part = _SMALL_PART * size <= self.task.batch_size
        if total_s <= (_HOPELESS_PART if is_part else HOPELESS) * self.fastest_s(nbytes):
            return True
        is_like_torchs = MicroConfig(TORCHS_OWN, size) in self.known
        return is_part and (
            total_s <= _SHORT_S or (is_like_torchs and total_s <= HOPELESS * self.fastest_s(nbytes, size))
        )

    def _bytes_of(self, measurement: Measurement) -> int:
        """Return the workspace bytes that count in comparisons, without prepared bytes if these may be cached."""
        return measurement.scratch_bytes + (0 if self.may_keep else measurement.prepared_bytes)

    def _least_bytes(self, candidate: Candidate) -> int:
        """Return the workspace bytes that count in comparisons, or their declared part if they were not counted."""
        scratch_bytes = self.counted.get(candidate.micro_config) or candidate.workspace.scratch_bytes
        return scratch_bytes + (0 if self.may_keep else candidate.workspace.prepared_bytes)

    # What similar problems and the arithmetic say

    def _is_expected_hopeless(self, candidate: Candidate) -> bool:
        expected = self._expected(candidate)
        return expected is not None and expected.ratio > expected.hopeless * self._least_expected(candidate)

    def _least_expected(self, candidate: Candidate) -> float:
        """Return the lowest expected ratio among candidates that fit: 1 unless the fastest algorithm does not fit.

        If a budget is divided, only candidates that need no more workspace than this one count.
        """
        if self.every_size:
            own_bytes = self._least_bytes(candidate)
            alike = [c for c in self.candidates if c.micro_batch_size == candidate.micro_batch_size]
            sure = [c for c in alike if self.counted.get(c.micro_config) is not None or not c.counts_any_run]
            beside = [self._expected(c) for c in sure if self._least_bytes(c) <= own_bytes]
            return max(1.0, min((expected.ratio for expected in beside if expected), default=1.0))
        if self.limit == inf:
            return 1.0
        return max(1.0, next((ratio for ratio, c in self._by_expectation if self.fits(c)), 1.0))

    def _expected(self, candidate: Candidate) -> Expectation | None:
        return self._expectations[candidate.algorithm.name]

    @cached_property
    def _expectations(self) -> Mapping[str, Expectation | None]:
        """Expected times by algorithm name, fixed when the race begins; None for an unknown one."""
        names = {candidate.algorithm.name for candidate in self.candidates}
        return {name: self.prior.expected(self.task.problem, name) for name in names}

    @cached_property
    def _by_expectation(self) -> Sequence[tuple[float, Candidate]]:
        """The smallest candidate of each algorithm with an expectation, and its expected ratio, fastest first."""
        smallest: dict[str, Candidate] = {}
        for candidate in sorted(self.candidates, key=_by_size):
            smallest.setdefault(candidate.algorithm.name, candidate)
        expected = ((self._expected(candidate), candidate) for candidate in smallest.values())
        ratios = [(expectation.ratio, candidate) for expectation, candidate in expected if expectation]
        return sorted(ratios, key=lambda pair: pair[0])

    def _least_s(self, candidate: Candidate) -> float:
        """Return the seconds that the candidate's FLOPs for the mini-batch take at the highest rate seen.

        That is the sampled peak rate, or a higher one of a measured candidate.
        """
        peak = self.flops_per_s()
        if peak == inf:
            return 0.0
        seen = (self._least_flops(c) / self.total_s(m) for c, m in self._measured())
        return self._least_flops(candidate) / max(peak, *seen, 0.0)

    def _least_flops(self, candidate: Candidate) -> float:
        """Return the fewest FLOPs of the candidate for the mini-batch; the baseline counts as direct convolution."""
        problem, n = self.task.problem, self.task.batch_size
        return problem.flops(n) if self.is_baseline(candidate) else candidate.algorithm.least_flops(problem, n)


def failures_within(failures: Iterable[Failure], limit_bytes: int | None) -> dict[MicroConfig, Failure]:
    """Return the failures that hold under a workspace limit: what was too large for another one may fit."""
    limit = inf if limit_bytes is None else limit_bytes
    return {f.micro_config: f for f in failures if f.needed_bytes is None or f.needed_bytes > limit}


def _by_size(candidate: Candidate) -> int:
    return candidate.micro_batch_size
