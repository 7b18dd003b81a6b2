"""The desirable sets against brute force, their definition and closed forms."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.problems.solver_cases import Key, all_keys, key_of, key_of_cover, measured_us

from mucudnn.solver.front import desirable_sets
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.results import Measurement


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


def test_linear_costs_have_the_known_front() -> None:
    """step = 100 + b us and scratch = b bytes: ceil(n / b) steps, with the least b that needs no more of them."""
    rows = [measured_us("linear", size, 100 + size, size) for size in range(1, 25)]
    sets = desirable_sets(rows, 24)
    for n in (7, 23, 24):
        smallest_size = {-(-n // size): size for size in range(n, 0, -1)}
        expected = sorted(((100 * count + n, size) for count, size in smallest_size.items()), reverse=True)
        assert [key_of(c)[:2] for c in sets.of(n)] == expected


def test_what_cannot_be_covered_has_an_empty_front() -> None:
    sets = desirable_sets([measured_us("a", 2, 5)], 5)
    assert [sets.size(n) for n in range(1, 6)] == [0, 1, 0, 1, 0]
    assert sets.of(3) == ()
    assert sets.fastest(3) is None
    assert sets.smallest(3) is None
    assert desirable_sets([], 3).of(3) == ()


def test_setup_is_pooled_by_median_and_prepared_bytes_by_maximum() -> None:
    rows = [measured_us("a", s, 10, 1, setup_us=setup, prepared=setup) for s, setup in ((1, 3), (2, 5), (4, 100))]
    assert key_of(desirable_sets(rows, 4).of(4)[-1]) == (15, 101, 1, (("a", -4),))


def test_a_micro_config_measured_twice_is_pooled() -> None:
    rows = [measured_us("a", 1, 10, 4), measured_us("a", 1, 20, 8)]
    assert key_of(desirable_sets(rows, 1).of(1)[0])[:2] == (15, 8)


@pytest.mark.parametrize("n", [0, -1, 5])
def test_other_batch_sizes_are_refused(n: int) -> None:
    with pytest.raises(InvalidInputError, match=rf"batch size is {n}; these desirable sets cover 1 to 4"):
        desirable_sets([measured_us("a", 1, 1)], 4).of(n)
