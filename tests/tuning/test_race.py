"""The race: what it looks at, what it passes over, and that it finds nearly the best."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.clock.machine import FORWARD, FakeAlgorithm, FakeClock, linear
from support.races import CLOCK, SIZES, fake, race_of, race_on, results_of, standings_of

from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Failure, FailureKind, Measurement, MicroConfig
from mucudnn.measuring.candidates import Candidate, Proofs, find_candidates
from mucudnn.measuring.proofs import BarredError, Fault, Proof
from mucudnn.solver.reuse import account_wr
from mucudnn.tuning.prior import Prior

LARGEST = max(SIZES)
NEAR = [ConvProblem(Operation.FORWARD, c=c, h=3, w=3, k=2, r=1, s=1) for c in (3, 4)]


def measurement(name: str, step_s: float) -> Measurement:
    return Measurement(MicroConfig(name, 1), 0.0, step_s, 0, 0, 0.0)


def test_the_best_is_measured_at_all_sizes_and_the_others_at_their_largest() -> None:
    results = results_of(fake("native", 0.02), fake("best", 0.01), fake("slow", 0.05))
    assert {size for name, size in results if name == "best"} == set(SIZES)
    assert {size for name, size in results if name == "native"} == {LARGEST}
    assert {size for name, size in results if name == "slow"} == {1}  # this part tells that it is hopeless
    best = results["best", LARGEST]
    assert isinstance(best, Measurement)
    assert best.step_s == pytest.approx(0.08)


def test_what_is_hopeless_has_one_sample_and_what_is_close_has_more() -> None:
    results = results_of(fake("native", 0.02), fake("best", 0.01), fake("close", 0.0105))
    samples = {name: r.samples for (name, size), r in results.items() if size == LARGEST}
    assert samples == {"native": 1, "best": 2, "close": 2}


class LastResort(FakeAlgorithm):
    """Needs no workspace, and is the slowest; or the fastest, which nobody asks."""

    @property
    def is_last_resort(self) -> bool:
        return True


def test_a_last_resort_is_looked_at_where_nothing_else_fits_and_on_a_small_part_for_a_budget() -> None:
    def sizes_of_resort(per_sample_s: float, every_size: bool = False, **bounds: object) -> set[int]:
        algorithms = [fake("native", 0.02, scratch_bytes_per_sample=10), fake("other", scratch_bytes_per_sample=10)]
        resort = LastResort("resort", CLOCK, lambda size: per_sample_s * size)
        results = [*race_of(*algorithms, resort, every_size=every_size, **bounds).measure()]
        assert standings_of(*algorithms, resort, stored=results, every_size=every_size, **bounds).is_complete()
        return {r.micro_config.micro_batch_size for r in results if r.micro_config.algorithm == "resort"}

    for per_sample_s in (0.001, 0.5):
        assert sizes_of_resort(per_sample_s) == set()
        assert sizes_of_resort(per_sample_s, limit_bytes=20) == set()
        assert sizes_of_resort(per_sample_s, limit_bytes=5, baseline_exempt=True) == set()
        assert sizes_of_resort(per_sample_s, limit_bytes=5) == set(SIZES)
        assert sizes_of_resort(per_sample_s, every_size=True, limit_bytes=200) == {1}


def test_for_a_budget_torchs_own_is_measured_at_every_size_too() -> None:
    results = results_of(fake("native", 0.01), fake("other", 0.0105), every_size=True)
    assert set(results) == {(name, size) for name in ("native", "other") for size in SIZES}


def test_for_a_budget_all_sizes_are_measured_of_what_is_fastest_in_its_workspace() -> None:
    """Like problems, its arithmetic and a small part say that it is hopeless: beside what needs more workspace."""
    prior = Prior()
    for problem in NEAR:
        prior.learn(problem, [measurement("large", 0.01), measurement("small", 0.03), measurement("dominated", 0.06)])
    algorithms = [
        fake("native", 0.09),
        fake("large", 0.01, scratch_bytes_per_sample=10),
        Counted("small", CLOCK, lambda size: 0.03 * size, scratch_bytes_per_sample=2),
        fake("dominated", 0.06, scratch_bytes_per_sample=3),
        fake("part", 0.07, scratch_bytes_per_sample=1),
    ]
    found = results_of(*algorithms, limit_bytes=200, prior=prior, every_size=True, flops_per_s=lambda: 0.5e8)
    results = {key for key, result in found.items() if isinstance(result, Measurement)}
    front = {(name, size) for name in ("native", "large", "small", "part") for size in SIZES}
    assert results == front
    assert isinstance(found["dominated", LARGEST], Failure)
    limited = results_of(*algorithms, limit_bytes=200, prior=prior, flops_per_s=lambda: 0.5e8)
    measured = {name for (name, _), result in limited.items() if isinstance(result, Measurement)}
    assert measured == {"native", "large", "part"}


def drawn(rng: random.Random, names: str, most_s: float, steps_s: Sequence[float], **costs: Any) -> list[FakeAlgorithm]:
    """Draw algorithms whose costs are linear in the size, with a share for each step; torch's own needs no scratch."""
    found = []
    for name in names.split():
        step_s = linear(rng.uniform(0.005, most_s), rng.choice(steps_s))
        found.append(FakeAlgorithm(name, CLOCK, step_s, **{cost: rng.choice(values) for cost, values in costs.items()}))
    found[0].scratch_bytes_per_sample = 0
    return found


def every_measurement(*algorithms: FakeAlgorithm, **bounds: object) -> list[Measurement]:
    """Measure each algorithm in a race of its own, in which nothing is hopeless beside others."""
    return [m for one in algorithms for m in measurements_of(race_of(one, every_size=True, **bounds).measure())]


def test_for_a_budget_choices_are_nearly_those_from_all_measurements_within_any_share() -> None:
    """Whatever share of the budget is left, the times differ by at most 10 %."""
    for seed in range(40):
        costs = {"scratch_bytes_per_sample": [0, 1, 3, 10]}
        algorithms = drawn(random.Random(seed), "native one two three four", 0.04, [0.0, 0.001], **costs)
        every = every_measurement(*algorithms, limit_bytes=100)
        quick = measurements_of(results_of(*algorithms, limit_bytes=100, every_size=True).values())
        for share in (0, 4, 8, 16, 24, 40, 80, 100):
            best, chosen = (account_wr(measured, LARGEST, share).configuration.time_s for measured in (every, quick))
            assert chosen <= 1.1 * best, seed


def test_choices_are_nearly_those_from_all_measurements() -> None:
    """The chosen times differ by at most 3 %."""
    for seed in range(40):
        rng = random.Random(seed)
        limit = rng.choice([None, 100, 40])
        costs = {"setup_s": [0.0, 0.01], "scratch_bytes_per_sample": [0, 1, 10]}
        algorithms = drawn(rng, "native one two three", 0.02, [0.0, 0.001, 0.01], **costs)
        every = every_measurement(*algorithms, limit_bytes=limit)
        quick = measurements_of(results_of(*algorithms, limit_bytes=limit).values())
        best, found = (account_wr(measured, LARGEST, limit).configuration.time_s for measured in (every, quick))
        assert found <= 1.03 * best, seed


def measurements_of(results: Iterable[Measurement | Failure]) -> list[Measurement]:
    return [r for r in results if isinstance(r, Measurement)]


def test_an_algorithm_is_looked_at_with_the_largest_micro_batch_that_fits() -> None:
    slow = fake("slow", 0.02, scratch_bytes_per_sample=10)
    results = results_of(fake("native", 0.01), slow, limit_bytes=20)
    assert {size for name, size in results if name == "slow"} == {2}
    assert set(slow.internals_asked) <= {1, 2}  # 1 is the part that is compared with float64


def test_torchs_own_that_takes_fresh_pages_is_looked_at_divided_too() -> None:
    """malloc clears memory for each call from 32 MiB up, so that halves can take less than half as long."""

    def torchs(step_s: Callable[[int], float]) -> dict[int, Measurement | Failure]:
        native = FakeAlgorithm("native", CLOCK, step_s, internal_bytes_per_sample=4 * 2**20)
        results = results_of(native, fake("other", 0.03))
        return {size: r for (name, size), r in results.items() if name == "native"}

    assert set(torchs(lambda n: 0.001 + 0.02 * n)) == {4, LARGEST}
    assert set(torchs(lambda n: 0.02 * n if n > 4 else 0.01 * n)) == set(SIZES)


def test_foreign_code_that_failed_is_not_tried_at_another_size() -> None:
    foreign = fake("library:7", 0.01, failing_sizes=[8])
    results = results_of(fake("native", 0.02), foreign)
    assert {size for name, size in results if name == "library:7"} == {8}
    assert set(foreign.sizes_run) == {8}


class Slow:
    """A prover whose candidates took so long that they were barred, or that they cannot win."""

    def __init__(self, verdict: Proof | Exception) -> None:
        self.verdict, self.asked = verdict, list[MicroConfig]()

    def prove(self, candidates: Sequence[Candidate], **_: object) -> list[Proof | Exception]:
        self.asked += [candidate.micro_config for candidate in candidates]
        return [self.verdict for _ in candidates]


@pytest.mark.parametrize("limit_bytes", [None, 1000])
@pytest.mark.parametrize("verdict", [BarredError("too slow", Fault.SLOW, 4.0), Proof(1e-7, 0, 0.4)])
def test_foreign_code_that_was_slow_when_it_was_proven_never_runs_here(
    verdict: BarredError | Proof, limit_bytes: int | None
) -> None:
    foreign, prover = fake("library/own"), Slow(verdict)
    race = race_of(fake("native", 0.02), fake("best", 0.01), foreign, limit_bytes=limit_bytes)
    proofs = Proofs(prover.prove, LARGEST)
    candidates = race.standings.candidates
    race.standings.candidates = [replace(c, proofs=proofs) if c.algorithm is foreign else c for c in candidates]
    (result,) = (result for result in race.measure() if result.micro_config.algorithm == "library/own")
    assert prover.asked == [result.micro_config] == [MicroConfig("library/own", LARGEST)]
    assert not foreign.sizes_run
    if isinstance(result, Failure):
        assert (result.is_lasting, result.least_s) == (True, 4.0)
    else:
        assert (result.step_s, result.relative_error) == (0.4, 1e-7)


def test_what_like_problems_say_is_hopeless_is_passed_over_with_the_reason() -> None:
    prior = Prior()
    for problem in NEAR:
        prior.learn(problem, [measurement("best", 0.01), measurement("slow", 0.03)])
    slow = fake("slow", 0.05)
    results = results_of(fake("native", 0.02), fake("best", 0.01), slow, prior=prior)
    passed = results["slow", LARGEST]
    assert isinstance(passed, Failure)
    assert passed.is_passed_over
    assert passed.reason == "3.0 times the fastest in like problems"
    assert not slow.sizes_run


def test_a_part_that_is_hopeless_is_all_that_runs_of_an_algorithm() -> None:
    slow, close = fake("slow", 0.03), fake("close", 0.02)
    results = results_of(fake("native", 0.02), fake("best", 0.01), slow, close)
    assert {size for name, size in results if name == "slow"} == {1}
    assert set(slow.sizes_run) == {1}
    assert {size for name, size in results if name == "close"} == {LARGEST}
    alone = fake("slow", 0.03)
    assert ("slow", LARGEST) in results_of(fake("native", 0.02), alone)  # 1.5 times the fastest: it stays


class Counted(FakeAlgorithm):
    """Needs a million operations a sample."""

    def least_flops(self, problem: ConvProblem, micro_batch_size: int) -> int:
        return 10**6 * micro_batch_size


def test_when_time_is_up_only_torchs_own_is_measured_and_the_rest_is_missing() -> None:
    results = results_of(fake("native", 0.02), fake("best", 0.01), time_limit_s=0.0)
    assert set(results) == {("native", LARGEST)}
    left = standings_of(fake("native"), fake("best"), stored=[*results.values()]).missing()
    assert [c.micro_config for c in left] == [MicroConfig("best", LARGEST)]


def test_what_had_to_run_to_know_that_it_does_not_fit_need_not_run_again() -> None:
    def algorithms() -> list[FakeAlgorithm]:
        return [fake("native", 0.01), fake("hungry", 0.03, internal_bytes_per_sample=10)]

    found = results_of(*algorithms(), limit_bytes=20)
    assert found["hungry", 8] == Failure(
        MicroConfig("hungry", 8), "needs 80 bytes of workspace", FailureKind.TOO_LARGE, 80
    )
    stored = [*found.values()]
    again = algorithms()
    assert standings_of(*again, stored=stored, limit_bytes=20).is_complete()
    assert not again[1].internals_asked
    more = results_of(*algorithms(), stored=stored, limit_bytes=40)
    assert not {size for name, size in more if name == "hungry"}  # it was hopeless at another size
    torchs = [r for r in stored if r.micro_config.algorithm == "native" or isinstance(r, Failure)]
    assert set(results_of(*algorithms(), stored=torchs, limit_bytes=40)) == {("hungry", 4)}


def test_measures_the_known_costs() -> None:
    one = FakeAlgorithm(
        "one", CLOCK, linear(0.01, 0.002), setup_s=0.5, prepared_bytes=3, scratch_bytes_per_sample=5, error=1e-3
    )
    result = results_of(one)["one", 4]
    assert isinstance(result, Measurement)
    assert (result.setup_s, result.step_s) == (pytest.approx(0.5), pytest.approx(0.042))
    assert (result.prepared_bytes, result.scratch_bytes, result.samples) == (3, 20, 2)
    assert result.relative_error == pytest.approx(1e-3, rel=1e-2)


def test_a_candidate_that_fails_is_recorded_and_the_others_go_on() -> None:
    results = results_of(fake("one", failing_sizes=[4]), fake("other"))
    assert results["one", 4] == Failure(results["one", 4].micro_config, "out of memory at 4")
    assert isinstance(results["one", 2], Measurement)
    assert isinstance(results["other", 8], Measurement)


def test_a_workspace_that_no_memory_can_hold_is_a_failure() -> None:
    result = results_of(fake("huge", prepared_bytes=2**60))["huge", 1]
    assert isinstance(result, Failure)
    assert "available" in result.reason


def test_an_algorithm_above_the_error_bound_is_measured_once_with_one_sample() -> None:
    results = results_of(fake("wrong", 0.001, error=1e-2), fake("right"), max_relative_error=1e-5)
    wrong = results["wrong", 1]
    assert isinstance(wrong, Measurement)
    assert (wrong.samples, wrong.relative_error > 1e-5) == (1, True)
    assert {size for name, size in results if name == "wrong"} == {1}


def test_nothing_is_measured_twice() -> None:
    algorithms = [
        fake("fast", 0.01),
        fake("slow", 0.04, scratch_bytes_per_sample=1),
        fake("failing", failing_sizes=[2]),
    ]
    again = standings_of(*algorithms, stored=[*race_of(*algorithms).measure()])
    assert again.missing() == []
    assert again.is_complete()


def test_what_is_allocated_inside_counts_with_the_scratch_that_is_handed_in() -> None:
    one = fake("one", prepared_bytes=3, scratch_bytes_per_sample=5, internal_bytes_per_sample=2)
    results = results_of(one, limit_bytes=31)
    assert measured_sizes(results) == {1, 2, 4}
    result = results["one", 4]
    assert isinstance(result, Measurement)
    assert (result.prepared_bytes, result.scratch_bytes) == (3, 28)
    assert measured_sizes(results_of(one, limit_bytes=30)) == {1, 2}


def measured_sizes(results: Mapping[tuple[str, int], Measurement | Failure]) -> set[int]:
    return {size for (_, size), result in results.items() if isinstance(result, Measurement)}


def test_nothing_is_run_to_count_bytes_of_what_is_over_the_limit_by_those_handed_in() -> None:
    one = fake("one", scratch_bytes_per_sample=10, internal_bytes_per_sample=1)
    results_of(one, limit_bytes=22)
    assert set(one.internals_asked) == {1, 2}


def test_what_stored_micro_configs_allocate_inside_is_not_counted_again() -> None:
    one = fake("one", scratch_bytes_per_sample=4, internal_bytes_per_sample=3)
    known = [r for r in race_of(one).measure() if isinstance(r, Measurement)]
    one.internals_asked.clear()
    assert [c.count_workspace_bytes() for c in standings_of(one, stored=known).candidates] == [7, 14, 28, 56]
    assert not one.internals_asked


@pytest.mark.parametrize("may_keep", [False, True])
def test_what_may_be_kept_counts_neither_against_the_limit_nor_in_the_race(may_keep: bool) -> None:
    costly = fake("costly", 0.01, setup_s=5.0, prepared_bytes=1000)
    results = results_of(fake("native", 0.02), costly, limit_bytes=100 if may_keep else None, may_keep=may_keep)
    assert {size for name, size in results if name == "costly"} == (set(SIZES) if may_keep else {1})
    assert not any(name == "costly" for name, _ in results_of(fake("native"), costly, limit_bytes=100))


def test_when_time_is_up_one_that_fits_is_still_measured() -> None:
    native = fake("native", scratch_bytes_per_sample=1000)
    results = results_of(native, fake("late"), fake("later"), limit_bytes=10, time_limit_s=0.0)
    assert [name for name, _ in results if name != "native"] == ["late"]


def test_a_pass_is_over_all_slices() -> None:
    passes: set[int] = set()

    class Noting(FakeClock):
        def time(self, function: Callable[[], object], calls: int, calls_per_pass: int = 1) -> float:
            passes.add(calls_per_pass)
            return super().time(function, calls, calls_per_pass)

    clock = Noting()
    candidates, _ = find_candidates(FORWARD, [FakeAlgorithm("one", clock, linear(0.02))], SIZES)
    list(race_on(FORWARD, max(SIZES), candidates, clock).measure())
    assert passes == {8, 4, 2, 1}


def test_after_the_time_limit_nothing_is_counted_if_there_is_an_answer() -> None:
    def asked(seconds: float) -> list[int]:
        native, late = fake("native"), fake("late", internal_bytes_per_sample=1)
        (stored, *_) = race_of(native).measure()
        race = race_of(native, late, stored=[stored], limit_bytes=100, time_limit_s=1.0)
        CLOCK.advance(seconds)
        list(race.measure())
        return late.internals_asked

    assert asked(0.0)
    assert not asked(2.0)
