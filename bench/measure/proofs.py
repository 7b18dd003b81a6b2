"""Proofs of foreign candidates: what they did in a process of their own, before they are run in this one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from mucudnn.words.results import MicroConfig
from mucudnn.words.torch_settings import TORCHS_OWN

if TYPE_CHECKING:
    from mucudnn.bench.measure.candidates import Candidate


class UnprovenError(RuntimeError):
    """Foreign code could not be proven, for a reason that may pass; so it is not run."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What a candidate was seen to do in a process of its own.

    relative_error: against float64. internal_bytes: what it allocates by itself.
    """

    relative_error: float
    internal_bytes: int


class Prover(Protocol):
    """Proves candidates of one problem in a process of their own: see ``mucudnn.bench.measure.proving``."""

    def prove(
        self, candidates: Sequence[Candidate], batch_size: int, device: str, *, checks_samples: bool
    ) -> Sequence[Proof | Exception]:
        """Return for each candidate its proof, or the error that bars it; ``UnprovenError``: nothing is known."""

    def start(self) -> None:
        """Begin to start the process, without waiting for it."""

    def rest(self) -> None:
        """Have the process give back what it keeps for further candidates of the same problem."""


class Proofs:
    """The proofs of the foreign candidates of one problem, each asked for once, in batches."""

    def __init__(self, prover: Prover, batch_size: int, device: str, *, checks_samples: bool) -> None:
        self._prove = partial(prover.prove, batch_size=batch_size, device=device, checks_samples=checks_samples)
        self._batch_size = batch_size
        self._found: dict[MicroConfig, Proof | Exception] = {}

    def ask(self, candidates: Iterable[Candidate]) -> None:
        """Have those proven of which nothing is known."""
        wanted = [c for c in candidates if c.is_foreign and c.stored is None and c.micro_config not in self._found]
        self._found |= zip((c.micro_config for c in wanted), self._prove(wanted), strict=True)

    def of(self, candidate: Candidate) -> Proof | None:
        """Return the proof; ``None`` where torch's own cannot be proven in the form that the user's step runs anyway.

        Raises the error that bars the candidate.
        """
        self.ask([candidate])
        found = self._found[candidate.micro_config]
        if isinstance(found, UnprovenError) and candidate.micro_config == MicroConfig(TORCHS_OWN, self._batch_size):
            return None
        if isinstance(found, Exception):
            raise found
        return found
