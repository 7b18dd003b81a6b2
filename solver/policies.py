"""The three policies that decide which micro-batch sizes are measured (Oyama et al., μ-cuDNN, section III)."""

from __future__ import annotations

from mucudnn.core.config import BatchSizePolicy
from mucudnn.core.values import member, whole


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
