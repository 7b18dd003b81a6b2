"""The batch size below which a device starves."""

from __future__ import annotations

from math import inf

import pytest

from mucudnn.bench.analyses.starving import starving_below


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({1: 10, 2: 10, 3: 10, 4: 10, 5: 10, 6: 12, 7: 14}, 4),  # 1..5 samples take the same time
        ({1: 1, 2: 2, 3: 3}, 1),
        ({1: 1, 2: 2, 3: 30, 4: 4}, 4),  # a dip
        ({8: 10, 1: 10, 4: 10, 2: 10}, 8),  # of the sizes that are known
        ({1: 1, 2: 2, 4: 40}, 5),  # above all of them
        ({1: inf, 2: 2, 4: 4}, 2),  # what cannot run
    ],
)
def test_a_device_starves_below_the_batch_from_which_on_it_is_busy(seconds: dict[int, float], expected: int) -> None:
    assert starving_below(seconds) == expected
