"""The race of one problem's candidates, in which each is checked and timed on a ``Workbench``, or recorded as failed.

``Standings`` say which candidates can win, and in which order they are measured; the others are probed once or not
at all, and the reason for skipping one is stored. Close candidates are decided later by whole runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf
from statistics import median

from mucudnn.core.errors import BrokenDeviceError, UnsoundError, first_line, tolerated, without_frames
from mucudnn.core.records import Failure, FailureKind, Measurement, MicroConfig
from mucudnn.core.statistics import spread
from mucudnn.kernels.memory import give_back_cache, is_out_of_memory
from mucudnn.measuring.candidates import Candidate, by_cost_of_counting, count_once
from mucudnn.measuring.clocks import Clock
from mucudnn.measuring.load import ProcessorUse, Watch
from mucudnn.measuring.proofs import BarredError, UnprovenError
from mucudnn.measuring.turns import Timer
from mucudnn.measuring.whole_runs import Machine
from mucudnn.measuring.workbench import Workbench
from mucudnn.tuning.standings import HOPELESS, SECOND, Standings

# Multiples of the fastest candidate's time, as in ``standings``, above which a candidate gets no more samples
HOPELESS_PROOF = 4.0  # in the proving process, where counting and guarding memory takes time too
LEAST_SLOW_PROOF_S = 0.02  # seconds; in shorter proofs that time may exceed the algorithm's own
CLOSE = 1.15  # after a sample with a cold cache: below it a second sample decides
_LONG_PROBE_S = 0.05  # a library may compile for 1 to 20 ms
_SHORT_S = 0.0005  # loading code takes up to 0.1 ms


@dataclass(slots=True)
class _Entry:
    """A candidate being measured: the timer of its steps (one micro-batch each), and its other results so far.

    began: processor use before the first sample.
    is_look: whether its only sample is a probe: the fastest of one to three steps, of which the first had a warm cache.
    """

    candidate: Candidate
    timer: Timer
    setup_samples_s: tuple[float, ...]
    scratch_bytes: int
    relative_error: float
    began: ProcessorUse
    watch: Watch
    is_look: bool

    def final(self) -> Measurement:
        """Return the candidate's measurement with its raw samples, and the machine's load while they were taken."""
        load = self.watch.since(self.began)
        samples_s = tuple(self.timer.samples_s)
        return replace(
            self.measurement(), load=load.share, setup_samples_s=self.setup_samples_s, step_samples_s=samples_s
        )

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
            scratch_bytes=self.scratch_bytes,
            relative_error=self.relative_error,
            noise=spread(samples_s),
            samples=len(samples_s),
        )


class Race:
    """A race of the candidates in a table of standings, on a machine, which fills the table.

    Candidates that need more workspace than the task's limit are left out, except the baseline. The results are added
    to the prior.

    standings: the table, with the results of earlier runs, which are not measured again.
    time_limit_s: limit for the whole race; None for none. The baseline and the first fitting candidate are measured
    even after it.
    tell: called with a description of work that has no result.

    Raises ``UnavailableError`` if there is not enough memory for a single sample.
    """

    def __init__(
        self,
        standings: Standings,
        machine: Machine,
        time_limit_s: float | None = None,
        tell: Callable[[str], object] = lambda text: None,
    ) -> None:
        task = standings.task
        self.standings, self.machine, self._tell = standings, machine, tell
        self._is_limited = time_limit_s is not None
        self._deadline_s = inf if time_limit_s is None else machine.clock.now() + time_limit_s
        self._workbench = Workbench(task.problem, task.batch_size, machine.device)
        self._rule = replace(machine.clock.every_round, max_calls=4)
        self._entries: dict[MicroConfig, _Entry] = {}
        self._setup_samples_s: dict[str, tuple[float, ...]] = {}  # by algorithm
        self._relative_errors: dict[str, float] = {}  # by algorithm, for algorithms that are checked only once
        self._has_run: set[str] = set()  # algorithms that have run at another size
        self._hopeless_parts: set[str] = set()  # algorithms that were hopeless on a small part

    def measure(self) -> Iterator[Measurement | Failure]:
        """Measure the missing candidates, and yield each result as soon as it is final.

        Raises ``BrokenDeviceError`` if a failing candidate left the device unusable.
        """
        standings = self.standings
        # The set-up: foreign code is proven, and bytes are counted where they decide what is measured.
        self._count(standings.fastest_uncounted)
        yield from self._prove(standings.foreign())
        self._count(standings.uncounted)
        # A look at torch's own, at small parts of the mini-batch, and at one size of each algorithm.
        for candidate in standings.baselines():
            yield from self._look_at(candidate)
        yield from self._look_at_parts()
        while unseen := self._in_time([c for c in standings.unseen() if c.algorithm.name not in self._hopeless_parts]):
            for candidate in unseen:
                if not standings.is_spared(candidate):
                    yield from self._look_unless_hopeless(candidate)
            self._count(standings.uncounted)  # if a candidate has failed, a smaller one leads
        yield from standings.too_large()
        # More samples of those that may win, and then the same with smaller sizes of the best.
        yield from self._compare_closely(HOPELESS, CLOSE)
        while sizes := self._in_time(standings.sizes()):
            yield from self._prove(sizes)
            for candidate in sizes:
                if candidate.micro_config not in standings.failed:
                    yield from self._look_at(candidate)
            yield from self._compare_closely(inf, SECOND)  # sizes are compared by full samples, not by probes
        standings.prior.learn(standings.task.problem, [*standings.known.values(), *standings.failed.values()])

    def _count(self, uncounted: Callable[[], list[Candidate]]) -> None:
        """Count bytes until no candidate is uncounted, those first that cost least to count.

        After the time limit, if there is an answer, nothing is counted.
        """
        while candidates := self._in_time(uncounted()):
            for group in by_cost_of_counting(candidates, self.standings.task.baseline):
                for candidate in self._in_time(group):
                    self._tell(f"counting bytes of {candidate.algorithm.name} {candidate.micro_batch_size}")
                    count_once(candidate, self.standings.counted)

    def _look_unless_hopeless(self, candidate: Candidate) -> Iterator[Measurement | Failure]:
        """Look at a candidate, or yield a failure with the reason why it cannot win."""
        failure = self.standings.hopeless(candidate)
        if failure is None:
            yield from self._look_at(candidate)
        else:
            self.standings.failed[candidate.micro_config] = failure
            yield failure

    def _is_late(self) -> bool:
        return self.machine.clock.now() > self._deadline_s

    def _in_time(self, candidates: list[Candidate]) -> list[Candidate]:
        """Return the candidates; after the time limit, if there is an answer, only the baseline."""
        if self._is_late() and self.standings.has_answer():
            return [c for c in candidates if self.standings.is_baseline(c)]
        return candidates

    def _look_at_parts(self) -> Iterator[Measurement | Failure]:
        """Probe algorithms on small parts of the mini-batch; drop hopeless ones and unneeded last resorts."""
        looks = [self._try_first_sample(part) for part in self.standings.parts() if not self._is_late()]
        entries = [entry for entry in looks if isinstance(entry, _Entry)]  # failures on a part are retried on the whole
        self._has_run |= {entry.candidate.algorithm.name for entry in entries}
        provisional = {entry.candidate.micro_config: entry.measurement() for entry in entries}
        beside = replace(self.standings, known=self.standings.known | provisional)
        for entry in entries:
            measured = entry.measurement()
            is_wrong = not beside.can_win(entry.candidate, measured.relative_error)
            if is_wrong or not beside.is_hopeful(measured) or beside.is_spared(entry.candidate):
                self._hopeless_parts.add(entry.candidate.algorithm.name)
                self._add(entry)
                yield entry.final()

    def _look_at(self, candidate: Candidate) -> Iterator[Measurement | Failure]:
        """Probe a candidate. If it is hopeless, yield its result; otherwise keep it in the race."""
        if not self._in_time([candidate]):
            return
        if (proven := self._slow_in_proof(candidate)) is not None:
            self.standings.known[candidate.micro_config] = proven
            yield proven
            return
        entry = self._try_first_sample(candidate)
        if isinstance(entry, Exception):
            yield from self._failed(candidate, entry)
            return
        self._add(entry)
        if self._can_win(entry, HOPELESS):
            self._entries[candidate.micro_config] = entry
        else:
            yield entry.final()

    def _slow_in_proof(self, candidate: Candidate) -> Measurement | None:
        """Return the times of the candidate's run in the proving process, if they show that it is hopeless."""
        proof = None if candidate.proofs is None else candidate.proofs.known(candidate)
        is_whole = candidate.micro_batch_size == self.standings.task.batch_size
        if proof is None or not is_whole or self.standings.is_baseline(candidate) or proof.time_s < LEAST_SLOW_PROOF_S:
            return None
        measured = candidate.at_any_time(candidate.count_scratch_bytes())
        measured = replace(measured, setup_s=0.0, step_s=proof.time_s, relative_error=proof.relative_error)
        return measured if self.standings.margin(candidate, measured) > HOPELESS_PROOF else None

    def _compare_closely(self, first: float, second: float) -> Iterator[Measurement | Failure]:
        """Replace probes by interleaved samples with cold caches, then take another sample of each candidate.

        Candidates slower than ``first`` times the fastest get no sample, and those slower than ``second`` times no
        second one.
        """
        for margin, replaces_probes in ((first, True), (second, False)):
            for entry in list(self._entries.values()):
                if not self._can_win(entry, margin) or self._is_late():
                    yield from self._end(entry)
                elif entry.is_look or not replaces_probes:
                    if entry.is_look:
                        entry.is_look = False
                        entry.timer.samples_s.clear()
                    self._has_run.add(entry.candidate.algorithm.name)
                    entry.timer.sample()
                    if entry.timer.error is not None:
                        yield from self._end(entry)
                    else:
                        self._add(entry)
        for entry in list(self._entries.values()):
            yield from self._end(entry)

    def _can_win(self, entry: _Entry, margin: float) -> bool:
        """Whether the candidate's fastest sample is within ``margin`` times the fastest candidate's time."""
        fastest = replace(entry.measurement(), step_s=min(entry.timer.samples_s))
        return self.standings.margin(entry.candidate, fastest) <= margin

    def _prove(self, candidates: Iterable[Candidate]) -> Iterator[Failure]:
        """Prove foreign candidates (run them in a separate process); yield failures of barred ones.

        They are proven in one batch, or one by one until the time limit. Candidates of an ``AlgorithmSource`` are
        proven later, before their first sample.
        """
        wanted = [c for c in candidates if c.is_foreign and not c.from_source]
        if not wanted or (proofs := wanted[0].proofs) is None:
            return
        for batch in [[candidate] for candidate in wanted] if self._is_limited else [wanted]:
            if self._is_late() and not any(map(self.standings.is_baseline, batch)):
                continue
            proofs.ask(batch)
            for candidate in batch:
                if (error := proofs.error_of(candidate)) is not None:
                    yield from self._failed(candidate, error)

    def _try_first_sample(self, candidate: Candidate) -> _Entry | Exception:
        try:
            return self._first_sample(candidate)
        except candidate.errors as error:
            return without_frames(error)

    def _first_sample(self, candidate: Candidate) -> _Entry:
        """Check the candidate's result, then take one sample or a probe of its time. Raises the candidate's errors.

        It is a probe with warm caches, unless our own algorithm has run at another size, since a first sample may load
        or build code.
        """
        # First its result is checked.
        relative_error = self._relative_error(candidate)
        # Then its times are taken.
        began = self.machine.watch.mark()
        setup_samples_s = self._samples_of_setup(candidate)
        clock, slices = self.machine.clock, self._workbench.slice_count(candidate)
        timer = Timer(self._workbench.stream(candidate), clock, self._rule, slices, warms_up=False)
        is_ours = not (candidate.is_foreign or candidate.algorithm.is_torchs_own)
        is_look = not (is_ours and candidate.algorithm.name in self._has_run)
        if is_look:
            timer.samples_s.append(_seconds_of_probe(timer.function, clock))
        else:
            timer.sample()
        if timer.error is not None:
            raise timer.error
        short_s = _SHORT_S  # a first call loads code, so a short one is taken twice
        if is_look:
            short_s = _LONG_PROBE_S if self.standings.is_baseline(candidate) else 0.0
        if timer.samples_s[0] < short_s:
            timer.samples_s[0] = min(timer.samples_s[0], clock.time(timer.function, 1, slices))
        # At last its bytes are counted, if nothing has done so.
        scratch_bytes = self.standings.counted[candidate.micro_config] = candidate.count_scratch_bytes()
        return _Entry(
            candidate,
            timer,
            setup_samples_s,
            scratch_bytes=scratch_bytes,
            relative_error=relative_error,
            began=began,
            watch=self.machine.watch,
            is_look=is_look,
        )

    def _relative_error(self, candidate: Candidate) -> float:
        """Return the relative error of a candidate.

        One check is enough for our own algorithms, which are tested at every size: of few samples, and of more only if
        that fails. Foreign code is checked at each size.
        """
        if candidate.is_foreign:
            proof = candidate.prove()
            return self._workbench.relative_error(candidate) if proof is None else proof.relative_error
        name = candidate.algorithm.name
        sizes = [c for c in self.standings.candidates if c.algorithm.name == name and not c.is_foreign]
        smaller = [c for c in sizes if c.micro_batch_size < candidate.micro_batch_size]
        for part in [c for c in smaller if self.standings.is_large_enough(c)][:1]:
            with tolerated(*candidate.errors):
                return self._checked(part)
        return self._checked(candidate)

    def _checked(self, candidate: Candidate) -> float:
        name = candidate.algorithm.name
        if name not in self._relative_errors:
            self._relative_errors[name] = self._workbench.relative_error(candidate)
        return self._relative_errors[name]

    def _samples_of_setup(self, candidate: Candidate) -> tuple[float, ...]:
        """Time the setup of a candidate's algorithm, once for all its micro-batch sizes, and return the seconds.

        Caches are cold, unless the setup is short. The setup of an algorithm that prepares
        nothing counts as 0: on a GPU the clock shows more than 1 us for it, and algorithms with a setup time make the
        solver's problem much larger.
        """
        if not candidate.workspace.prepared_bytes:
            return (0.0,)
        name = candidate.algorithm.name
        if name not in self._setup_samples_s:
            set_up, clock = self._workbench.set_up(candidate), self.machine.clock
            warm_s = _seconds_of_probe(set_up, clock)
            self._setup_samples_s[name] = (warm_s if warm_s < _SHORT_S else clock.time(set_up, 1),)
        return self._setup_samples_s[name]

    def _add(self, entry: _Entry) -> None:
        """Add this entry's samples to the known results, with which other candidates are compared."""
        self.standings.known[entry.candidate.micro_config] = entry.measurement()

    def _end(self, entry: _Entry) -> Iterator[Measurement | Failure]:
        del self._entries[entry.candidate.micro_config]
        if entry.timer.error is None:
            yield entry.final()
        else:
            yield from self._failed(entry.candidate, entry.timer.error)

    def _failed(self, candidate: Candidate, error: Exception) -> Iterator[Failure]:
        """Record the candidate's failure and yield it. Raise ``BrokenDeviceError`` if the device is unusable.

        A candidate that died, hung or was wrong, here or in its proof, has failed for good: its failure is stored, and
        later tunings leave it out. A lack of memory, and a proof that could not be made, are not stored.
        """
        standings = self.standings
        try:
            self.machine.clock.now()
        except RuntimeError as broken:  # a sticky CUDA error, with which every call on the device fails
            reason = f"{_who(candidate)} left the device unusable: {first_line(broken)}"
            yield Failure(candidate.micro_config, reason)
            stored = "" if standings.is_baseline(candidate) else ". That is stored, and the next run passes over it"
            raise BrokenDeviceError(
                f"{standings.task.problem}, micro-batches of {candidate.micro_batch_size}: {reason}{stored}: start "
                "the process anew, and tune again"
            ) from None
        least_s = error.least_s if isinstance(error, BarredError) else None
        kind = FailureKind.FAILED if least_s is None else FailureKind.SLOW
        if isinstance(error, UnprovenError):
            kind = FailureKind.UNPROVEN
        elif is_out_of_memory(error):
            kind = FailureKind.OUT_OF_MEMORY
        failure = Failure(candidate.micro_config, first_line(error), kind, least_s=least_s)
        if not failure.is_lasting:
            give_back_cache()
        elif isinstance(error, UnsoundError) and candidate.is_foreign:
            failure = replace(failure, reason=f"{_who(candidate)}: {error}")
        standings.failed[candidate.micro_config] = failure
        yield failure


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
