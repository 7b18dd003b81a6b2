"""Workspace reuse: limits, ties, monotonicity, refused input, and the account."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from support.problems.measurements import measured

from mucudnn.solver.front import desirable_sets
from mucudnn.solver.reuse import account_wr, solve_wr
from mucudnn.words.errors import InfeasibleError, InvalidInputError
from mucudnn.words.results import Measurement, MicroConfig

# A fast algorithm that needs memory, and a slow one that needs little.
ROWS = [
    *(measured("fast", size, 1e-3 + size * 1e-3, 100 * size, setup_s=2e-3, prepared_bytes=50) for size in (1, 2, 4, 8)),
    *(measured("slow", size, size * 5e-3, 10) for size in (1, 2, 4, 8)),
]


def test_a_limit_is_inclusive_and_the_smallest_feasible_one_is_named() -> None:
    assert solve_wr(ROWS, 8, 10).workspace_bytes == 10
    with pytest.raises(
        InfeasibleError, match=r"conv2 forward, batch 8: .* 9B .* smallest feasible limit is 10B .* with slow 8"
    ):
        solve_wr(ROWS, 8, 9, what="conv2 forward")
    with pytest.raises(InfeasibleError) as failure:
        solve_wr([measured("a", 8, 1.0, 3 * 2**20 + 1)], 8, 2**20)
    assert failure.value.smallest_feasible_bytes == 3 * 2**20 + 1
    assert "1048576B (1 MiB)" in str(failure.value)
    assert "3145729B (3 MiB)" in str(failure.value)


def test_each_point_of_the_front_is_reached_at_its_workspace_and_not_one_byte_below() -> None:
    front = desirable_sets(ROWS, 7).of(7)
    assert len(front) > 2
    for slower, configuration in pairwise(front):
        assert solve_wr(ROWS, 7, configuration.workspace_bytes) == configuration
        assert solve_wr(ROWS, 7, configuration.workspace_bytes - 1) == slower


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([measured("a", 2, 1e-3, 9), measured("b", 2, 1e-3, 8)], "b 2"),  # less workspace
        ([measured("a", 1, 1e-3), measured("b", 2, 2e-3)], "b 2"),  # then fewer micro-batches
        ([measured("b", 2, 2e-3), measured("a", 2, 2e-3)], "a 2"),  # then name
        ([measured("a", size, size * 0.1) for size in (1, 2)], "a 2"),  # 0.1 + 0.1 is 0.2 here
        # Paid for and free tie in time and bytes: fewer micro-batches, though in a larger set of algorithms.
        ([measured("a", 1, 2e-3), measured("b", 2, 3e-3, setup_s=1e-3)], "b 2"),
    ],
)
def test_ties(rows: list[Measurement], expected: str) -> None:
    assert str(solve_wr(rows, 2, None)) == expected


def test_equal_algorithms_are_adjacent_with_larger_micro_batches_first() -> None:
    rows = [measured("a", 1, 3.0), measured("a", 3, 4.0), measured("b", 2, 3.5)]
    assert solve_wr(rows, 6, None).micro_configs == (MicroConfig("a", 3),) * 2
    assert str(solve_wr([*rows, measured("b", 4, 3.6)], 8, None)) == "b 4×2"
    assert str(solve_wr([*rows, measured("b", 4, 3.6)], 11, None)) == "a 3 + b 4×2"
    assert str(solve_wr([rows[0], rows[1]], 5, None)) == "a 3 + a 1×2"


@pytest.mark.parametrize("field", ["setup_s", "step_s", "prepared_bytes", "scratch_bytes"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_measurements_that_cannot_be_are_named_and_refused(field: str, value: float) -> None:
    change: dict[str, Any] = {field: value}
    broken = replace(ROWS[0], **change)
    with pytest.raises(InvalidInputError, match=rf"measurement of fast 1: {field} is {value}"):
        solve_wr([*ROWS[1:], broken], 8, None)


def test_sizes_and_limits_that_cannot_be_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="batch_size is 0"):
        solve_wr(ROWS, 0, None)
    with pytest.raises(InvalidInputError, match="limit is -1 bytes"):
        solve_wr(ROWS, 8, -1)
    with pytest.raises(InvalidInputError, match="micro_batch_size is 0; it must be at least 1"):
        solve_wr([measured("a", 0, 1.0)], 8, None)


def test_a_batch_that_nothing_covers_is_infeasible_at_any_limit() -> None:
    with pytest.raises(
        InfeasibleError, match=r"measured micro-batch sizes \(2, 4\) is 3; measure size 1 or 3"
    ) as failure:
        solve_wr([measured("a", 2, 1.0), measured("a", 4, 1.0)], 3, None)
    assert failure.value.smallest_feasible_bytes is None
    with pytest.raises(InfeasibleError, match="nothing was measured"):
        solve_wr([], 3, None)


def test_the_account_tells_how_it_was_chosen() -> None:
    account = account_wr(ROWS, 8, 250, what="conv2 forward")
    assert str(account).startswith(
        "conv2 forward, batch 8: fast 2×4, 14 ms in 250 B (limit 250 B, smallest feasible 10 B), optimal; "
        "5 desirable configurations from 8 measurements, "
    )
    told = json.loads(json.dumps(account.to_json()))
    assert told["configuration"] == "fast 2×4"
    assert told["objective_s"] == told["bound_s"] == pytest.approx(14e-3)
    assert (told["gap"], told["status"]) == (0, "optimal")
    assert told["solve_time_s"] > 0
    assert (told["limit_bytes"], told["smallest_feasible_bytes"], told["workspace_bytes"]) == (250, 10, 250)
