"""Below which batch size a device starves, and what is no curve over batch sizes."""

from __future__ import annotations

from math import inf

import pytest

from mucudnn.bench.analyses.batch_sizes import require_sweepable, starving_below
from mucudnn.words.config import Config
from mucudnn.words.errors import InvalidInputError


def test_settings_without_a_curve_are_refused() -> None:
    for config, expected in (
        (Config(workspace_budget="1MiB"), "workspace budget is valid at one batch size only; give a workspace limit"),
        (Config(workspace_limit="headroom"), "headroom limit is valid at one batch size only"),
        (Config(policy="undivided"), "measures one batch size only, which is no curve; choose power-of-two or all"),
    ):
        with pytest.raises(InvalidInputError, match=expected):
            require_sweepable(config)


def test_a_device_starves_below_the_batch_from_which_on_it_is_busy() -> None:
    for seconds, expected in (
        ({1: 10, 2: 10, 3: 10, 4: 10, 5: 10, 6: 12, 7: 14}, 4),  # 1..5 samples take the same time
        ({1: 1, 2: 2, 3: 3}, 1),
        ({1: 1, 2: 2, 3: 30, 4: 4}, 4),  # a dip
        ({8: 10, 1: 10, 4: 10, 2: 10}, 8),  # of the sizes that are known
        ({1: 1, 2: 2, 4: 40}, 5),  # above all of them
        ({1: inf, 2: 2, 4: 4}, 2),  # what cannot run
    ):
        assert starving_below(seconds) == expected
