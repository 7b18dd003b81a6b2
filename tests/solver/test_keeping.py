"""What a step keeps within a budget: the choices of the least time, beside all choices there are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from mucudnn.core.errors import InvalidInputError
from mucudnn.solver import keeping
from mucudnn.solver.keeping import Choice, Value, least_memory, least_time, peak_bytes


def random_values(seed: int) -> list[Value]:
    drawn = random.Random(seed)
    values = []
    for index in range(drawn.randint(2, 7)):
        reads = {index - 1} if index else set()
        if index > 1 and drawn.random() < 0.4:
            reads.add(drawn.randrange(index))
        values.append(
            Value(
                size_bytes=drawn.randint(1, 9),
                time_s=float(drawn.randint(1, 9)),
                reads=tuple(sorted(reads)),
                is_used=drawn.random() < 0.8,
                backward_bytes=drawn.randint(0, 9),
                forward_bytes=drawn.randint(0, 9),
                computing_bytes=drawn.randint(0, 15),
                may_be_dropped=drawn.random() < 0.9,
            )
        )
    return values


def time_of(values: Sequence[Value], choices: Sequence[Choice]) -> float | None:
    """Return the seconds of what is computed again; None if a value of each time is computed from another one."""
    time_s = 0.0
    for value, choice in zip(values, choices, strict=True):
        if choice is Choice.KEPT:
            continue
        time_s += value.time_s * (choice is Choice.ONCE or value.is_used)
        for read in value.reads:
            if choices[read] is Choice.EACH_TIME:
                if choice is Choice.EACH_TIME:
                    return None
                time_s += values[read].time_s
    return time_s


def best_of_all(values: Sequence[Value], budget_bytes: int) -> float | None:
    times = []
    for choices in itertools.product(Choice, repeat=len(values)):
        is_allowed = all(
            value.may_be_dropped or choice is Choice.KEPT for value, choice in zip(values, choices, strict=True)
        )
        time_s = time_of(values, choices) if is_allowed else None
        if time_s is not None and peak_bytes(values, choices) <= budget_bytes:
            times.append(time_s)
    return min(times, default=None)


def test_the_choices_take_the_least_time_of_all_within_the_budget() -> None:
    for seed in range(40):
        values = random_values(seed)
        all_bytes = peak_bytes(values, [Choice.KEPT] * len(values))
        for share in (1, 0.8, 0.6, 0.45):
            budget_bytes = int(all_bytes * share)
            made, best_s = least_time(values, budget_bytes), best_of_all(values, budget_bytes)
            assert (made and made.time_s) == best_s, (seed, share)
            assert made is None or (made.proven and made.peak_bytes <= budget_bytes)
            assert made is None or time_of(values, made.choices) == made.time_s


def test_many_states_are_thinned_out_and_stay_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "FEW", 0)
    for seed in range(40):
        values = random_values(seed)
        budget_bytes = int(peak_bytes(values, [Choice.KEPT] * len(values)) * 0.7)
        made, best_s = least_time(values, budget_bytes, 4), best_of_all(values, budget_bytes)
        if made is not None:
            assert best_s is not None
            assert made.peak_bytes <= budget_bytes
            assert made.time_s == best_s if made.proven else made.time_s >= best_s


def test_the_least_memory_is_the_least_within_which_there_are_choices() -> None:
    for seed in range(40):
        values = random_values(seed)
        least = least_memory(values, 200)
        assert best_of_all(values, least.peak_bytes) == least.time_s
        assert best_of_all(values, least.peak_bytes - 1) is None


def test_a_value_may_read_earlier_values_only() -> None:
    with pytest.raises(InvalidInputError, match="value 0 reads"):
        least_time([Value(1, 1.0, (0,))], 10)


def test_more_values_read_later_than_states_have_room_for_are_kept() -> None:
    star = [Value(1, 1.0) for _ in range(40)] + [Value(1, 1.0, tuple(range(40)))]
    made = least_time(star, 100)
    assert made is not None
    assert (made.time_s, made.proven) == (0, False)
    assert least_time(star, 8) is None
