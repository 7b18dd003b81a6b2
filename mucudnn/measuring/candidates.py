"""Candidates of a problem: the micro-configs that can run, in the order in which they are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mucudnn.kernels.contract.algorithm import Algorithm, BaseAlgorithm, Workspace
from mucudnn.kernels.contract.out_of_memory import is_out_of_memory
from mucudnn.kernels.registry import as_called
from mucudnn.measuring.proofs import Proof, Proofs
from mucudnn.measuring.timing.candidate_errors import CANDIDATE_ERRORS, give_back_cache, without_frames
from mucudnn.words.problem import ConvProblem
from mucudnn.words.results import Failure, Measurement, MicroConfig, package_of

_IN_A_TURN = 8  # algorithms of a source that are measured at all sizes before the next ones


@dataclass(frozen=True)
class Candidate:
    """A micro-config that can run on a problem. ``smaller``: the same algorithm with the next smaller micro-batch.

    stored: the measurement of an earlier run. proofs: of foreign code, which must be proven before it runs here; None
    if all code is checked in this process.
    """

    problem: ConvProblem
    algorithm: Algorithm
    micro_batch_size: int
    smaller: Candidate | None = None
    stored: Measurement | None = None
    proofs: Proofs | None = field(default=None, compare=False)

    @cached_property
    def micro_config(self) -> MicroConfig:
        return MicroConfig(self.algorithm.name, self.micro_batch_size)

    @cached_property
    def workspace(self) -> Workspace:
        """Buffers that the algorithm is handed."""
        return self.algorithm.workspace(self.problem, self.micro_batch_size)

    @property
    def handed_bytes(self) -> int:
        """The part of ``workspace_bytes`` that is known without running anything."""
        return self.workspace.prepared_bytes + self.workspace.scratch_bytes

    @cached_property
    def scratch_bytes(self) -> int:
        """Scratch as in a measurement: handed in, and allocated inside. Ask late, since it may take a run.

        Raises what that run raised, for lack of memory for instance.
        """
        if self.stored is not None:
            return self.stored.scratch_bytes
        if isinstance(self._internal, Exception):
            raise self._internal
        return self.workspace.scratch_bytes + self._internal

    @cached_property
    def _internal(self) -> int | Exception:
        """Bytes allocated inside, or the error of counting them, so that a failing run is not repeated."""
        try:
            if (proof := self.proof()) is not None:
                return proof.internal_bytes
            return self.algorithm.internal_bytes(self.problem, self.micro_batch_size)
        except self.errors as error:
            failed = without_frames(error)
        if is_out_of_memory(failed):
            give_back_cache()
        return failed

    def proof(self) -> Proof | None:
        """Return the proof from the proving process; None if this process checks the candidate.

        Raises the error that bars it.
        """
        return None if self.proofs is None or not self.is_foreign else self.proofs.of(self)

    @property
    def is_countable(self) -> bool:
        """Whether the workspace is known or can be counted: false after a failing run."""
        return self.stored is not None or not isinstance(self._internal, Exception)

    @property
    def is_counted(self) -> bool:
        """Whether the bytes allocated inside were counted already."""
        return "_internal" in self.__dict__ and not isinstance(self._internal, Exception)

    @property
    def counts_any_run(self) -> bool:
        """Whether any run counts the bytes allocated inside, for which there is no formula."""
        return type(self.algorithm).internal_bytes is BaseAlgorithm.internal_bytes

    @property
    def from_source(self) -> bool:
        """Whether an ``AlgorithmSource`` offers it: see ``Algorithm.source``."""
        return self.algorithm.source is not None

    @cached_property
    def is_foreign(self) -> bool:
        """Whether it is proven before it is run; see ``is_foreign``."""
        return is_foreign(self.algorithm, self.problem)

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """Errors that a run may raise. Foreign code can fail in any way; bugs of ours must not be hidden."""
        return (Exception,) if self.is_foreign else CANDIDATE_ERRORS

    @property
    def workspace_bytes(self) -> int:
        """Workspace of a configuration of this micro-config alone."""
        return self.workspace.prepared_bytes + self.scratch_bytes

    def fits(self, limit_bytes: int | None) -> bool:
        """Whether the workspace is within the limit.

        Larger micro-batches need more, so after the first that does not fit, none is run to find out. A source's
        algorithms declare their workspace without a run, and may need less for larger ones.
        """
        if limit_bytes is None:
            return True
        if self.from_source:
            return self.handed_bytes <= limit_bytes
        if self.handed_bytes > limit_bytes or (self.smaller is not None and not self.smaller.fits(limit_bytes)):
            return False
        return self.is_countable and self.workspace_bytes <= limit_bytes

    def at_any_time(self) -> Measurement:
        """A measurement with the declared workspace and made-up times, to find out what would fit."""
        return Measurement(
            micro_config=self.micro_config,
            setup_s=1.0,
            step_s=1.0,
            prepared_bytes=self.workspace.prepared_bytes,
            scratch_bytes=self.scratch_bytes,
            relative_error=0.0,
        )


def is_foreign(algorithm: Algorithm, problem: ConvProblem) -> bool:
    """Return whether a problem is computed by foreign code that must be proven first.

    All forms of torch's own are foreign. The one that the user's step runs anyway may run even if it cannot be proven.
    """
    is_others = algorithm.source is not None or package_of(algorithm.name) is not None
    return is_others or algorithm.is_foreign(problem)


def find_candidates(
    problem: ConvProblem,
    algorithms: Sequence[Algorithm],
    micro_batch_sizes: Sequence[int],
    known: Sequence[Measurement] = (),
    proofs: Proofs | None = None,
) -> tuple[list[Candidate], list[Failure]]:
    """Return micro-configs that can run, in the order of measuring, and failures with the reasons of the others.

    Small micro-batches come first, since their results rule out larger ones. A source offers its best algorithms first,
    possibly more than there is time for, so all sizes of the best come before any of the others. The largest size is
    the whole mini-batch, which every policy has.
    """
    stored = {m.micro_config: m for m in known}
    batch_size = max(micro_batch_sizes)
    candidates: list[Candidate] = []
    failures: list[Failure] = []
    for algorithm in algorithms:
        if reason := _why_not_at_all(algorithm, problem):
            failures.append(Failure(MicroConfig(algorithm.name, batch_size), reason))
            continue
        smaller = None
        for size in micro_batch_sizes:
            micro_config = MicroConfig(algorithm.name, size)
            if reason := _why_not(algorithm, problem, size, batch_size):
                failures.append(Failure(micro_config, reason))
                continue
            called = as_called(algorithm) if size == batch_size else algorithm
            smaller = Candidate(problem, called, size, smaller, stored.get(micro_config), proofs)
            candidates.append(smaller)
    offered = dict.fromkeys(candidate.algorithm.name for candidate in candidates if candidate.from_source)
    turns = {name: rank // _IN_A_TURN for rank, name in enumerate(offered)}
    ordered = sorted(candidates, key=lambda c: (turns.get(c.algorithm.name, 0), c.micro_batch_size))
    return ordered, failures


def _why_not_at_all(algorithm: Algorithm, problem: ConvProblem) -> str | None:
    """Return the reason why an algorithm cannot compute a problem, such as an error of ``supports``; None if it can."""
    try:
        return algorithm.supports(problem)
    except Exception as error:
        if package_of(algorithm.name) is None:
            raise
        return f"supports() raised {type(error).__name__}: {error}"


def _why_not(algorithm: Algorithm, problem: ConvProblem, micro_batch_size: int, batch_size: int) -> str | None:
    """Return the reason why slices of this size cannot be computed; None if they can or the batch is undivided."""
    if micro_batch_size == batch_size and algorithm.can_run_undivided(problem):
        return None
    return algorithm.supports_micro_batch(problem, micro_batch_size)
