"""Which micro-configs are worth measuring: the race between the candidates of one problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mucudnn.bench.measure.candidate_errors import CANDIDATE_ERRORS, give_back_cache, without_frames
from mucudnn.kernels.contract.algorithm import Algorithm, Workspace
from mucudnn.kernels.contract.out_of_memory import is_out_of_memory
from mucudnn.words.problem import ConvProblem
from mucudnn.words.results import Failure, Measurement, MicroConfig

# A larger micro-batch is at most so much faster per sample than the best smaller one of the same algorithm. Against
# times of an earlier run the factor is smaller: what that run passed over must not be measured later for mere noise.
_OPTIMISM = 2.0
_OPTIMISM_WHEN_STORED = 1.2
_MARGIN = 1.1  # a lead below this may be noise, however steady the samples are
_IN_A_TURN = 8  # algorithms of a source, of which all sizes are looked at before the next ones
_FIRST_MARGIN = 1.5  # after a single sample


@dataclass(frozen=True)
class Candidate:
    """A micro-config that can run on a problem. ``smaller``: the same algorithm with the next smaller micro-batch.

    stored: what an earlier run has measured.
    """

    problem: ConvProblem
    algorithm: Algorithm
    micro_batch_size: int
    smaller: Candidate | None = None
    stored: Measurement | None = None

    @property
    def micro_config(self) -> MicroConfig:
        return MicroConfig(self.algorithm.name, self.micro_batch_size)

    @cached_property
    def workspace(self) -> Workspace:
        """What to hand in."""
        return self.algorithm.workspace(self.problem, self.micro_batch_size)

    @property
    def handed_bytes(self) -> int:
        """The part of ``workspace_bytes`` that is known without running anything."""
        return self.workspace.prepared_bytes + self.workspace.scratch_bytes

    @cached_property
    def scratch_bytes(self) -> int:
        """As declared in a measurement: handed in, and allocated inside. Asked for late, since it may take a run.

        Raises what that run raised, for lack of memory for instance.
        """
        if self.stored is not None:
            return self.stored.scratch_bytes
        if isinstance(self._internal, Exception):
            raise self._internal
        return self.workspace.scratch_bytes + self._internal

    @cached_property
    def _internal(self) -> int | Exception:
        """Bytes allocated inside, or why they cannot be counted: a run that fails is not tried again and again."""
        try:
            return self.algorithm.internal_bytes(self.problem, self.micro_batch_size)
        except CANDIDATE_ERRORS as error:
            failed = without_frames(error)
        if is_out_of_memory(failed):
            give_back_cache()
        return failed

    @property
    def is_countable(self) -> bool:
        """Whether the workspace can be told: unless the run that would tell it fails."""
        return self.stored is not None or not isinstance(self._internal, Exception)

    @property
    def from_source(self) -> bool:
        """Whether an ``AlgorithmSource`` offers it: see ``Algorithm.source``."""
        return self.algorithm.source is not None

    @property
    def workspace_bytes(self) -> int:
        """Of a configuration of this micro-config alone."""
        return self.workspace.prepared_bytes + self.scratch_bytes

    def fits(self, limit_bytes: int | None) -> bool:
        """Larger micro-batches need more: after the first that does not fit, nothing else is run to find out.

        Not so engines that split their work: but what a source offers need not run to tell.
        """
        if limit_bytes is None:
            return True
        if self.from_source:
            return self.handed_bytes <= limit_bytes
        if self.handed_bytes > limit_bytes or (self.smaller is not None and not self.smaller.fits(limit_bytes)):
            return False
        return self.is_countable and self.workspace_bytes <= limit_bytes

    def at_any_time(self) -> Measurement:
        """As if measured, with the workspace that is declared: to find out what would fit, not what is fast."""
        return Measurement(
            micro_config=self.micro_config,
            setup_s=1.0,
            step_s=1.0,
            prepared_bytes=self.workspace.prepared_bytes,
            scratch_bytes=self.scratch_bytes,
            relative_error=0.0,
        )


def find_candidates(
    problem: ConvProblem,
    algorithms: Sequence[Algorithm],
    micro_batch_sizes: Sequence[int],
    known: Sequence[Measurement] = (),
) -> tuple[list[Candidate], list[Failure]]:
    """All micro-configs that can run, in the order in which to look at them, and those that cannot, with the reason.

    Small micro-batches are first, since they tell what larger ones need not be tried. But what a source offers, best
    first, can be more than there is time for: of the best, all sizes come before any of the others. The largest size is
    the whole mini-batch: as every policy has it.
    """
    stored = {m.micro_config: m for m in known}
    batch_size = max(micro_batch_sizes)
    candidates: list[Candidate] = []
    failures: list[Failure] = []
    for algorithm in algorithms:
        if reason := algorithm.supports(problem):
            failures.append(Failure(MicroConfig(algorithm.name, batch_size), reason))
            continue
        smaller = None
        for size in micro_batch_sizes:
            micro_config = MicroConfig(algorithm.name, size)
            if reason := _why_not(algorithm, problem, size, batch_size):
                failures.append(Failure(micro_config, reason))
                continue
            smaller = Candidate(problem, algorithm, size, smaller, stored.get(micro_config))
            candidates.append(smaller)
    offered = dict.fromkeys(candidate.algorithm.name for candidate in candidates if candidate.from_source)
    turns = {name: rank // _IN_A_TURN for rank, name in enumerate(offered)}
    ordered = sorted(candidates, key=lambda c: (turns.get(c.algorithm.name, 0), c.micro_batch_size))
    return ordered, failures


def _why_not(algorithm: Algorithm, problem: ConvProblem, micro_batch_size: int, batch_size: int) -> str | None:
    """Why slices of this size cannot be computed. Torch's own always can be run undivided: that has no slices."""
    if algorithm.is_torchs_own and micro_batch_size == batch_size:
        return None
    return algorithm.supports_micro_batch(problem, micro_batch_size)


@dataclass(slots=True)
class Race:
    """Times known so far, and what they say about a candidate.

    A micro-config is hopeless if another one, of no more workspace and with a micro-batch that divides its own, is
    faster for the whole mini-batch by more than the noise can explain: then no configuration gains by using it. Since
    only divisors count, the smallest sizes stay, which remainders and small workspace limits need.

    ``may_keep``: what a candidate prepares may be kept from call to call, so that it is judged without its setup.
    """

    batch_size: int
    times: dict[MicroConfig, Measurement] = field(default_factory=dict)
    stored: frozenset[str] = frozenset()  # algorithms with times from an earlier run
    fastest_s: dict[MicroConfig, float] = field(default_factory=dict)
    may_keep: bool = False

    def add(self, measurement: Measurement, fastest_s: float) -> None:
        """``fastest_s`` of all samples is what a candidate is judged by: a slow moment of the machine is not its fault.
        As a rival it counts with its median.
        """
        self.times[measurement.micro_config] = measurement
        self.fastest_s[measurement.micro_config] = fastest_s

    def is_beaten(self, measurement: Measurement) -> bool:
        """Whether a measured micro-config is hopeless; the fewer and the noisier the samples, the more it takes."""
        rivals = self._rivals(measurement.micro_config, _workspace_bytes(measurement))
        total_s = self._setup_s(measurement) + self._steps_s(measurement, self._fastest_s(measurement))
        return any(total_s > _margin(measurement, rival) * self._total_s(rival) for rival in rivals)

    def is_outclassed(self, candidate: Candidate) -> bool:
        """Whether a micro-config not yet measured is hopeless even if it is far better than its smaller sizes.

        It needs no less workspace than these: so its own is not asked for, unless that is known without running.
        """
        name, size = candidate.algorithm.name, candidate.micro_batch_size
        own = [m for c, m in self.times.items() if c.algorithm == name and c.micro_batch_size < size]
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
        errors = [m.relative_error for m in self.times.values() if m.micro_config.algorithm == algorithm]
        return max(errors, default=None)

    def _rivals(self, micro_config: MicroConfig, workspace_bytes: int) -> list[Measurement]:
        return [
            m
            for m in self.times.values()
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
        """Of the whole mini-batch, fractions of a micro-batch counted as such."""
        return self.batch_size / measurement.micro_config.micro_batch_size * step_s


def _workspace_bytes(measurement: Measurement) -> int:
    return measurement.prepared_bytes + measurement.scratch_bytes


def _margin(one: Measurement, other: Measurement) -> float:
    if min(one.samples, other.samples) < 2:
        return _FIRST_MARGIN
    return max(_MARGIN, 1 + 2 * (one.noise + other.noise))
