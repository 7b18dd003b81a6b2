"""Confirms in the model what tuning chose: decides, from steps in turns, where torch's own convolution runs again.

Pure but for what it is given: how to run a step, and how to put choices into the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from statistics import median
from typing import Protocol

from mucudnn.running.in_place import Place, Spent
from mucudnn.tuning.choose import baseline_of
from mucudnn.tuning.confirmation import Confirmation, InPlace, InTurns
from mucudnn.tuning.result import TunedProblem
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.results import Configuration, MicroConfig
from mucudnn.words.torch_settings import TORCHS_OWN

RECORD_S = 2e-5  # seconds that noting a call takes, at most
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

    def put_in(self, tuned: TunedModules) -> None:
        """Have the modules run these from now on."""

    def may_run_torchs_own(self, tuned: TunedProblem) -> bool:
        """Tell whether the workspace that torch's own needs is allowed."""


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
    after, put_back = _judged(recorded, tuned, steps.may_run_torchs_own)
    steps.put_in(after)
    if put_back:
        recorded = _Rounds.run(steps, effort, recorded=True)
    step = recorded.steps
    if recorded.is_disturbed:
        step = _Rounds.run(steps, effort, recorded=False).steps
    confirmation = Confirmation(
        step, recorded.steps, recorded.convolutions, _over_tuned(recorded, after), tuple(put_back), step.is_slower
    )
    if step.is_slower:
        steps.put_in(_withdrawn(after, step, steps.may_run_torchs_own))
    return confirmation


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
        return sum(times.convolutions[p].calls for p in self.places if first in p.operations and p in times.convolutions)

    def losers(self, rounds: _Rounds) -> list[TunedProblem]:
        """Return what is put back where the part is slower than torch's.

        Torch's call is divided over its operations as tuning measured torch's own. What takes longer than its share is
        put back, and at least what exceeds its share by most.
        """
        ours = [one for one in self.tuned if not one.configuration.is_baseline]
        if len(self.tuned) == 1 or any(one.baseline_s is None for one in self.tuned):
            return ours
        torchs_s, all_s = median(self.seconds(rounds.torchs)), sum(one.baseline_s or 0.0 for one in self.tuned)
        excess_s = {
            one.problem.operation: median(self.seconds(rounds.ours, one.problem.operation))
            - torchs_s * (one.baseline_s or 0.0) / all_s
            for one in ours
        }
        most_s = max(excess_s.values(), default=0.0)
        return [one for one in ours if excess_s[one.problem.operation] >= min(0.0, most_s)]


def _judged(
    rounds: _Rounds, tuned: TunedModules, may_run_torchs_own: Callable[[TunedProblem], bool]
) -> tuple[TunedModules, list[tuple[str, str]]]:
    """Return what is to run, with what was measured in place, and what was put back of which module."""
    in_place: dict[_Key, InPlace] = {}
    lost: set[_Key] = set()
    for part in _parts(rounds, tuned):
        measured = part.in_place(rounds)
        if measured is None:
            continue
        in_place |= {_key(one): measured for one in part.tuned}
        if measured.call.is_slower:
            lost |= {_key(one) for one in part.losers(rounds) if may_run_torchs_own(one)}
    after, put_back = {}, []
    for name, every in tuned.items():
        after[name] = tuple(replace(one, in_place=in_place.get(_key(one))) for one in every)
        for one in every:
            if _key(one) in lost:
                why = f"slower in the step, {in_place[_key(one)].call.in_words}"
                after[name] = tuple(torchs_own(o, why) if _key(o) == _key(one) else o for o in after[name])
                put_back.append((name, f"{one.problem}, batch {one.batch_size}: {why}"))
    return after, put_back


def _parts(rounds: _Rounds, tuned: TunedModules) -> Iterator[_Part]:
    """Group the calls: by what was chosen for the operations that torch computes in one call."""
    by_base: dict[_Base, dict[Operation, TunedProblem]] = {}
    for name, every in tuned.items():
        for one in every:
            for module in (name, None):  # None: of calls whose module cannot be told, the first that has the problem
                base = module, one.problem.with_operation(Operation.FORWARD), one.batch_size
                by_base.setdefault(base, {}).setdefault(one.problem.operation, one)
    parts: dict[tuple[_Key, ...], _Part] = {}
    ours = {place for times in rounds.ours for place in times.convolutions}
    for base, joint in _joint_operations(rounds.torchs):
        chosen = tuple(one for operation, one in by_base.get(base, {}).items() if operation in joint)
        if len(chosen) == len(joint):
            part = parts.setdefault(tuple(_key(one) for one in chosen), _Part(chosen, set()))
            part.places |= {p for p in (*ours, *_places(rounds.torchs)) if _base(p) == base and joint >= {*p.operations}}
    return iter(parts.values())


def _joint_operations(steps: Iterable[StepTimes]) -> Iterator[tuple[_Base, frozenset[Operation]]]:
    """Yield, for each module and problem, the operations that torch computes in one call, or in calls that overlap."""
    joint: dict[_Base, list[frozenset[Operation]]] = {}
    for place in _places(steps):
        base = _base(place)
        if base is not None and place.operations:
            known = joint.setdefault(base, [])
            overlapping = [operations for operations in known if operations & {*place.operations}]
            joint[base] = [o for o in known if o not in overlapping] + [frozenset(place.operations).union(*overlapping)]
    for base, every in joint.items():
        for operations in every:
            yield base, operations


def _places(steps: Iterable[StepTimes]) -> set[Place]:
    return {place for times in steps for place in times.convolutions}


def _base(place: Place) -> _Base | None:
    return None if place.problem is None else (place.module, place.problem, place.batch_size)


def _key(tuned: TunedProblem) -> _Key:
    return tuned.problem, tuned.batch_size, tuned.configuration.micro_configs


def torchs_own(tuned: TunedProblem, why: str) -> TunedProblem:
    """Return the choice of torch's own instead of what was tuned."""
    n = tuned.batch_size
    measured = baseline_of(tuned.measurements, n)
    time_s = tuned.time_s if tuned.baseline_s is None else tuned.baseline_s
    own = measured or Configuration((MicroConfig(TORCHS_OWN, n),), time_s, 0)
    reason = f"torch's own: {why}; {tuned.configuration} was chosen by tuning"
    return replace(tuned, configuration=own, time_s=time_s, reason=reason)


def _withdrawn(
    tuned: TunedModules, step: InTurns, may_run_torchs_own: Callable[[TunedProblem], bool]
) -> TunedModules:
    why = f"the step is slower with all that was chosen, {step.in_words}"
    return {
        name: tuple(
            torchs_own(one, why) if not one.configuration.is_baseline and may_run_torchs_own(one) else one
            for one in every
        )
        for name, every in tuned.items()
    }


def _over_tuned(rounds: _Rounds, tuned: TunedModules) -> float | None:
    """Return the median, over calls of what was tuned, of seconds in place over those that tuning measured."""
    ratios: list[float] = []
    for part in _parts(rounds, tuned):
        measured = part.in_place(rounds)
        if measured is None:
            continue
        alone = [(median(part.seconds(rounds.ours, one.problem.operation)), one.time_s) for one in part.tuned]
        ...
    return median(ratios) if ratios else None
