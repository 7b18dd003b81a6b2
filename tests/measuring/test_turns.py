"""The timer against sequences of known durations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, cycle, islice, repeat
from statistics import median

import pytest
from support.clock.machine import FakeClock

from mucudnn.core.records import Comparison
from mucudnn.measuring.clocks import StoppingRule
from mucudnn.measuring.turns import RACE, Rounds, Stop, Timer, compare_in_turns, in_turns


def finish(timer: Timer) -> Timer:
    while timer.stop is None:
        timer.sample()
    return timer


def test_a_slow_function_stops_for_lack_of_time_with_one_sample() -> None:
    clock = FakeClock()
    timer = finish(Timer(lambda: clock.advance(3.0), clock, StoppingRule(time_limit_s=1.0)))
    assert timer.stop is Stop.TIME
    assert timer.samples_s == [3.0]


def test_a_sample_repeats_a_short_call_and_gives_the_time_of_one() -> None:
    calls: list[float] = []
    clock = FakeClock()
    timer = Timer(lambda: (calls.append(clock.now()), clock.advance(0.001)), clock, StoppingRule(sample_s=0.02))
    timer.sample()
    assert len(calls) == 1 + 20
    assert median(timer.samples_s) == pytest.approx(0.001)


def test_an_error_is_kept_and_ends_the_measurement() -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    timer = finish(Timer(fail, FakeClock()))
    assert timer.stop is Stop.FAILED
    assert str(timer.error) == "out of memory"
    assert not timer.samples_s


def test_turns_are_interleaved() -> None:
    clock, turns = FakeClock(), []
    rule = StoppingRule(time_limit_s=0.035, sample_s=0.0)
    timers = [Timer(lambda n=name: (turns.append(n), clock.advance(0.01)), clock, rule) for name in "abc"]
    for _ in islice(in_turns([timer.sample for timer in timers]), 5):
        pass
    rounds = [turns[:6], turns[6:9], turns[9:]]  # each of three samples, when it stops
    assert ["".join(sorted(each)) for each in rounds] == ["aabbcc", "abc", "abc"]  # a warm-up before each first sample


def test_the_order_is_drawn_anew_for_each_round_and_alike_in_each_run() -> None:
    def turns() -> str:
        turns: list[str] = []
        for results in islice(in_turns([lambda n=name: (turns.append(n), n)[1] for name in "abc"]), 12):
            assert results == ["a", "b", "c"]
        return "".join(turns)

    rounds = [turns()[i : i + 3] for i in range(0, 36, 3)]
    assert len(set(rounds)) > 3
    assert turns() == turns()


def rounds_of(run: Comparison) -> int:
    assert len(run.baseline_samples_s) == len(run.time_samples_s)
    return len(run.time_samples_s)


def compared(baseline: Iterable[float], run: Iterable[float], **limits: Rounds) -> Comparison:
    clock = FakeClock()
    bases, runs = (chain([0.1], list(durations), repeat(0.1)) for durations in (baseline, run))
    (result,) = compare_in_turns(
        lambda: clock.advance(next(bases)), [lambda: clock.advance(next(runs))], clock, **limits
    )
    assert isinstance(result, Comparison)
    return result


def test_in_a_quick_comparison_short_calls_are_warmed_up_and_need_more_rounds_than_long_ones() -> None:
    def of_calls(seconds: float) -> Comparison:
        clock = FakeClock()
        bases = chain([9 * seconds], repeat(2 * seconds))  # torch's first call builds what later ones find
        (result,) = compare_in_turns(
            lambda: clock.advance(next(bases)), [lambda: clock.advance(seconds)], clock, rounds=RACE
        )
        assert isinstance(result, Comparison)
        return result

    short, long = of_calls(0.001), of_calls(0.1)
    assert (rounds_of(short), rounds_of(long)) == (3, 2)
    assert (short.speedup, max(long.speedups)) == (pytest.approx(2.0), pytest.approx(9.0))


def raced(baseline_s: float, *run_s: Sequence[float]) -> list[Comparison]:
    """Race runs, each with its seconds in round after round; all count, since they are long."""
    clock = FakeClock()
    seconds = [cycle(of_run) for of_run in run_s]
    runs = [lambda of=of: clock.advance(next(of)) for of in seconds]
    results = compare_in_turns(lambda: clock.advance(baseline_s), runs, clock, replace(RACE, time_limit_s=100.0))
    return [result for result in results if isinstance(result, Comparison)]


@pytest.mark.parametrize(
    ("speedups", "rounds"),
    [
        ([1.12], 3),
        ([0.97], 3),  # slower in each of three
        ([1.06], 5),
        ([1.02, 0.97, 1.04], 5),  # what is even, nobody has to know better
        ([1.12, 0.94, 1.06], 9),
    ],
)
def test_a_race_takes_fewer_rounds_the_clearer_it_is(speedups: list[float], rounds: int) -> None:
    (result,) = raced(1.0, [1 / speedup for speedup in speedups])
    assert rounds_of(result) == rounds


@pytest.mark.parametrize(
    ("second_s", "rounds"),
    [
        ([0.99], 2),
        ([0.98], 5),  # less than 4 % behind
        ([0.99, 0.98], 5),  # in the first round alone
        ([0.98, 0.99], 5),
    ],
)
def test_a_run_that_is_behind_in_each_of_two_rounds_leaves_the_race(second_s: list[float], rounds: int) -> None:
    first, second = raced(1.0, [0.945], second_s)
    assert (rounds_of(first), rounds_of(second)) == (5, rounds)


def test_a_slow_minute_of_the_machine_cancels() -> None:
    minute = [1.0, 1.0, 3.0, 3.0, 3.0, 1.0]
    bases, runs = ([seconds * factor for factor in minute] for seconds in (0.2, 0.1))
    result = compared(bases, runs, rounds=Rounds(5, 25, 1.5))
    assert result.speedup == pytest.approx(2.0)
    assert result.noise == pytest.approx(0.0, abs=1e-9)


def test_a_run_that_fails_gives_its_error_and_a_failing_baseline_raises() -> None:
    clock = FakeClock()

    def fail() -> None:
        raise RuntimeError("no memory")

    (result,) = compare_in_turns(lambda: clock.advance(0.1), [fail], clock)
    assert isinstance(result, RuntimeError)
    with pytest.raises(RuntimeError, match="no memory"):
        compare_in_turns(fail, [lambda: clock.advance(0.1)], clock)
