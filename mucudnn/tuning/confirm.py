"""Confirms in the model what tuning chose: decides, from steps in turns, where torch's own convolution runs again.

Pure but for what it is given: how to run a step, and how to put choices into the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from statistics import median
from typing import Protocol

from mucudnn.running.in_place import Place, Spent
from mucudnn.tuning.choose import baseline_of
from mucudnn.tuning.confirmation import Confirmation, InPlace, InTurns, PutBack
from mucudnn.tuning.result import TunedProblem, relative_error_of
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.results import Configuration, MicroConfig
from mucudnn.words.torch_settings import TORCHS_OWN

RECORD_S = 6e-5  # seconds that meeting and noting a call takes, at most: torch's take the longest
NEGLIGIBLE = 0.01  # part of a step that recording may take where its steps count as the user's

TunedModules = Mapping[str, tuple[TunedProblem, ...]]  # module name -> what was tuned for it
_Key = tuple[ConvProblem, int, tuple[MicroConfig, ...]]  # what was chosen: for what, batch size, micro-configs
_Base = tuple[str | None, ConvProblem, int]  # module, forward problem, batch size


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step, and of its convolutions one by one if they were recorded."""

    time_s: float
    convolutions: Mapping[Place, Spent] = field(default_factory=dict)

    @property
    def convolutions_s(self) -> float:
        return sum(spent.time_s for spent in self.convolutions.values())


class Steps(Protocol):
    """The model's own step, and the choices in the model."""

    def run(self, *, ours: bool, recorded: bool) -> StepTimes:
        """Run a step: with what was chosen, or torch's own. recorded: each convolution is timed, too."""

    def is_ours(self, module: str, tuned: TunedProblem) -> bool:
        """Tell whether anything else than torch's own runs."""

    def may_run_torchs_own(self, tuned: TunedProblem) -> bool:
        """Tell whether the workspace that torch's own needs is allowed."""

    def put_in(self, tuned: TunedModules, put_back: Sequence[PutBack]) -> None:
        """Have the modules run ``tuned`` from now on. put_back: what is torch's own again."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Bounds of confirming. A phase is a series of rounds; there are up to three.

    shortest_s, longest_s: seconds of a step of torch that is confirmed without being asked for. phase_s: seconds after
    which no round of a phase begins, once there were ``least_rounds``. clear_rounds: number of rounds after which it
    ends if the step is clearly faster or slower. most_rounds: number after which it ends anyway.
    """

    shortest_s: float = 0.002
    longest_s: float = 2.5
    phase_s: float = 5.0
    least_rounds: int = 2
    clear_rounds: int = 5
    most_rounds: int = 25


def confirm(
    steps: Steps, tuned: TunedModules, *, automatic: bool = False, effort: Effort = Effort()
) -> Confirmation | None:
    """Run steps in turns, and put torch's own back where ours is slower by more than the noise.

    First each convolution is compared in place, then the step that remains; where that is slower, torch's own is put
    back everywhere, but for what would need more workspace than is allowed. What is undecided stays as it was tuned.
    automatic: nothing is done, and ``None`` returned, for steps that are too short to be told apart, or too long.

    Raises what a step raises; the model then runs what it ran last.
    """
    torchs_s = _warm_up(steps)
    if automatic and not effort.shortest_s <= torchs_s <= effort.longest_s:
        return None
    recorded = _Rounds.run(steps, effort, recorded=True)
    tuned = _with_in_place(recorded, tuned)
    lost = _losers(recorded, tuned, steps)
    put_back = [one for one in lost if one.is_allowed]
    tuned = _without(tuned, put_back)
    steps.put_in(tuned, put_back)
    if put_back:
        recorded = _Rounds.run(steps, effort, recorded=True)
    step = (_Rounds.run(steps, effort, recorded=False) if recorded.is_disturbed else recorded).steps
    over_tuned = _over_tuned(recorded, tuned)
    if step.is_slower:
        withdrawn = _all_of_ours(tuned, steps, f"the step was slower with what was chosen, {step.in_words}")
        steps.put_in(_without(tuned, withdrawn), withdrawn)
    return Confirmation(
        step,
        recorded.steps,
        recorded.convolutions,
        over_tuned,
        put_back=tuple(put_back),
        is_withdrawn=step.is_slower,
        kept=tuple(one for one in lost if not one.is_allowed),
    )


def _warm_up(steps: Steps) -> float:
    """Run each side once, which builds what later steps use. Returns seconds of torch's; short ones are run again."""
    first_s = steps.run(ours=False, recorded=False).time_s
    steps.run(ours=True, recorded=True)
    return first_s if first_s > 1 else min(first_s, steps.run(ours=False, recorded=True).time_s)


@dataclass(frozen=True, slots=True)
class _Rounds:
    """Steps in turns: those of torch's own, and those of ours."""

    torchs: list[StepTimes] = field(default_factory=list)
    ours: list[StepTimes] = field(default_factory=list)

    @classmethod
    def run(cls, steps: Steps, effort: Effort, *, recorded: bool) -> _Rounds:
        rounds, spent_s = cls(), 0.0
        for done in count(1):
            for ours in (False, True) if done % 2 else (True, False):  # so that neither always follows the other
                times = steps.run(ours=ours, recorded=recorded)
                (rounds.ours if ours else rounds.torchs).append(times)
                spent_s += times.time_s
            is_late = done >= effort.least_rounds and spent_s >= effort.phase_s
            is_clear = done >= effort.clear_rounds and (rounds.steps.is_faster or rounds.steps.is_slower)
            if is_late or is_clear or done >= effort.most_rounds:
                break
        return rounds

    @property
    def steps(self) -> InTurns:
        return InTurns.of([times.time_s for times in self.torchs], [times.time_s for times in self.ours])

    @property
    def convolutions(self) -> InTurns:
        return InTurns.of([times.convolutions_s for times in self.torchs], [t.convolutions_s for t in self.ours])

    @property
    def is_disturbed(self) -> bool:
        """Whether noting the calls takes more of the steps than may be passed over."""
        return any(
            RECORD_S * sum(spent.calls for spent in times.convolutions.values()) > NEGLIGIBLE * times.time_s
            for times in (*self.torchs, *self.ours)
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """Calls that are compared: those of equal modules, for which the same was chosen.

    tuned: what was chosen for each of the operations. places: of torch's calls and of ours.
    """

    tuned: tuple[TunedProblem, ...]
    places: set[Place]

    def in_place(self, rounds: _Rounds) -> InPlace | None:
        """Compare a call; ``None`` where a step did not have any."""
        torchs_s, ours_s = (self.seconds(steps) for steps in (rounds.torchs, rounds.ours))
        calls = median(self._calls(times) for times in rounds.torchs)
        if not calls or not all((*torchs_s, *ours_s)):
            return None
        per_call = ([s / calls for s in side] for side in (torchs_s, ours_s))
        return InPlace(tuple(one.problem.operation for one in self.tuned), InTurns.of(*per_call))

    def seconds(self, steps: Iterable[StepTimes], operation: Operation | None = None) -> list[float]:
        """Seconds in each step; of calls that compute one operation alone, or of all."""
        places = [place for place in self.places if operation is None or place.operations == (operation,)]
        return [sum(t.convolutions[place].time_s for place in places if place in t.convolutions) for t in steps]

    def _calls(self, times: StepTimes) -> int:
        """Count calls of the first operation."""
        first = self.tuned[0].problem.operation
        return sum(
            times.convolutions[p].calls for p in self.places if first in p.operations and p in times.convolutions
        )

    def losers(self, rounds: _Rounds) -> list[TunedProblem]:
        """Return what is put back where the part is slower than torch's, as far as it is ours.

        Torch's call is divided over its operations as tuning measured torch's own. What takes longer than its share is
        put back, and at least what exceeds its share by most.
        """
        baselines_s = [one.baseline_s for one in self.tuned]
        all_s = sum(seconds or 0.0 for seconds in baselines_s)
        if len(self.tuned) == 1 or None in baselines_s:
            return [*self.tuned]
        torchs_s = median(self.seconds(rounds.torchs))
        excess_s = [
            median(self.seconds(rounds.ours, one.problem.operation)) - torchs_s * (one.baseline_s or 0.0) / all_s
            for one in self.tuned
        ]
        return [one for one, s in zip(self.tuned, excess_s, strict=True) if s >= min(0.0, max(excess_s))]


def _with_in_place(rounds: _Rounds, tuned: TunedModules) -> TunedModules:
    """Add what was measured in place."""
    measured = {_key(one): part.in_place(rounds) for part in _parts(rounds, tuned) for one in part.tuned}
    return {
        name: tuple(replace(one, in_place=measured.get(_key(one))) for one in every) for name, every in tuned.items()
    }


def _losers(rounds: _Rounds, tuned: TunedModules, steps: Steps) -> list[PutBack]:
    """Return what is slower than torch's own in place, in every module in which it runs, allowed or not."""
    why: dict[_Key, str] = {}
    for part in _parts(rounds, tuned):
        in_place = part.in_place(rounds)
        if in_place is not None and in_place.call.is_slower:
            why |= {_key(one): f"slower in the step, {in_place.call.in_words}" for one in part.losers(rounds)}
    return [
        PutBack(name, one.problem, one.batch_size, why[_key(one)], steps.may_run_torchs_own(one))
        for name, every in tuned.items()
        for one in every
        if _key(one) in why and steps.is_ours(name, one)
    ]


def _all_of_ours(tuned: TunedModules, steps: Steps, why: str) -> list[PutBack]:
    return [
        PutBack(name, one.problem, one.batch_size, why)
        for name, every in tuned.items()
        for one in every
        if steps.is_ours(name, one) and steps.may_run_torchs_own(one)
    ]


def _without(tuned: TunedModules, put_back: Iterable[PutBack]) -> TunedModules:
    """Choose torch's own for what is put back."""
    why = {(one.module, one.problem, one.batch_size): one.why for one in put_back}

    def after(name: str, one: TunedProblem) -> TunedProblem:
        reason = why.get((name, one.problem, one.batch_size))
        return one if reason is None else _torchs_own(one, reason)

    return {name: tuple(after(name, one) for one in every) for name, every in tuned.items()}


def _parts(rounds: _Rounds, tuned: TunedModules) -> Iterator[_Part]:
    """Group the calls: by what was chosen for the operations that torch computes in one call."""
    by_base: dict[_Base, dict[Operation, TunedProblem]] = {}
    for name, every in tuned.items():
        for one in every:
            for module in (name, None):  # None: of calls whose module cannot be told, the first that has the problem
                base = module, one.problem.with_operation(Operation.FORWARD), one.batch_size
                by_base.setdefault(base, {}).setdefault(one.problem.operation, one)
    places = _by_base((*rounds.torchs, *rounds.ours))
    parts: dict[tuple[_Key, ...], _Part] = {}
    for base, joint in _joint_operations(rounds.torchs):
        chosen = tuple(one for operation, one in by_base.get(base, {}).items() if operation in joint)
        if len(chosen) == len(joint):
            part = parts.setdefault(tuple(_key(one) for one in chosen), _Part(chosen, set()))
            part.places.update(place for place in places[base] if joint >= {*place.operations})
    return iter(parts.values())


def _joint_operations(steps: Sequence[StepTimes]) -> Iterator[tuple[_Base, frozenset[Operation]]]:
    """Yield, for each module and problem, the operations that torch computes in one call, or in calls that overlap."""
    for base, places in _by_base(steps).items():
        joint: list[frozenset[Operation]] = []
        for operations in {frozenset(place.operations) for place in places if place.operations}:
            overlapping = [known for known in joint if known & operations]
            joint = [*(known for known in joint if known not in overlapping), operations.union(*overlapping)]
        for operations in joint:
            yield base, operations


def _by_base(steps: Sequence[StepTimes]) -> dict[_Base, list[Place]]:
    found: dict[_Base, list[Place]] = {}
    for place in {place for times in steps for place in times.convolutions}:
        if place.problem is not None:
            found.setdefault((place.module, place.problem, place.batch_size), []).append(place)
    return found


def _key(tuned: TunedProblem) -> _Key:
    return tuned.problem, tuned.batch_size, tuned.configuration.micro_configs


def _torchs_own(tuned: TunedProblem, why: str) -> TunedProblem:
    n = tuned.batch_size
    time_s = tuned.time_s if tuned.baseline_s is None else tuned.baseline_s
    own = baseline_of(tuned.measurements, n) or Configuration((MicroConfig(TORCHS_OWN, n),), time_s, 0)
    reason = f"torch's own: {why}; tuning chose {tuned.configuration}"
    error = relative_error_of(own, tuned.measurements)
    return replace(tuned, configuration=own, time_s=time_s, relative_error=error, reason=reason)


def _over_tuned(rounds: _Rounds, tuned: TunedModules) -> float | None:
    """Return the median, over calls of what was tuned, of seconds in place over those that tuning measured."""
    tuned_s: dict[Place, float] = {}
    for part in _parts(rounds, tuned):
        each_s = {one.problem.operation: one.time_s for one in part.tuned}
        tuned_s |= {place: sum(each_s[operation] for operation in place.operations) for place in part.places}
    ratios: list[float] = []
    for times in rounds.ours:
        for place, spent in times.convolutions.items():
            if place in tuned_s:
                ratios += [spent.time_s / (spent.calls * tuned_s[place])] * spent.calls
    return median(ratios) if ratios else None
