"""The base class of solver answers: predicted time, lower bound, optimality gap, status and solve time."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Status(StrEnum):
    OPTIMAL = "optimal"  # proven in whole picoseconds and bytes
    FEASIBLE = "feasible"  # within the limit; the gap bounds what a better answer could save


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Base class of solver answers: ``objective_s`` is the predicted time, ``bound_s`` a lower bound on the best time.

    ``solve_time_s`` is the wall time of the solver, which is ignored when answers are compared.
    """

    objective_s: float
    bound_s: float
    status: Status
    solve_time_s: float = field(compare=False)

    @property
    def gap(self) -> float:
        """The optimality gap: the largest fraction of ``objective_s`` that a better answer could save."""
        return (self.objective_s - self.bound_s) / self.objective_s if self.objective_s else 0.0

    @property
    def verdict(self) -> str:
        """The quality of the answer in words: optimal, or the fraction of its time that a better answer could save."""
        return "optimal" if self.status is Status.OPTIMAL else f"at most {self.gap:.2g} of it could be saved"

    def proof(self) -> dict[str, object]:
        """Return times, gap, status and solve time as plain values for ``json.dumps``, with units in the names."""
        return {
            "objective_s": self.objective_s,
            "bound_s": self.bound_s,
            "gap": self.gap,
            "status": str(self.status),
            "solve_time_s": self.solve_time_s,
        }
