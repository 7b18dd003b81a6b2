"""Workspace reuse (WR): the fastest configuration of one problem under one workspace limit (μ-cuDNN, section III).

Also the micro-batch sizes that are measured, by policy, and the base class of all answers of solvers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from mucudnn.core.config import BatchSizePolicy
from mucudnn.core.errors import InfeasibleError, InvalidInputError
from mucudnn.core.records import Configuration, Measurement
from mucudnn.core.values import exact_bytes, format_bytes, format_seconds, member, whole
from mucudnn.solver.front import desirable_sets


def micro_batch_sizes(policy: BatchSizePolicy, batch_size: int) -> tuple[int, ...]:
    """Return the micro-batch sizes of a policy, ascending; ``batch_size``, the undivided batch, is always the last.

    >>> micro_batch_sizes(BatchSizePolicy.POWER_OF_TWO, 12)
    (1, 2, 4, 8, 12)

    Raises ``InvalidInputError`` for an unknown policy, and unless ``batch_size`` is a whole number of at least 1.
    """
    batch_size, policy = whole(batch_size, "batch_size", 1), member(BatchSizePolicy, policy, "policy")
    if policy is BatchSizePolicy.ALL:
        return tuple(range(1, batch_size + 1))
    if policy is BatchSizePolicy.UNDIVIDED:
        return (batch_size,)
    powers = (2**exponent for exponent in range((batch_size - 1).bit_length()))
    return (*powers, batch_size)


class Status(StrEnum):
    OPTIMAL = "optimal"  # proven in whole picoseconds and bytes
    FEASIBLE = "feasible"  # within the limit; the gap bounds what a better answer could save


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Base class of solver answers.

    objective_s: the predicted time.
    bound_s: a lower bound on the best time.
    solve_time_s: the wall time of the solver, which is ignored when answers are compared.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Account(Answer):
    """The best configuration of one problem, with figures on how it was found. It is always optimal.

    front_size: the size of the desirable set (the Pareto front of time and workspace).
    smallest_feasible_bytes: the least workspace in the set.
    """

    what: str
    batch_size: int
    measurements: int
    front_size: int
    limit_bytes: int | None
    smallest_feasible_bytes: int
    configuration: Configuration

    def to_json(self) -> dict[str, object]:
        """Return the configuration and all figures as plain values for ``json.dumps``, with units in the names."""
        return {
            **self.proof(),
            "what": self.what,
            "batch_size": self.batch_size,
            "measurements": self.measurements,
            "front_size": self.front_size,
            "limit_bytes": self.limit_bytes,
            "smallest_feasible_bytes": self.smallest_feasible_bytes,
            "workspace_bytes": self.configuration.workspace_bytes,
            "configuration": str(self.configuration),
        }

    def __str__(self) -> str:
        return (
            f"{_name(self.what, self.batch_size)}: {self.configuration}, {format_seconds(self.objective_s)} in "
            f"{format_bytes(self.configuration.workspace_bytes)} (limit {format_bytes(self.limit_bytes)}, smallest "
            f"feasible {format_bytes(self.smallest_feasible_bytes)}), {self.verdict}; {self.front_size} desirable "
            f"configurations from {self.measurements} measurements, {format_seconds(self.solve_time_s)}"
        )


def account_wr(
    measurements: Sequence[Measurement], batch_size: int, limit_bytes: int | None, *, what: str = ""
) -> Account:
    """Find the fastest configuration for ``batch_size`` with at most ``limit_bytes`` of workspace.

    The answer is exact for the model of ``solver.front``. Ties: less workspace, then fewer micro-batches, then by name.

    limit_bytes: None if there is no limit.
    what: name of the problem in errors.

    Raises ``InfeasibleError`` with the smallest feasible limit if nothing fits, ``InvalidInputError`` if the batch size
    is below 1, the limit below 0, or a measurement negative or not finite.
    """
    start = time.perf_counter()
    name = _name(what, batch_size)
    if limit_bytes is not None and limit_bytes < 0:
        raise InvalidInputError(
            f"the workspace limit is {limit_bytes} bytes; it must be at least 0, or None for no limit"
        )
    sets = desirable_sets(measurements, batch_size)
    if not measurements:
        raise InfeasibleError(
            f"{name}: nothing was measured, so there is nothing to choose from; measure at least one micro-batch size"
        )
    smallest = sets.smallest(batch_size)
    if smallest is None:
        sizes = sorted({measurement.micro_config.micro_batch_size for measurement in measurements})
        raise InfeasibleError(
            f"{name}: no sum of the measured micro-batch sizes ({', '.join(map(str, sizes))}) is {batch_size}; measure "
            f"size 1 or {batch_size}"
        )
    least = smallest.workspace_bytes
    chosen = sets.fastest(batch_size, limit_bytes)
    if chosen is None:
        assert limit_bytes is not None  # without a limit, something fits
        raise InfeasibleError(
            f"{name}: no configuration fits the workspace limit of {exact_bytes(limit_bytes)}; the smallest feasible "
            f"limit is {exact_bytes(least)}, with {smallest}; allow at least that much",
            smallest_feasible_bytes=least,
        )
    return Account(
        objective_s=chosen.time_s,
        bound_s=chosen.time_s,
        status=Status.OPTIMAL,
        solve_time_s=time.perf_counter() - start,
        what=what,
        batch_size=batch_size,
        measurements=len(measurements),
        front_size=sets.size(batch_size),
        limit_bytes=limit_bytes,
        smallest_feasible_bytes=least,
        configuration=chosen,
    )


def _name(what: str, batch_size: int) -> str:
    return f"{what or 'convolution'}, batch {batch_size}"
