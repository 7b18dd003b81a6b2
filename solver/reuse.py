"""Workspace reuse (WR): the fastest configuration of one problem under one workspace limit (μ-cuDNN, section III).

Also the micro-batch sizes that are measured, by policy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from mucudnn.core.answers import Account, Status
from mucudnn.core.config import BatchSizePolicy
from mucudnn.core.errors import InfeasibleError, InvalidInputError
from mucudnn.core.records import Measurement
from mucudnn.core.values import exact_bytes, member, whole
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
    name = f"{what or 'convolution'}, batch {batch_size}"
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
