"""The paper's batch-size policies."""

from __future__ import annotations

import pytest

from mucudnn.solver.policies import micro_batch_sizes
from mucudnn.words.config import BatchSizePolicy
from mucudnn.words.errors import InvalidInputError


@pytest.mark.parametrize(
    ("policy", "batch_size", "expected"),
    [
        (BatchSizePolicy.UNDIVIDED, 12, (12,)),
        (BatchSizePolicy.ALL, 5, (1, 2, 3, 4, 5)),
        (BatchSizePolicy.POWER_OF_TWO, 1, (1,)),
        (BatchSizePolicy.POWER_OF_TWO, 2, (1, 2)),
        (BatchSizePolicy.POWER_OF_TWO, 16, (1, 2, 4, 8, 16)),
        (BatchSizePolicy.POWER_OF_TWO, 17, (1, 2, 4, 8, 16, 17)),
    ],
)
def test_sizes(policy: BatchSizePolicy, batch_size: int, expected: tuple[int, ...]) -> None:
    assert micro_batch_sizes(policy, batch_size) == expected


@pytest.mark.parametrize("policy", BatchSizePolicy)
def test_a_batch_below_one_is_refused(policy: BatchSizePolicy) -> None:
    with pytest.raises(InvalidInputError, match="batch_size is 0"):
        micro_batch_sizes(policy, 0)


def test_policies_may_be_text_and_unknown_ones_are_refused() -> None:
    assert micro_batch_sizes("undivided", 12) == (12,)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="policy is 'halves'; allowed are undivided, power-of-two, all"):
        micro_batch_sizes("halves", 12)  # type: ignore[arg-type]
