"""Proofs of foreign code (of other libraries): it runs in a separate process before it runs in this one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

from mucudnn.measuring.timing.candidate_errors import UnsoundError
from mucudnn.words.results import MicroConfig
from mucudnn.words.torch_settings import TORCHS_OWN

if TYPE_CHECKING:
    from mucudnn.measuring.candidates import Candidate
    from mucudnn.measuring.proving.prover import Prover


class UnprovenError(RuntimeError):
    """A passing reason, such as lack of memory, for which foreign code was not proven safe; so it is not run."""


@dataclass(frozen=True, slots=True)
class Proof:
    """Error, memory and time of a foreign candidate that ran correctly in the separate proving process.

    relative_error: against float64. internal_bytes: allocated by the candidate itself. time_s: of the fastest run,
    including the checks of the heap.
    """

    relative_error: float
    internal_bytes: int
    time_s: float


class Fault(StrEnum):
    """Ways in which foreign code fails in the process that proves it. FAILS: the code raised an error."""

    DIES = "dies"
    HANGS = "hangs"
    WRONG = "wrong"
    FAILS = "fails"


class BarredError(UnsoundError):
    """Foreign code must not run in this process, since it failed in the proving process. fault: in which way."""

    def __init__(self, reason: str, fault: Fault) -> None:
        super().__init__(reason, fault)  # all arguments, so that it can be pickled
        self.fault = fault

    def __str__(self) -> str:
        return str(self.args[0])


class Proofs:
    """Proofs that the foreign candidates of one problem run correctly, each requested once, in batches.

    proven: called when a batch is done.
    """

    def __init__(
        self,
        prover: Prover,
        batch_size: int,
        device: str,
        *,
        checks_samples: bool,
        proven: Callable[[], None] = lambda: None,
    ) -> None:
        self._prove = partial(prover.prove, batch_size=batch_size, device=device, checks_samples=checks_samples)
        self._batch_size, self._proven = batch_size, proven
        self._found: dict[MicroConfig, Proof | Exception] = {}

    def ask(self, candidates: Iterable[Candidate]) -> None:
        """Have those of the candidates that have no result yet run in the proving process, in one batch."""
        wanted = [c for c in candidates if c.is_foreign and c.stored is None and c.micro_config not in self._found]
        if wanted:
            self._found |= zip((c.micro_config for c in wanted), self._prove(wanted), strict=True)
            self._proven()

    def of(self, candidate: Candidate) -> Proof | None:
        """Return the candidate's proof; None for torch's own convolution that may run in this process though unproven.

        Torch's own may do so in the form that the user's step calls without mucudnn. Raises the error that bars the
        candidate.
        """
        self.ask([candidate])
        if (error := self.error_of(candidate)) is not None:
            raise error
        found = self._found[candidate.micro_config]
        return found if isinstance(found, Proof) else None

    def error_of(self, candidate: Candidate) -> Exception | None:
        """Return the error for which an already requested candidate must not run in this process; None if it may."""
        found = self._found[candidate.micro_config]
        is_baseline = candidate.micro_config == MicroConfig(TORCHS_OWN, self._batch_size)
        if isinstance(found, Proof) or (is_baseline and isinstance(found, UnprovenError)):
            return None
        return found
