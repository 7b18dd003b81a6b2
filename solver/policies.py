"""Which micro-batch sizes are worth measuring: the paper's three policies (Oyama et al., μ-cuDNN, section III)."""

from __future__ import annotations

from mucudnn.config import BatchSizePolicy
from mucudnn.errors import InvalidInputError


def micro_batch_sizes(policy: BatchSizePolicy, batch_size: int) -> tuple[int, ...]:
    """Ascending sizes out of 1..batch_size; every policy has the undivided batch among them.

    Raises ``InvalidInputError`` if ``batch_size`` is below 1.
    """
    if batch_size < 1:
        raise InvalidInputError(f"batch_size is {batch_size}; it must be at least 1")
    if policy == BatchSizePolicy.ALL:
        return tuple(range(1, batch_size + 1))
    if policy == BatchSizePolicy.UNDIVIDED:
        return (batch_size,)
    powers = (2**exponent for exponent in range((batch_size - 1).bit_length()))
    return (*powers, batch_size)
