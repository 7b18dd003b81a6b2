"""Candidates of a problem: the pairs of algorithm and micro-batch size that can run, in the order of measuring.

``Proofs`` has those of foreign code (of other libraries) proven before they run in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mucudnn.core.errors import CANDIDATE_ERRORS, raise_interruption, without_frames
from mucudnn.core.problem import ConvProblem
from mucudnn.core.records import Failure, FailureKind, Measurement, MicroConfig, package_of
from mucudnn.core.torch_settings import TORCHS_OWN
from mucudnn.kernels.algorithm import Algorithm, BaseAlgorithm, Workspace, why_unsupported
from mucudnn.kernels.memory import give_back_cache, is_out_of_memory
from mucudnn.kernels.registry import as_called
from mucudnn.measuring.proofs import Proof, UnprovenError

_IN_A_TURN = 8  # number of a source's algorithms that are measured at all sizes before its next ones


@dataclass(frozen=True)
class Candidate:
    """A pair of algorithm and micro-batch size (a micro-config) that can run on a convolution problem.

    Only the methods whose names are verbs run anything.

    stored: the measurement of an earlier run.
    proofs: results of the separate process that must first run foreign code (of other libraries); None if all code is
    checked in this process.
    """

    problem: ConvProblem
    algorithm: Algorithm
    micro_batch_size: int
    stored: Measurement | None = None
    proofs: Proofs | None = field(default=None, compare=False)

    @cached_property
    def micro_config(self) -> MicroConfig:
        return MicroConfig(self.algorithm.name, self.micro_batch_size)

    @cached_property
    def workspace(self) -> Workspace:
        """Sizes of the buffers that the caller of the algorithm has to pass to it."""
        return self.algorithm.workspace(self.problem, self.micro_batch_size)

    @property
    def handed_bytes(self) -> int:
        """Bytes of the buffers that the caller passes; the algorithm may allocate more, which only a run shows."""
        return self.workspace.prepared_bytes + self.workspace.scratch_bytes

    @property
    def counts_any_run(self) -> bool:
        """Whether only a run shows how many bytes the algorithm allocates itself, since it declares no formula."""
        return type(self.algorithm).internal_bytes is BaseAlgorithm.internal_bytes

    @property
    def from_source(self) -> bool:
        """Whether an ``AlgorithmSource`` offers the algorithm, for this problem only: see ``Algorithm.source``.

        Such an algorithm declares its whole workspace.
        """
        return self.algorithm.source is not None

    @cached_property
    def is_foreign(self) -> bool:
        """Whether the code is foreign, so that a separate process must prove it first: see ``is_foreign``."""
        return is_foreign(self.algorithm, self.problem)

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """Exception types to catch in a run: all for foreign code, few for our own, whose bugs must surface."""
        return (Exception,) if self.is_foreign else CANDIDATE_ERRORS

    def prove(self) -> Proof | None:
        """Return the proof of a correct run in the separate proving process; None if this process checks the candidate.

        Raises the error for which the candidate must not run in this process.
        """
        return None if self.proofs is None or not self.is_foreign else self.proofs.of(self)

    def count_scratch_bytes(self) -> int:
        """Return the bytes of the buffer that the caller passes plus those that the algorithm allocates itself.

        Counting may run the algorithm. Raises the error of that run, such as out of memory.
        """
        if self.stored is not None:
            return self.stored.scratch_bytes
        proof = self.prove()
        if proof is None:
            return self.workspace.scratch_bytes + self.algorithm.internal_bytes(self.problem, self.micro_batch_size)
        return self.workspace.scratch_bytes + proof.internal_bytes

    def count_workspace_bytes(self) -> int:
        """Return the prepared and the counted scratch: the workspace if this candidate computes all micro-batches."""
        return self.workspace.prepared_bytes + self.count_scratch_bytes()

    def at_any_time(self, scratch_bytes: int) -> Measurement:
        """Return a measurement with the candidate's workspace and placeholder times, for checks before timing."""
        return Measurement(
            micro_config=self.micro_config,
            setup_s=1.0,
            step_s=1.0,
            prepared_bytes=self.workspace.prepared_bytes,
            scratch_bytes=scratch_bytes,
            relative_error=0.0,
        )


Prove = Callable[[Sequence[Candidate]], Sequence[Proof | Exception]]


class Proofs:
    """Proofs for the foreign candidates of one problem, each requested once, in batches.

    prove: runs a batch in the proving process; returns the proof of each candidate, or the error that forbids it here.
    batch_size: of the whole mini-batch.
    """

    def __init__(self, prove: Prove, batch_size: int) -> None:
        self._prove, self._batch_size = prove, batch_size
        self._found: dict[MicroConfig, Proof | Exception] = {}

    def ask(self, candidates: Iterable[Candidate]) -> None:
        """Run the candidates that have no result yet in the proving process, in one batch."""
        wanted = [c for c in candidates if c.is_foreign and c.stored is None and c.micro_config not in self._found]
        if wanted:
            self._found |= zip((c.micro_config for c in wanted), self._prove(wanted), strict=True)

    def of(self, candidate: Candidate) -> Proof | None:
        """Return the candidate's proof; None for the baseline if it could not be proven, since it may run anyway.

        The user's own step calls the baseline (torch's own convolution, undivided) without mucudnn. Raises the error
        that forbids running the candidate.
        """
        self.ask([candidate])
        if (error := self.error_of(candidate)) is not None:
            raise error
        found = self._found[candidate.micro_config]
        return found if isinstance(found, Proof) else None

    def known(self, candidate: Candidate) -> Proof | None:
        """Return the candidate's proof, without requesting it; None if there is none yet, or an error."""
        found = self._found.get(candidate.micro_config)
        return found if isinstance(found, Proof) else None

    def error_of(self, candidate: Candidate) -> Exception | None:
        """Return the error that forbids running an already requested candidate in this process; None if it may run."""
        found = self._found[candidate.micro_config]
        is_baseline = candidate.micro_config == MicroConfig(TORCHS_OWN, self._batch_size)
        if isinstance(found, Proof) or (is_baseline and isinstance(found, UnprovenError)):
            return None
        return found


Counted = dict[MicroConfig, int | None]  # scratch bytes, as counted; None if that failed


def count_once(candidate: Candidate, counted: Counted) -> int | None:
    """Return a candidate's scratch bytes, counted now unless they are in ``counted``; None if that fails."""
    micro_config = candidate.micro_config
    if micro_config not in counted:
        try:
            counted[micro_config] = candidate.count_scratch_bytes()
        except candidate.errors as error:
            counted[micro_config] = None
            if is_out_of_memory(without_frames(error)):
                give_back_cache()
    return counted[micro_config]


def by_cost_of_counting(candidates: Iterable[Candidate], baseline: MicroConfig) -> list[list[Candidate]]:
    """Return groups of candidates, first those whose bytes cost least to count.

    The groups are: torch's own undivided, which usually fits; candidates whose bytes are known without a run; foreign
    ones with a formula, which have to be proven; torch's own in the smallest pieces; torch's own in larger ones; and
    the others.
    """
    groups: list[list[Candidate]] = [[] for _ in range(6)]
    candidates = [*candidates]
    least = min((c.micro_batch_size for c in candidates if c.algorithm.is_torchs_own), default=0)
    for candidate in candidates:
        if candidate.micro_config == baseline:
            cost = 0
        elif not candidate.counts_any_run:
            cost = 2 if candidate.is_foreign else 1
        elif candidate.algorithm.is_torchs_own:
            cost = 3 if candidate.micro_batch_size == least else 4
        else:
            cost = 5
        groups[cost].append(candidate)
    return groups


def is_foreign(algorithm: Algorithm, problem: ConvProblem) -> bool:
    """Return whether the algorithm computes the problem by foreign code, which must be proven first.

    All variants of torch's own convolution are foreign. The variant that the user's training step calls without mucudnn
    may run even if it cannot be proven.
    """
    is_others = algorithm.source is not None or package_of(algorithm.name) is not None
    return is_others or algorithm.is_foreign(problem)


def find_candidates(
    problem: ConvProblem,
    algorithms: Sequence[Algorithm],
    micro_batch_sizes: Sequence[int],
    stored: Sequence[Measurement] = (),
    proofs: Proofs | None = None,
) -> tuple[list[Candidate], list[Failure]]:
    """Return the candidates that can run, in measuring order, and a failure with its reason for each of the others.

    Small micro-batches come first, since their results rule out larger ones. An ``AlgorithmSource`` lists its best
    algorithms first, possibly more than there is time for, so they are measured in groups, best group first. The
    largest of ``micro_batch_sizes`` must be the whole mini-batch.
    """
    measurements = {m.micro_config: m for m in stored}
    batch_size = max(micro_batch_sizes)
    candidates: list[Candidate] = []
    failures: list[Failure] = []
    for algorithm in algorithms:
        if reason := _why_not_at_all(algorithm, problem):
            failures.append(Failure(MicroConfig(algorithm.name, batch_size), reason, FailureKind.UNSUPPORTED))
            continue
        for size in micro_batch_sizes:
            micro_config = MicroConfig(algorithm.name, size)
            if reason := _why_not(algorithm, problem, size, batch_size):
                failures.append(Failure(micro_config, reason, FailureKind.UNSUPPORTED))
                continue
            called = as_called(algorithm) if size == batch_size else algorithm
            candidates.append(Candidate(problem, called, size, measurements.get(micro_config), proofs))
    offered = dict.fromkeys(candidate.algorithm.name for candidate in candidates if candidate.from_source)
    turns = {name: rank // _IN_A_TURN for rank, name in enumerate(offered)}
    ordered = sorted(candidates, key=lambda c: (turns.get(c.algorithm.name, 0), c.micro_batch_size))
    return ordered, failures


def _why_not_at_all(algorithm: Algorithm, problem: ConvProblem) -> str | None:
    """Return the reason why an algorithm cannot compute a problem, such as an error of ``supports``; None if it can."""
    try:
        return why_unsupported(algorithm, problem)
    except Exception as error:
        if package_of(algorithm.name) is None:
            raise
        raise_interruption(error)
        return f"supports() raised {type(error).__name__}: {error}"


def _why_not(algorithm: Algorithm, problem: ConvProblem, micro_batch_size: int, batch_size: int) -> str | None:
    """Return why micro-batches of this size cannot be computed; None if they can or it is the whole mini-batch."""
    if micro_batch_size == batch_size and algorithm.can_run_undivided(problem):
        return None
    return algorithm.supports_micro_batch(problem, micro_batch_size)
