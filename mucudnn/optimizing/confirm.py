"""Confirmation of tuned choices in steps of the model, to restore torch's own convolution where it is faster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from mucudnn.optimizing.in_place import Place
from mucudnn.optimizing.steps import ModelSteps, Rounds, StepTimes, TunedModules
from mucudnn.tuning.choose import baseline_of
from mucudnn.tuning.confirmation import Confirmation, InPlace, InTurns, PutBack
from mucudnn.tuning.result import TunedProblem, relative_error_of
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.results import Configuration, MicroConfig
from mucudnn.words.torch_settings import TORCHS_OWN
from mucudnn.words.units import format_seconds

_Key = tuple[ConvProblem, int, tuple[MicroConfig, ...]]  # problem, batch size, chosen micro-configs
_Base = tuple[str | None, ConvProblem, int]  # module, forward problem, batch size

SHORTEST_S, LONGEST_S = 0.002, 2.5  # range of the step time for automatic confirmation


def confirm(steps: ModelSteps, *, automatic: bool = False) -> Confirmation | str:
    """Time interleaved steps of the model; restore torch's convolution where ours is slower by more than the noise.

    First each convolution is compared inside the step, then the whole step with the remaining choices. If that step is
    slower, torch's convolution is restored everywhere, except where its workspace would exceed the limit. Choices
    without a clear result are kept. Rounds disturbed by other processes are repeated; if the machine stays busy, they
    change no choice. automatic: whether to skip the comparison, returning the reason, if a step is too short to measure
    or too long. Ranks that run the steps together run the same number of them, even on different kinds of device.

    Raises any error of a step; the model then keeps the choices that it ran last.
    """
    steps.wait()
    torchs_s = _warm_up(steps)
    if automatic and steps.ranks.anywhere(not SHORTEST_S <= torchs_s <= LONGEST_S):
        return f"a step takes {format_seconds(torchs_s)}; Config(confirm=True) confirms anyway"
    recorded = Rounds.run(steps, recorded=True)
    lost = _put_back_losers(steps, _with_in_place(recorded, steps.tuned))
    if steps.ranks.anywhere(any(one.is_allowed for one in lost)):
        recorded = Rounds.run(steps, recorded=True)
    over_tuned = _over_tuned(recorded, steps.tuned)
    runs_again = steps.ranks.anywhere(recorded.is_slowed and not recorded.is_disturbed)
    last = Rounds.run(steps, recorded=False) if runs_again else recorded
    load = max((rounds.load for rounds in (recorded, last) if rounds.load is not None), default=None)
    found = Confirmation(last.steps, recorded.steps, recorded.convolutions, over_tuned, load=load)
    return _concluded(steps, lost, found)


def confirm_again(steps: ModelSteps, in_place: Iterable[InPlace | None], found: Confirmation) -> Confirmation:
    """Apply a confirmation that the database has stored, without running steps of the model again.

    in_place: the times inside a step, or None, in the order of the tuned problems.
    """
    each = iter(in_place)
    tuned = {name: tuple(replace(one, in_place=next(each)) for one in every) for name, every in steps.tuned.items()}
    return _concluded(steps, _put_back_losers(steps, tuned), found)


def _put_back_losers(steps: ModelSteps, tuned: TunedModules) -> list[PutBack]:
    """Restore torch's convolution where the tuned choice is slower within the model and the limit allows it.

    Returns all slower choices, whether replaced or not.
    """
    lost = [
        PutBack(
            name,
            one.problem,
            one.batch_size,
            f"slower in the step, {one.in_place.call.in_words}",
            steps.may_run_torchs_own(one),
        )
        for name, every in tuned.items()
        for one in every
        if one.in_place is not None and one.in_place.loses and not one.configuration.is_baseline
    ]
    _put_back(steps, tuned, [one for one in lost if one.is_allowed])
    return lost


def _concluded(steps: ModelSteps, lost: Sequence[PutBack], found: Confirmation) -> Confirmation:
    """Restore torch's convolutions everywhere if the tuned step is still slower than torch's.

    Returns ``found`` together with everything that was restored.
    """
    is_withdrawn = found.step.is_slower and not found.is_disturbed
    if is_withdrawn:
        why = f"the step was slower with the tuned choices, {found.step.in_words}"
        tuned = steps.tuned
        every = ((name, one) for name, of_module in tuned.items() for one in of_module)
        withdrawn = [
            PutBack(name, one.problem, one.batch_size, why)
            for name, one in every
            if not one.configuration.is_baseline and steps.may_run_torchs_own(one)
        ]
        _put_back(steps, tuned, withdrawn)
    return replace(
        found,
        put_back=tuple(one for one in lost if one.is_allowed),
        is_withdrawn=is_withdrawn,
        kept=tuple(one for one in lost if not one.is_allowed),
    )


def _put_back(steps: ModelSteps, tuned: TunedModules, put_back: Sequence[PutBack]) -> None:
    """Make the modules run the tuned choices, except torch's own convolution for the problems in ``put_back``."""
    why = {(one.module, one.problem, one.batch_size): one.why for one in put_back}

    def after(name: str, one: TunedProblem) -> TunedProblem:
        reason = why.get((name, one.problem, one.batch_size))
        return one if reason is None else _torchs_own(one, reason)

    steps.put_in({name: tuple(after(name, one) for one in every) for name, every in tuned.items()})


def _warm_up(steps: ModelSteps) -> float:
    """Run one step with torch's convolutions and one with ours as a warm-up.

    Returns the seconds of torch's step: the minimum of two runs if the step is short.
    """
    first_s = steps.run(ours=False, recorded=False).time_s
    steps.run(ours=True, recorded=True)
    is_short = steps.ranks.anywhere(first_s <= 1)
    return min(first_s, steps.run(ours=False, recorded=True).time_s) if is_short else first_s


@dataclass(frozen=True, slots=True)
class _Part:
    """Convolution calls that are compared as a group, since their modules and tuned choices are equal.

    tuned: the choice for each operation. places: places of torch's calls and ours in the model, in the same order in
    every process, so that floating-point sums are equal.
    """

    tuned: tuple[TunedProblem, ...]
    places: dict[Place, None]

    def in_place(self, rounds: Rounds) -> dict[_Key, InPlace]:
        """Compare the times of torch's convolutions with ours, and mark the operations for which ours are slower.

        Returns an empty dict if a step had no such call.
        """
        torchs_s, ours_s = (self.seconds(steps) for steps in (rounds.torchs, rounds.ours))
        calls = median(self._calls(times) for times in rounds.torchs)
        if not calls or not all((*torchs_s, *ours_s)):
            return {}
        per_call = ([s / calls for s in side] for side in (torchs_s, ours_s))
        in_turns = InTurns.of(*per_call)
        loses = self._losers(rounds) if in_turns.is_slower and not rounds.is_disturbed else []
        operations = tuple(one.problem.operation for one in self.tuned)
        return {_key(one): InPlace(operations, in_turns, one in loses) for one in self.tuned}

    def seconds(self, steps: Iterable[StepTimes], operation: Operation | None = None) -> list[float]:
        """Return the seconds of this part's calls in each step, or of calls that compute only ``operation``."""
        places = [place for place in self.places if operation is None or place.operations == (operation,)]
        return [sum(t.convolutions[place].time_s for place in places if place in t.convolutions) for t in steps]

    def _calls(self, times: StepTimes) -> int:
        """Return how often a step calls the first operation of this part."""
        first = self.tuned[0].problem.operation
        return sum(
            times.convolutions[p].calls for p in self.places if first in p.operations and p in times.convolutions
        )

    def _losers(self, rounds: Rounds) -> list[TunedProblem]:
        """Return the operations for which torch's convolution is to be restored, given that this part is slower.

        Torch may compute several operations in one call. The time of that call is shared among them in proportion to
        torch's times in tuning. Operations that exceed their share lose, or at least the one with the largest excess.
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


def _with_in_place(rounds: Rounds, tuned: TunedModules) -> TunedModules:
    """Return the tuned choices with the times that their convolutions took inside steps of the model."""
    measured: dict[_Key, InPlace] = {}
    for part in _parts(rounds, tuned):
        for key, in_place in part.in_place(rounds).items():
            if key not in measured or not measured[key].loses:  # a choice that loses at one place is withdrawn at all
                measured[key] = in_place
    return {
        name: tuple(replace(one, in_place=measured.get(_key(one))) for one in every) for name, every in tuned.items()
    }


def _parts(rounds: Rounds, tuned: TunedModules) -> Iterator[_Part]:
    """Yield groups of convolution calls with equal modules and equal choices, by the operations of one torch call."""
    by_base: dict[_Base, dict[Operation, TunedProblem]] = {}
    for name, every in tuned.items():
        for one in every:
            for module in (name, None):  # None: calls of unknown modules count for the first module with this problem
                base = module, one.problem.with_operation(Operation.FORWARD), one.batch_size
                by_base.setdefault(base, {}).setdefault(one.problem.operation, one)
    places = _by_base((*rounds.torchs, *rounds.ours))
    parts: dict[tuple[_Key, ...], _Part] = {}
    for base, joint in _joint_operations(rounds.torchs):
        chosen = tuple(one for operation, one in by_base.get(base, {}).items() if operation in joint)
        if len(chosen) == len(joint):
            part = parts.setdefault(tuple(_key(one) for one in chosen), _Part(chosen, {}))
            part.places.update(dict.fromkeys(place for place in places[base] if joint >= {*place.operations}))
    return iter(parts.values())


def _joint_operations(steps: Sequence[StepTimes]) -> Iterator[tuple[_Base, frozenset[Operation]]]:
    """Yield, for each module and problem, the operations that torch computes in one call or in overlapping calls."""
    for base, places in _by_base(steps).items():
        joint: list[frozenset[Operation]] = []
        for operations in dict.fromkeys(frozenset(place.operations) for place in places if place.operations):
            overlapping = [known for known in joint if known & operations]
            joint = [*(known for known in joint if known not in overlapping), operations.union(*overlapping)]
        for operations in joint:
            yield base, operations


def _by_base(steps: Sequence[StepTimes]) -> dict[_Base, list[Place]]:
    found: dict[_Base, list[Place]] = {}
    for place in dict.fromkeys(place for times in steps for place in times.convolutions):
        if place.problem is not None:
            found.setdefault((place.module, place.problem, place.batch_size), []).append(place)
    return found


def _key(tuned: TunedProblem) -> _Key:
    return tuned.problem, tuned.batch_size, tuned.configuration.micro_configs


def _torchs_own(tuned: TunedProblem, why: str) -> TunedProblem:
    n = tuned.batch_size
    time_s = tuned.time_s if tuned.baseline_s is None else tuned.baseline_s
    own = baseline_of(tuned.measurements, n) or Configuration((MicroConfig(TORCHS_OWN, n),), time_s, 0)
    reason = f"PyTorch's own: {why}; tuning chose {tuned.configuration}"
    error = relative_error_of(own, tuned.measurements)
    return replace(tuned, configuration=own, time_s=time_s, relative_error=error, reason=reason)


def _over_tuned(rounds: Rounds, tuned: TunedModules) -> float | None:
    """Return the median, over the tuned calls, of the time inside a step divided by the time measured in tuning."""
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
