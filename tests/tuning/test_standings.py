"""The table of a race: who leads, what is out, which sizes are next, what fits, and what is to be counted.

No machine, no clock: the table is made of values, and an algorithm that it ran would fail.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Failure, FailureKind, Measurement, MicroConfig, Task
from mucudnn.kernels.algorithm import BaseAlgorithm, Workspace
from mucudnn.measuring.candidates import Candidate, find_candidates
from mucudnn.tuning.prior import Prior
from mucudnn.tuning.standings import Standings, failures_within

BATCH, SIZES = 8, (1, 2, 4, 8)
PROBLEM = ConvProblem(Operation.FORWARD, c=2, h=3, w=3, k=2, r=1, s=1)
NEAR = [replace(PROBLEM, c=c) for c in (3, 4)]


@dataclass(frozen=True)
class Declared(BaseAlgorithm):
    """An algorithm that only declares, for each sample, its scratch and FLOPs."""

    name: str
    scratch: int = 0
    prepared: int = 0
    flops: int = 0
    is_resort: bool = False
    runs_elsewhere: bool = False
    version: int = 1

    @property
    def is_torchs_own(self) -> bool:
        return self.name == "native"

    @property
    def is_last_resort(self) -> bool:
        return self.is_resort

    def is_foreign(self, problem: ConvProblem) -> bool:
        return self.runs_elsewhere

    def supports(self, problem: ConvProblem) -> None:
        return None

    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        return Workspace(self.prepared, self.scratch * micro_batch_size)

    def least_flops(self, problem: ConvProblem, micro_batch_size: int) -> int:
        return self.flops * micro_batch_size

    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        raise AssertionError("the table counts nothing")

    def step(self, *operands: Any) -> None:
        raise AssertionError("the table runs nothing")


class CountedInRuns(Declared):
    """Whose bytes only a run shows."""

    internal_bytes = BaseAlgorithm.internal_bytes


class Offered(Declared):
    """By a source, which declares all bytes."""

    source = "library"


TORCHS, OTHER = Declared("native"), Declared("other")


def measured(name: str, size: int, step_s: float, scratch: int = 0, **changes: Any) -> Measurement:
    return Measurement(MicroConfig(name, size), 0.0, step_s, 0, scratch, **{"relative_error": 0.0, **changes})


def table(
    *algorithms: Declared,
    known: tuple[Measurement, ...] = (),
    failed: tuple[Failure, ...] = (),
    limit: int | None = None,
    exempt: bool = False,
    counted: dict[tuple[str, int], int | None] | None = None,
    **settings: Any,
) -> Standings:
    candidates, _ = find_candidates(PROBLEM, algorithms, SIZES)
    return Standings(
        task=Task(PROBLEM, BATCH, limit, baseline_exempt=exempt),
        candidates=candidates,
        known={m.micro_config: m for m in known},
        failed=failures_within(failed, limit),
        counted={MicroConfig(*pair): size for pair, size in (counted or {}).items()},
        **settings,
    )


def names(candidates: list[Candidate]) -> list[tuple[str, int]]:
    return [(c.algorithm.name, c.micro_batch_size) for c in candidates]


def candidate(standings: Standings, name: str, size: int = BATCH) -> Candidate:
    return next(c for c in standings.candidates if c.micro_config == MicroConfig(name, size))


def prior_of(**seconds: float) -> Prior:
    prior = Prior()
    for problem in NEAR:
        prior.learn(problem, [measured(name, 1, step_s) for name, step_s in seconds.items()])
    return prior


# Who leads


def test_torchs_own_leads_undivided_then_what_was_fast_then_few_flops_and_last_resorts() -> None:
    algorithms = [
        Declared("resort", is_resort=True),
        Declared("many", flops=2),
        Declared("few", flops=1),
        Declared("known"),
        TORCHS,
    ]
    standings = table(*algorithms, prior=prior_of(known=0.01, missing=0.01))
    assert [name for name, _ in names(standings.leads())] == ["native", "known", "few", "many", "resort"]
    assert {size for _, size in names(standings.leads())} == {BATCH}


@pytest.mark.parametrize(("limit", "size"), [(80, 8), (79, 4), (39, 2), (19, 1)])
def test_the_largest_size_that_fits_leads(limit: int, size: int) -> None:
    standings = table(TORCHS, Declared("other", scratch=10), limit=limit)
    assert names(standings.leads()) == [("native", 8), ("other", size)]
    assert names(table(Declared("other", scratch=10), limit=9).leads()) == []


def test_what_was_counted_or_measured_fits_by_that() -> None:
    counted = {("other", 8): 50, ("other", 4): None, ("other", 2): 13}
    standings = table(TORCHS, OTHER, limit=49, counted=counted)
    assert [standings.fits(candidate(standings, "other", size)) for size in SIZES] == [True, True, False, False]
    assert names(standings.leads())[1:] == [("other", 2)]
    standings.known[MicroConfig("other", 8)] = measured("other", 8, 0.1, scratch=49)
    assert standings.fits(candidate(standings, "other"))
    offered = table(Offered("library:7"), limit=49, counted={("library:7", 8): None})
    assert offered.fits(candidate(offered, "library:7"))


@pytest.mark.parametrize("may_keep", [False, True])
def test_what_may_be_kept_does_not_count(may_keep: bool) -> None:
    standings = table(Declared("other", prepared=1000), limit=100, may_keep=may_keep)
    assert standings.fits(candidate(standings, "other")) is may_keep


def test_torchs_own_is_divided_only_if_it_does_not_fit_or_takes_fresh_pages() -> None:
    own = Declared("native", scratch=10)
    assert names(table(own, limit=20).leads()) == [("native", 8), ("native", 2)]
    assert names(table(own, limit=20, exempt=True).leads()) == [("native", 8)]
    for scratch, leads in ((2**25 - 1, [8]), (2**25, [8, 4])):
        assert [size for _, size in names(table(TORCHS, counted={("native", 8): scratch}).leads())] == leads


def test_after_a_failure_the_next_smaller_size_leads_but_not_of_foreign_code() -> None:
    failed = Failure(MicroConfig("other", 8), "it is wrong")
    assert names(table(OTHER, failed=(failed,)).unseen()) == [("other", 4)]
    foreign = Declared("other", runs_elsewhere=True)
    assert names(table(foreign, failed=(failed,)).unseen()) == []
    assert names(table(foreign, failed=(failed,), limit=100, counted={("other", 8): None}).unseen()) == []
    transient = replace(failed, kind=FailureKind.OUT_OF_MEMORY)
    assert names(table(foreign, failed=(transient,)).unseen()) == [("other", 4)]


def test_what_was_too_large_for_a_smaller_limit_leads_again() -> None:
    too_large = Failure(MicroConfig("other", 8), "", FailureKind.TOO_LARGE, needed_bytes=80)
    assert names(table(OTHER, limit=79, failed=(too_large,)).unseen()) == [("other", 4)]
    assert names(table(OTHER, limit=80, failed=(too_large,)).unseen()) == [("other", 8)]


# What is out


def test_what_was_slow_or_inexact_here_is_out() -> None:
    algorithms = TORCHS, *map(Declared, ("slow", "close", "slow-part", "close-part", "wrong"))
    known = (
        measured("native", 8, 0.8),
        measured("slow", 4, 0.4 * 1.61),
        measured("close", 4, 0.4 * 1.59),
        measured("slow-part", 1, 0.1 * 2.51),
        measured("close-part", 1, 0.1 * 2.49),
        measured("wrong", 1, 0.01, relative_error=1e-2),
    )
    standings = table(*algorithms, known=known, max_relative_error=1e-5)
    assert {*names(standings.unseen())} == {("close", 8), ("close-part", 8)}


def test_what_was_fast_in_a_smaller_mini_batch_or_is_short_is_measured() -> None:
    known = (
        measured("native", 8, 0.1),
        measured("native", 1, 0.2),
        measured("close", 1, 0.3),
        measured("slow", 1, 0.33),
    )
    standings = table(TORCHS, Declared("close"), Declared("slow"), known=known)
    assert names(standings.unseen()) == [("close", 8)]
    prior = Prior()
    for problem in NEAR:
        prior.learn(problem, known)
    ratios = {name: expected.ratio for name in ("native", "close") if (expected := prior.expected(PROBLEM, name))}
    assert ratios == {"native": 1.0, "close": pytest.approx(1.5)}
    short = (measured("native", 8, 0.0001), measured("other", 1, 0.00025), measured("slow", 1, 0.00026))
    assert names(table(TORCHS, OTHER, Declared("slow"), known=short).unseen()) == [("other", 8)]


def test_what_like_problems_say_is_hopeless_is_out_with_the_reason() -> None:
    standings = table(TORCHS, OTHER, Declared("best"), prior=prior_of(best=0.01, other=0.03))
    failure = standings.hopeless(candidate(standings, "other"))
    assert failure == Failure(
        MicroConfig("other", BATCH), "3.0 times the fastest in like problems", FailureKind.HOPELESS
    )
    assert standings.hopeless(candidate(standings, "best")) is None
    over_the_limit = table(TORCHS, Declared("other", scratch=20), Declared("best"), limit=100, prior=standings.prior)
    assert ("other", BATCH) in names(over_the_limit.leads())
    assert names(standings.parts()) == [("best", 1)]
    standings.failed[MicroConfig("other", BATCH)] = failure
    assert "other" not in dict(names(standings.unseen()))


@pytest.mark.parametrize(("times", "is_hopeless"), [(5.0, True), (3.0, False)])
def test_what_is_far_slower_in_other_operations_is_hopeless_here_too(times: float, is_hopeless: bool) -> None:
    prior = Prior()
    for problem in NEAR:
        rows = [measured("best", 1, 0.01), measured("other", 1, 0.01 * times)]
        prior.learn(problem.with_operation(Operation.BACKWARD_DATA), rows)
    standings = table(TORCHS, OTHER, prior=prior)
    assert (standings.hopeless(candidate(standings, "other")) is not None) is is_hopeless


def test_what_cannot_be_the_fastest_even_at_full_rate_is_out_until_a_higher_rate_is_seen() -> None:
    algorithms = TORCHS, Declared("counted", flops=10**6), Declared("runs", flops=10**6)
    known = (measured("native", 8, 0.08),)
    standings = table(*algorithms, known=known, flops_per_s=lambda: 0.5e8)
    failure = standings.hopeless(candidate(standings, "counted"))
    assert failure is not None
    assert failure.reason == "2.0 times the fastest by its arithmetic alone"
    for more, flops_per_s in ((measured("runs", 1, 0.005), 0.5e8), (measured("native", 8, 0.08), 2e8)):
        later = table(*algorithms, known=(*known, more), failed=(failure,), flops_per_s=partial(float, flops_per_s))
        assert ("counted", 8) in names(later.unseen())
    last = table(*algorithms, known=known, failed=(failure,), flops_per_s=lambda: 0.5e8)
    assert ("counted", 8) not in names(last.unseen())


def test_what_a_limit_bars_makes_nothing_hopeless() -> None:
    """The fastest does not fit: what is slower in like problems is all that there is, and is asked for again."""
    algorithms = TORCHS, Declared("large", scratch=125), Declared("slow")
    passed = Failure(MicroConfig("slow", BATCH), "under another limit", FailureKind.HOPELESS)
    prior = prior_of(large=0.01, slow=0.03)
    limited = table(*algorithms, failed=(passed,), limit=100, prior=prior)
    assert ("slow", BATCH) in names(limited.unseen())
    for limit in (125, None):
        assert ("slow", BATCH) not in names(table(*algorithms, failed=(passed,), limit=limit, prior=prior).unseen())


def test_of_a_budget_only_what_needs_no_more_workspace_makes_hopeless() -> None:
    algorithms = TORCHS, Declared("large", scratch=10), Declared("small", scratch=2), Declared("dominated", scratch=3)
    prior = prior_of(large=0.01, small=0.03, dominated=0.06)
    standings = table(*algorithms, limit=200, every_size=True, prior=prior)
    hopeless = {name for name, _ in names(standings.leads()) if standings.hopeless(candidate(standings, name))}
    assert hopeless == {"dominated"}


@pytest.mark.parametrize(("scratch", "is_hopeless"), [(None, False), (0, True), (1, False)])
def test_of_a_budget_what_only_a_run_shows_counts_as_rival_once_it_is_counted(
    scratch: int | None, is_hopeless: bool
) -> None:
    """``slow`` takes twice as long as ``runs``, and needs nothing, as ``runs`` may."""
    counted = {} if scratch is None else {("runs", 8): scratch}
    prior = prior_of(missing=0.01, runs=0.015, slow=0.03)
    algorithms = TORCHS, CountedInRuns("runs"), Declared("slow")
    standings = table(*algorithms, limit=200, every_size=True, counted=counted, prior=prior)
    assert (standings.hopeless(candidate(standings, "slow")) is not None) is is_hopeless


def test_of_a_budget_the_fastest_is_that_of_those_which_need_no_more_workspace() -> None:
    known = (measured("native", 8, 0.1), measured("other", 8, 0.05, scratch=16))
    standings = table(TORCHS, Declared("other", prepared=5), known=known, limit=100, every_size=True)
    standings.known[MicroConfig("other", 8)] = replace(known[1], prepared_bytes=5)
    assert [standings.fastest_s(size) for size in (20, 21)] == [0.1, 0.05]
    assert standings.margin(candidate(standings, "other"), standings.known[MicroConfig("other", 8)]) == 1.0
    standings.may_keep = True
    assert [standings.fastest_s(size) for size in (15, 16)] == [0.1, 0.05]


def test_last_resorts_are_spared_once_another_candidate_is_within_all_limits() -> None:
    algorithms = Declared("native", scratch=10), Declared("resort", is_resort=True)
    for scratch, is_spared in ((80, True), (81, False)):
        standings = table(*algorithms, known=(measured("native", 8, 0.1, scratch),), limit=80)
        assert standings.is_spared(candidate(standings, "resort")) is is_spared
        assert (("resort", 8) in names(standings.unseen())) is not is_spared


# Which sizes are next


def test_all_sizes_of_the_best_are_next_and_one_of_a_close_second() -> None:
    known = (measured("native", 8, 0.2), measured("best", 8, 0.1), measured("close", 8, 0.109))
    algorithms = TORCHS, Declared("best"), Declared("close")
    standings = table(*algorithms, known=known)
    assert names(standings.sizes()) == [("best", 4), ("best", 2), ("best", 1), ("close", 4)]
    far = table(*algorithms, known=(*known[:2], measured("close", 8, 0.111)))
    assert names(far.sizes()) == [("best", 4), ("best", 2), ("best", 1)]
    assert not standings.is_complete()


def test_where_torchs_own_is_the_best_nothing_is_divided_unless_for_a_budget() -> None:
    known = (measured("native", 8, 0.1), measured("other", 8, 0.105))
    assert names(table(TORCHS, OTHER, known=(known[0], measured("other", 8, 0.2))).missing()) == []
    both = names(table(TORCHS, OTHER, known=known, limit=10**9, every_size=True).sizes())
    assert set(both) >= {("other", size) for size in (4, 2, 1)}


def test_parts_are_small_but_large_enough_and_none_of_foreign_code() -> None:
    algorithms = TORCHS, OTHER, Declared("elsewhere", runs_elsewhere=True), Declared("resort", is_resort=True)
    assert names(table(*algorithms).parts()) == [("other", 1)]
    assert names(table(*algorithms, limit=100, every_size=True).parts()) == [("other", 1), ("resort", 1)]
    larger = table(*algorithms)
    larger.task = replace(larger.task, batch_size=16)
    assert names(larger.parts()) == [("other", 2)]


# What is to be counted


def test_only_what_decides_is_counted_and_nothing_that_is_over_the_limit_by_its_declaration() -> None:
    standings = table(TORCHS, Declared("other", scratch=10), limit=45)
    assert names(standings.uncounted()) == [("native", 8), ("other", 4), ("other", 1)]  # 1 is the part
    standings.counted |= {MicroConfig("native", 8): 0, MicroConfig("other", 4): 46, MicroConfig("other", 1): 10}
    assert names(standings.uncounted()) == [("other", 2)]
    standings.counted[MicroConfig("other", 2)] = 30
    assert names(standings.uncounted()) == []
    assert [f.micro_config for f in standings.too_large()] == [MicroConfig("other", 4)]
    assert standings.too_large()[0].reason == "needs 46 bytes of workspace"


def test_without_a_limit_only_torchs_own_is_counted() -> None:
    foreign = CountedInRuns("elsewhere", runs_elsewhere=True)
    assert names(table(TORCHS, OTHER, foreign).uncounted()) == [("native", 8)]


def test_of_foreign_code_the_largest_is_proven_that_fits_by_its_declaration_and_is_not_hopeless() -> None:
    algorithms = [Declared(name, scratch=10, runs_elsewhere=True) for name in ("x", "y")]
    standings = table(TORCHS, *algorithms, limit=50, prior=prior_of(native=0.01, y=0.03))
    assert names(standings.foreign()) == [("x", 4)]
    standings.failed[MicroConfig("x", 4)] = Failure(MicroConfig("x", 4), "it is wrong")
    assert standings.foreign() == []


def test_the_fastest_in_like_problems_is_counted_first_as_it_rules_out_others() -> None:
    algorithms = TORCHS, Declared("large", scratch=10), Declared("slow")
    standings = table(*algorithms, limit=100, prior=prior_of(large=0.01, slow=0.03))
    assert names(standings.fastest_uncounted()) == [("large", 1)]
    assert standings.hopeless(candidate(standings, "slow")) is not None
    standings.counted[MicroConfig("large", 1)] = 101
    assert names(standings.fastest_uncounted()) == [("slow", 1)]
    assert standings.hopeless(candidate(standings, "slow")) is None


def test_an_answer_fits_and_covers_the_batch() -> None:
    def has_answer(size: int, scratch: int) -> bool:
        return table(TORCHS, OTHER, known=(measured("other", size, 0.1, scratch),), limit=50).has_answer()

    assert has_answer(8, 50)
    assert has_answer(4, 50)
    assert not has_answer(8, 51)
