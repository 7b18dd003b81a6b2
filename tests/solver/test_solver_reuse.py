"""Workspace reuse and desirable sets: against brute force over all covers, limits, ties, refused input."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.problems.measurements import measured

from mucudnn.core.config import BatchSizePolicy
from mucudnn.core.errors import InfeasibleError
from mucudnn.core.records import Configuration, Measurement, MicroConfig
from mucudnn.solver.front import desirable_sets
from mucudnn.solver.reuse import account_wr, micro_batch_sizes

US = 1e-6
Key = tuple[int, int, int, tuple[tuple[str, int], ...]]  # time in us, workspace, micro-batches, (name, -size) in order


def measured_us(
    name: str, size: int, step_us: int, scratch: int = 0, *, setup_us: int = 0, prepared: int = 0
) -> Measurement:
    return Measurement(MicroConfig(name, size), setup_us * US, step_us * US, prepared, scratch, relative_error=0.0)


def covers(measurements: Sequence[Measurement], n: int) -> Iterator[tuple[Measurement, ...]]:
    """All multisets whose sizes sum to n."""
    for i, measurement in enumerate(measurements):
        rest = n - measurement.micro_config.micro_batch_size
        if rest == 0:
            yield (measurement,)
        elif rest > 0:
            for cover in covers(measurements[i:], rest):
                yield measurement, *cover


def key_of_cover(cover: Sequence[Measurement]) -> Key:
    """The cost model of docs/architecture.md, in whole microseconds; then what ties are broken by."""
    algorithms = {m.micro_config.algorithm: m for m in cover}
    time_us = sum(round(m.step_s / US) for m in cover) + sum(round(m.setup_s / US) for m in algorithms.values())
    workspace = sum(m.prepared_bytes for m in algorithms.values()) + max(m.scratch_bytes for m in cover)
    order = sorted((m.micro_config.algorithm, -m.micro_config.micro_batch_size) for m in cover)
    return time_us, workspace, len(cover), tuple(order)


def key_of(configuration: Configuration) -> Key:
    order = tuple((m.algorithm, -m.micro_batch_size) for m in configuration.micro_configs)
    return round(configuration.time_s / US), configuration.workspace_bytes, len(order), order


def all_keys(measurements: Sequence[Measurement], n: int) -> list[Key]:
    return [key_of_cover(cover) for cover in covers(measurements, n)]


def random_problem(source: random.Random, algorithms: int, largest: int) -> tuple[list[Measurement], int]:
    """Return measurements of small whole numbers, so that ties and free algorithms are common, and a batch size.

    Sizes are missing, but a cover is there.
    """
    while True:
        rows = []
        for name in "abcd"[: source.randint(1, algorithms)]:
            setup_us, prepared = source.choice([0, 0, 1, 2, 5]), source.choice([0, 0, 1, 2, 3])
            for size in source.sample(range(1, largest + 1), source.randint(1, largest)):
                step_us, scratch = source.randint(0, 4 + 4 * size), source.randint(0, 6)
                rows.append(measured_us(name, size, step_us, scratch, setup_us=setup_us, prepared=prepared))
        batch_size = source.randint(1, largest + 2)
        if next(covers(rows, batch_size), None):
            return source.sample(rows, len(rows)), batch_size


# A fast algorithm that needs memory, and a slow one that needs little.
ROWS = [
    *(measured("fast", size, 1e-3 + size * 1e-3, 100 * size, setup_s=2e-3, prepared_bytes=50) for size in (1, 2, 4, 8)),
    *(measured("slow", size, size * 5e-3, 10) for size in (1, 2, 4, 8)),
]


def test_a_limit_is_inclusive_and_the_smallest_feasible_one_is_named() -> None:
    assert account_wr(ROWS, 8, 10).configuration.workspace_bytes == 10
    with pytest.raises(
        InfeasibleError, match=r"conv2 forward, batch 8: .* 9B .* smallest feasible limit is 10B .* with slow 8"
    ):
        account_wr(ROWS, 8, 9, what="conv2 forward")
    with pytest.raises(InfeasibleError) as failure:
        account_wr([measured("a", 8, 1.0, 3 * 2**20 + 1)], 8, 2**20)
    assert failure.value.smallest_feasible_bytes == 3 * 2**20 + 1
    assert "1048576B (1 MiB)" in str(failure.value)
    assert "3145729B (3 MiB)" in str(failure.value)


def test_each_point_of_the_front_is_reached_at_its_workspace_and_not_one_byte_below() -> None:
    front = desirable_sets(ROWS, 7).of(7)
    assert len(front) > 2
    for slower, configuration in pairwise(front):
        assert account_wr(ROWS, 7, configuration.workspace_bytes).configuration == configuration
        assert account_wr(ROWS, 7, configuration.workspace_bytes - 1).configuration == slower


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
    assert str(account_wr(rows, 2, None).configuration) == expected


def test_equal_algorithms_are_adjacent_with_larger_micro_batches_first() -> None:
    rows = [measured("a", 1, 3.0), measured("a", 3, 4.0), measured("b", 2, 3.5)]
    assert account_wr(rows, 6, None).configuration.micro_configs == (MicroConfig("a", 3),) * 2
    assert str(account_wr([*rows, measured("b", 4, 3.6)], 8, None).configuration) == "b 4×2"
    assert str(account_wr([*rows, measured("b", 4, 3.6)], 11, None).configuration) == "a 3 + b 4×2"
    assert str(account_wr([rows[0], rows[1]], 5, None).configuration) == "a 3 + a 1×2"


def test_a_batch_that_nothing_covers_is_infeasible_at_any_limit() -> None:
    with pytest.raises(
        InfeasibleError, match=r"measured micro-batch sizes \(2, 4\) is 3; measure size 1 or 3"
    ) as failure:
        account_wr([measured("a", 2, 1.0), measured("a", 4, 1.0)], 3, None)
    assert failure.value.smallest_feasible_bytes is None
    with pytest.raises(InfeasibleError, match="nothing was measured"):
        account_wr([], 3, None)


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


# The desirable sets against brute force, their definition and closed forms.


def brute_force(measurements: Sequence[Measurement], n: int) -> list[Key]:
    """The front by its definition: the best by time, workspace, then ties; no other is at least as good in both."""
    front: list[Key] = []
    for key in sorted(all_keys(measurements, n)):
        if not front or key[1] < front[-1][1]:
            front.append(key)
    return front[::-1]


@st.composite
def problems(draw: st.DrawFn, algorithms: int = 4, largest: int = 4) -> list[Measurement]:
    """Small whole numbers, so that ties and free algorithms are common."""
    rows = []
    for name in "abcd"[: draw(st.integers(1, algorithms))]:
        setup_us, prepared = draw(st.integers(0, 3)), draw(st.integers(0, 3))
        for size in draw(st.sets(st.integers(1, largest), min_size=1)):
            step_us, scratch = draw(st.integers(0, 12)), draw(st.integers(0, 6))
            rows.append(measured_us(name, size, step_us, scratch, setup_us=setup_us, prepared=prepared))
    return rows


@settings(deadline=None, max_examples=150)
@given(problems())
def test_every_front_is_that_of_brute_force(measurements: list[Measurement]) -> None:
    sets = desirable_sets(measurements, 5)
    for n in range(1, 6):
        assert [key_of(c) for c in sets.of(n)] == brute_force(measurements, n)


@settings(deadline=None, max_examples=50)
@given(problems(), st.none() | st.integers(0, 9))
def test_the_times_of_all_sizes_are_those_of_their_fastest_configurations(
    measurements: list[Measurement], limit: int | None
) -> None:
    sets = desirable_sets(measurements, 5)
    times_s = sets.fastest_s(limit)
    assert times_s[0] == 0
    for n in range(1, 6):
        fastest = sets.fastest(n, limit)
        assert times_s[n] == (inf if fastest is None else fastest.time_s)


def test_configurations_of_many_algorithms_are_found() -> None:
    """Each algorithm is good for one size alone and cheap to set up: 31 = 1 + 2 + 4 + 8 + 16 takes all five."""
    rows = [measured_us(f"only-{2**i}", 2**i, 10, setup_us=1, prepared=1) for i in range(5)]
    rows += [measured_us(f"only-{2**i}", 1, 1000, setup_us=1, prepared=1) for i in range(1, 5)]
    fastest = desirable_sets(rows, 31).of(31)[-1]
    assert str(fastest) == "only-1 1 + only-16 16 + only-2 2 + only-4 4 + only-8 8"
    assert key_of(fastest)[:2] == (55, 5)


@settings(deadline=None, max_examples=40)
@given(problems(largest=12), st.integers(1, 24))
def test_the_definition_holds(measurements: list[Measurement], n: int) -> None:
    front = desirable_sets(measurements, 24).of(n)
    for configuration, faster in pairwise(front):
        assert configuration.workspace_bytes < faster.workspace_bytes
        assert configuration.time_s > faster.time_s
    by_micro_config = {m.micro_config: m for m in measurements}
    for configuration in front:
        assert configuration.batch_size == n
        assert key_of_cover([by_micro_config[m] for m in configuration.micro_configs]) == key_of(configuration)


def test_setup_is_pooled_by_median_and_prepared_bytes_by_maximum() -> None:
    rows = [measured_us("a", s, 10, 1, setup_us=setup, prepared=setup) for s, setup in ((1, 3), (2, 5), (4, 100))]
    assert key_of(desirable_sets(rows, 4).of(4)[-1]) == (15, 101, 1, (("a", -4),))


def test_wr_is_the_best_of_all_covers_at_every_limit_that_matters() -> None:
    source = random.Random(1)
    for _ in range(500):
        measurements, n = random_problem(source, 4, 4)
        keys = all_keys(measurements, n)
        smallest = min(key[1] for key in keys)
        for limit in {smallest, smallest + source.choice([0, 1, 2, 4, 8]), None}:
            best = min(key for key in keys if limit is None or key[1] <= limit)
            assert key_of(account_wr(measurements, n, limit).configuration) == best
        if smallest:
            with pytest.raises(InfeasibleError) as failure:
                account_wr(measurements, n, smallest - 1)
            assert failure.value.smallest_feasible_bytes == smallest


# The paper's batch-size policies.


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
