"""What is decided from steps in turns. Steps and their times are made up: nothing runs, and no clock is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, cycle, repeat
from math import inf
from typing import Any, cast

import pytest

from mucudnn.core.answers import TunedProblem
from mucudnn.core.config import Config
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Configuration, MicroConfig
from mucudnn.core.team import Team
from mucudnn.measuring.heap import is_heap_kept, keep_heap, why_fixed
from mucudnn.optimizing import steps as steps_module
from mucudnn.optimizing.confirm import Confirmation, confirm
from mucudnn.optimizing.steps import LEAST_CHANGE, ROUNDS, ModelSteps, Spent, StepCall, StepTimes, TunedModules
from mucudnn.running.norms import TunedNorm

FORWARD, DATA, FILTER = Operation
N = 8
SMALL, LARGE = (ConvProblem(FORWARD, 4, size, size, 4, 3, 3) for size in (8, 16))
BUSY_MACHINE = 0.9
NOT_KEPT = Config(keep_heap=False)
TORCHS_S = {FORWARD: 0.010, DATA: 0.012, FILTER: 0.008}  # of a call, in tuning and in place


def tuned(problem: ConvProblem, operation: Operation, algorithm: str = "gemm", time_s: float = 0.005) -> TunedProblem:
    configuration = Configuration((MicroConfig(algorithm, N),), time_s, 0)
    return TunedProblem(problem.with_operation(operation), N, configuration, TORCHS_S[operation], time_s, 0.0, "")


def all_three(problem: ConvProblem, algorithm: str = "gemm") -> tuple[TunedProblem, ...]:
    return tuple(tuned(problem, operation, algorithm) for operation in Operation)


@dataclass
class MadeUpSteps:
    """A model whose steps take known seconds.

    slow: problem with operation -> seconds of a call of ours; others take half of torch's. rest_s: all else, torch's
    step and ours. jitter: factors of one step after the other.
    """

    tuned: TunedModules
    slow: Mapping[ConvProblem, float] = field(default_factory=dict)
    rest_s: tuple[float, float] = (0.05, 0.05)
    jitter: Iterator[float] = field(default_factory=lambda: cycle([1.0]))
    recording_s: float = 0.0
    allowed: Callable[[TunedProblem], bool] = lambda one: True
    runs: list[tuple[bool, bool]] = field(default_factory=list)
    load_of: Callable[[int], float | None] = lambda number: None  # of a step, which takes ours longer
    waits: int = 0
    ranks: Team = field(default_factory=Team)
    config: Config = NOT_KEPT
    faults: int = 0  # of a step, unless the heap is kept
    fault_s: float = 0.0
    kept_s: float = 0.0  # which a kept heap costs a step
    device_type: str = "cpu"
    norms: Mapping[str, TunedNorm] = field(default_factory=dict)

    @property
    def times(self) -> MadeUpSteps:
        return self

    def torchs_and_ours(self, *, recorded: bool) -> tuple[Callable[[], StepTimes], Callable[[], StepTimes]]:
        return partial(self.run, ours=False, recorded=recorded), partial(self.run, ours=True, recorded=recorded)

    @property
    def quiet(self) -> MadeUpSteps:
        return self

    def wait(self) -> None:
        self.waits += 1

    def run(self, *, ours: bool, recorded: bool) -> StepTimes:
        load = self.load_of(len(self.runs))
        self.runs.append((ours, recorded))
        factor = next(self.jitter) * (2 if ours and load == BUSY_MACHINE else 1)
        convolutions: dict[StepCall, Spent] = {}
        for every in self.tuned.values():
            for place, seconds in self.calls(every, ours):
                before = convolutions.get(place, Spent(0, 0.0))
                convolutions[place] = Spent(before.calls + 1, before.time_s + seconds * factor)
        convolutions[StepCall(None, N, (FORWARD,), in_backward=False)] = Spent(1, 0.01 * factor)  # in three dimensions
        time_s = sum(spent.time_s for spent in convolutions.values()) + self.rest_s[ours] * factor
        calls = sum(spent.calls for spent in convolutions.values())
        faults = 0 if is_heap_kept() else self.faults
        time_s += recorded * calls * self.recording_s + (self.kept_s if is_heap_kept() else faults * self.fault_s)
        return StepTimes(time_s, convolutions if recorded else {}, load, faults, faults * self.fault_s / time_s)

    def calls(self, every: Sequence[TunedProblem], ours: bool) -> Iterator[tuple[StepCall, float]]:
        problem = every[0].problem.with_operation(FORWARD)
        operations = [one.problem.operation for one in every]
        if not ours:
            yield StepCall(problem, N, (FORWARD,), in_backward=False), TORCHS_S[FORWARD]
            joint = tuple(operation for operation in operations if operation is not FORWARD)
            yield StepCall(problem, N, joint, in_backward=True), sum(TORCHS_S[operation] for operation in joint)
            return
        for one in every:
            operation = one.problem.operation
            own_s = TORCHS_S[operation]
            seconds = own_s if one.configuration.is_baseline else self.slow.get(one.problem, own_s / 2)
            yield StepCall(problem, N, (operation,), operation is not FORWARD), seconds

    def peak_bytes(self, *, ours: bool) -> int:
        return 2000 if ours else 3000

    def may_run_torchs_own(self, tuned: TunedProblem) -> bool:
        return self.allowed(tuned)

    def put_in(self, tuned: TunedModules) -> None:
        self.tuned = tuned

    @property
    def torchs(self) -> set[tuple[str, Operation]]:
        return {(n, one.problem.operation) for n, e in self.tuned.items() for one in e if one.configuration.is_baseline}


def made_up(steps: MadeUpSteps) -> ModelSteps:
    return cast(ModelSteps, steps)


def rounds_of(found: Confirmation) -> int:
    return len(found.step.time_samples_s)


def confirmed(steps: MadeUpSteps) -> Confirmation:
    found = confirm(made_up(steps))
    assert isinstance(found, Confirmation)
    return found


def test_each_choice_knows_its_time_in_place() -> None:
    steps = MadeUpSteps({"a": all_three(SMALL)})
    confirmed(steps)
    forward, data, _ = steps.tuned["a"]
    assert forward.in_place == "PyTorch 10 ms, ours 5 ms, 2.00 ± 0.00"
    assert "in place   PyTorch 20 ms, ours 10 ms, 2.00 ± 0.00 (backward data, with backward filter)" in str(data)


def test_equal_layers_are_judged_together() -> None:
    every = {"a": all_three(SMALL), "b": all_three(SMALL), "c": all_three(LARGE)}
    steps = MadeUpSteps(every, {SMALL: 0.0125})
    assert {one.module for one in confirmed(steps).put_back} == {"a", "b"}
    assert steps.torchs == {("a", FORWARD), ("b", FORWARD)}


def test_both_gradients_are_put_back_where_they_are_slower_than_torchs_call_of_both() -> None:
    for data_s, filter_s, put_back in (
        (0.020, 0.004, {DATA, FILTER}),  # torch's are 12 and 8 ms
        (0.015, 0.0049, set[Operation]()),
    ):
        slow = {SMALL.with_operation(DATA): data_s, SMALL.with_operation(FILTER): filter_s}
        steps = MadeUpSteps({"a": all_three(SMALL), "b": all_three(LARGE)}, slow)
        confirmed(steps)
        assert steps.torchs == {("a", operation) for operation in put_back}
    first = tuple(one for one in all_three(SMALL) if one.problem.operation is not DATA)  # nobody asks for its dx
    steps = MadeUpSteps({"a": first, "b": all_three(LARGE)}, {SMALL.with_operation(FILTER): 0.009})
    confirmed(steps)
    assert steps.torchs == {("a", FILTER)}


def test_torchs_own_is_not_put_back_above_the_workspace_limit() -> None:
    tuned_modules = {"a": all_three(SMALL), "b": all_three(LARGE)}
    steps = MadeUpSteps(tuned_modules, {SMALL: 0.0125}, allowed=lambda one: one.problem != SMALL)
    found = confirmed(steps)
    assert not found.put_back
    assert not steps.torchs
    assert [(one.module, one.why) for one in found.kept] == [("a", "slower in the step, 0.80 ± 0.00")]
    assert "PyTorch's own needs more than the workspace limit in a: forward" in found.details()


def test_a_slower_step_has_torchs_own_everywhere() -> None:
    """Each convolution is faster in place, and all else is slower by more than that."""
    steps = MadeUpSteps({"a": all_three(SMALL), "b": all_three(LARGE)}, rest_s=(0.05, 0.09))
    found = confirmed(steps)
    assert found.is_withdrawn
    assert found.step.is_slower(LEAST_CHANGE)
    assert len(steps.torchs) == 6
    assert str(found) == (
        "step 120 -> 130 ms, 0.92x ± 0.00, slower; convolutions 1.75x; 58 % of the step were convolutions, so at most "
        "2.40x; peak 2.93 KiB -> 1.95 KiB; PyTorch's own runs everywhere"
    )
    assert "the step was slower with the tuned choices, 0.92 ± 0.00" in steps.tuned["a"][0].reason
    steps = MadeUpSteps(
        {"a": all_three(SMALL), "b": all_three(LARGE)}, rest_s=(0.05, 0.09), allowed=lambda one: one.problem != SMALL
    )
    found = confirmed(steps)
    assert len(steps.torchs) == 5
    assert [(one.module, one.problem) for one in found.kept] == [("a", SMALL)]
    assert str(found).endswith("PyTorch's own runs where the limit allows it")


def test_what_is_not_clear_stays_and_is_called_so() -> None:
    jitter = cycle([1.0, 1.3, 0.8, 1.1, 0.9])
    slow = {problem.with_operation(o): TORCHS_S[o] * 1.02 for problem in (SMALL, LARGE) for o in Operation}
    steps = MadeUpSteps({"a": all_three(SMALL), "b": all_three(LARGE)}, slow, jitter=jitter)
    found = confirmed(steps)
    assert not steps.torchs
    assert "no clear difference" in str(found)


def test_steps_take_turns_and_neither_side_is_always_second() -> None:
    steps = MadeUpSteps({"a": all_three(SMALL)})
    confirmed(steps)
    sides = [ours for ours, _ in steps.runs[3:]]  # after warming up
    pairs = list(zip(sides[::2], sides[1::2], strict=True))
    assert all(sum(pair) == 1 for pair in pairs)
    assert {pair[0] for pair in pairs} == {False, True}


def test_a_clear_step_needs_few_rounds_and_an_unclear_or_long_one_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    long = MadeUpSteps({"a": all_three(SMALL)}, rest_s=(3.0, 3.0))
    assert rounds_of(confirmed(long)) == ROUNDS.least
    assert len(long.runs) == 2 + 2 * ROUNDS.least  # warming up is one of each
    monkeypatch.setattr(steps_module, "ROUNDS", replace(ROUNDS, time_limit_s=inf))
    clear, unclear = MadeUpSteps({"a": all_three(SMALL)}), MadeUpSteps({"a": all_three(SMALL)}, rest_s=(0.05, 0.065))
    assert rounds_of(confirmed(clear)) == ROUNDS.sure
    assert rounds_of(confirmed(unclear)) == ROUNDS.most


def test_where_recording_weighs_the_step_is_timed_without() -> None:
    light = MadeUpSteps({"a": all_three(SMALL)}, recording_s=0.001)
    assert confirmed(light).step.baseline_s == pytest.approx(0.093)
    assert all(recorded for _, recorded in light.runs[1:])
    heavy = MadeUpSteps({"a": all_three(SMALL)}, recording_s=0.001, jitter=cycle([0.02]))
    found = confirmed(heavy)
    assert found.step.baseline_s == pytest.approx(0.0018)
    assert found.recorded.baseline_s == pytest.approx(0.0048)


def test_without_being_asked_only_steps_of_a_fitting_length_are_confirmed() -> None:
    for rest_s, first, runs, reason in (
        (-0.0395, 1, 3, "a step takes 500 us; Config(confirm=True) confirms anyway"),
        (0.0, 1, 13, None),
        (0.0, 80, 13, None),
        (3.0, 1, 3, "a step takes 3.04 s; Config(confirm=True) confirms anyway"),
        (6.0, 1, 2, "a step takes 6.04 s; Config(confirm=True) confirms anyway"),
    ):
        jitter = chain([first], repeat(1.0))  # the first step is slower than others
        steps = MadeUpSteps({"a": all_three(SMALL)}, rest_s=(rest_s, rest_s + 0.02), jitter=jitter)
        found = confirm(made_up(steps), automatic=True)
        assert found == reason if reason else isinstance(found, Confirmation)
        assert len(steps.runs) == runs


# The heap is kept where that is measured to be faster


@pytest.mark.skipif(why_fixed() is not None, reason="only glibc's heap can be kept")
def test_the_heap_is_kept_where_a_step_gains_from_it() -> None:
    """Of a step of 62 ms, 20 or 1 are page faults. Without many of them, nothing is compared."""
    for config, faults, fault_s, kept_s, load, kept, compared in (
        (Config(), 10_000, 2e-6, 0.0, 0.0, True, True),
        (Config(), 10_000, 1e-7, 0.0, 0.0, False, True),
        (Config(), 10_000, 2e-6, 0.0, BUSY_MACHINE, True, True),
        (Config(), 10_000, 1e-7, 0.0, BUSY_MACHINE, False, True),
        (Config(), 10_000, 2e-6, 0.015, 0.0, True, True),
        (Config(), 10_000, 2e-6, 0.019, 0.0, False, True),  # the kernel saves 20 ms, the step 1
        (Config(), 10_000, 2e-6, 0.025, BUSY_MACHINE, False, True),
        (Config(), 200, 2e-6, 0.0, 0.0, False, False),
        (Config(keep_heap=False), 10_000, 2e-6, 0.0, 0.0, False, False),
        (Config(workspace_limit="headroom"), 10_000, 2e-6, 0.0, 0.0, False, False),
    ):
        steps = MadeUpSteps(
            {"a": all_three(SMALL)},
            config=config,
            faults=faults,
            fault_s=fault_s,
            kept_s=kept_s,
            load_of=lambda number, load=load: load,
        )
        try:
            heap = confirmed(steps).heap
            assert is_heap_kept() == kept
        finally:
            keep_heap(kept=False)
        assert (heap is not None) == compared
        if heap is not None:
            assert (heap.is_kept, heap.faults) == (kept, (faults, 0))
            assert heap.step.baseline_s - heap.step.time_s == pytest.approx(faults * fault_s - kept_s)
            assert f"page faults {faults:,} -> 0" in str(heap)


# Others work, too


def test_a_burst_of_load_changes_nothing_but_the_number_of_steps() -> None:
    choices = {"a": all_three(SMALL), "b": all_three(LARGE)}
    quiet, disturbed = (
        MadeUpSteps(choices, {SMALL: 0.0125}, load_of=lambda number, most=most: BUSY_MACHINE * (3 <= number < most))
        for most in (0, 13)
    )
    found = confirmed(disturbed)
    assert found == confirmed(quiet)
    assert disturbed.torchs == quiet.torchs == {("a", FORWARD)}
    assert disturbed.tuned == quiet.tuned
    assert len(disturbed.runs) == len(quiet.runs) + 10
    assert (quiet.waits, disturbed.waits) == (1, 6), "before all, and after each round that was disturbed"
    assert not found.is_disturbed
    assert "busy" not in str(found)


def test_what_lost_in_quiet_is_put_back_though_others_work_afterwards() -> None:
    first_phase = 3 + 2 * ROUNDS.sure
    choices = {"a": all_three(SMALL), "b": all_three(LARGE)}
    steps = MadeUpSteps(choices, {SMALL: 0.0125}, load_of=lambda number: BUSY_MACHINE * (number >= first_phase))
    found = confirmed(steps)
    assert steps.torchs == {("a", FORWARD)}
    assert found.step.is_slower(LEAST_CHANGE), "as it seems"
    assert found.is_disturbed
    assert not found.is_withdrawn


def test_a_little_load_and_an_unknown_one_disturb_nothing() -> None:
    for load in (None, 0.0, 0.1):
        steps = MadeUpSteps({"a": all_three(SMALL)}, load_of=lambda _, load=load: load)  # type: ignore[misc]
        found = confirmed(steps)
        assert (found.load, found.is_disturbed, steps.waits) == (load, False, 1)


# Ranks


class OfRank0(Team):
    """What rank 0 has said, one after the other, as another rank hears it."""

    def __init__(self, said: list[Any]) -> None:
        self.said = iter(said)

    def gather(self, message: Any) -> list[Any]:
        return [next(self.said), message]


class Heard(Team):
    def __init__(self) -> None:
        self.said: list[Any] = []

    def gather(self, message: Any) -> list[Any]:
        self.said.append(message)
        return [message]


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ({"slow": {SMALL: 0.0125}}, {}),
        ({}, {"slow": {SMALL: 0.0125}}),
        ({"rest_s": (0.05, 0.09)}, {}),
        ({}, {"rest_s": (0.05, 0.09)}),
    ],
)
def test_the_verdict_of_rank_0_is_everybodys(first: dict[str, Any], other: dict[str, Any]) -> None:
    choices, heard = {"a": all_three(SMALL), "b": all_three(LARGE)}, Heard()
    of_first, of_other = MadeUpSteps(choices, **first, ranks=heard), MadeUpSteps(choices, **other)
    found = confirmed(of_first)
    of_other.ranks = OfRank0(heard.said)
    assert confirmed(of_other) == found
    assert of_other.tuned == of_first.tuned
    assert of_other.runs == of_first.runs
    assert bool(of_first.torchs) == bool(first)
