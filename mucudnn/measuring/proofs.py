"""Proofs of foreign code (of other libraries), which runs in a separate process before it may run in this one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

from mucudnn.core.errors import UnsoundError
from mucudnn.core.records import MicroConfig
from mucudnn.core.torch_settings import TORCHS_OWN

if TYPE_CHECKING:
    from mucudnn.measuring.candidates import Candidate
    from mucudnn.measuring.proving.prover import Prover


class UnprovenError(RuntimeError):
    """Foreign code was not proven safe for a transient reason, such as lack of memory, and is not run."""


@dataclass(frozen=True, slots=True)
class Proof:
    """Error, memory and time of a foreign candidate that ran correctly in the separate proving process.

    relative_error: against float64.
    internal_bytes: bytes that the candidate allocates itself.
    time_s: time of the fastest run, including the heap checks.
    """

    relative_error: float
    internal_bytes: int
    time_s: float


class Fault(StrEnum):
    """Ways in which third-party code fails when a separate process tries it first.

    FAILS: the code raised an error. SLOW: the code takes so long that it was only tried on a few samples.
    """

    DIES = "dies"
    HANGS = "hangs"
    WRONG = "wrong"
    FAILS = "fails"
    SLOW = "slow"


class BarredError(UnsoundError):
    """Foreign code failed in the proving process, so it must not run in this one.

    fault: the way in which it failed.
    least_s: if it was too slow, the seconds that the mini-batch would have taken.
    """

    def __init__(self, reason: str, fault: Fault, least_s: float | None = None) -> None:
        super().__init__(reason, fault, least_s)  # all arguments, for pickling
        self.fault, self.least_s = fault, least_s

    def __str__(self) -> str:
        return str(self.args[0])


class Proofs:
    """Proofs for the foreign candidates of one problem, each requested once, in batches.

    proven: callback after each batch.
    """

    def __init__(
        self, prover: Prover, batch_size: int, device: str, *, proven: Callable[[], None] = lambda: None
    ) -> None:
        self._prove = partial(prover.prove, batch_size=batch_size, device=device)
        self._batch_size, self._proven = batch_size, proven
        self._found: dict[MicroConfig, Proof | Exception] = {}

    def ask(self, candidates: Iterable[Candidate]) -> None:
        """Run the candidates that have no result yet in the proving process, in one batch."""
        wanted = [c for c in candidates if c.is_foreign and c.stored is None and c.micro_config not in self._found]
        if wanted:
            self._found |= zip((c.micro_config for c in wanted), self._prove(wanted), strict=True)
            self._proven()

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
