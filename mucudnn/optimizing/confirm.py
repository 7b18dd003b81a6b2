"""Confirmation of tuned choices in steps of the model, to restore torch's own convolution where it is faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median

from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Configuration, MicroConfig
from mucudnn.core.torch_settings import TORCHS_OWN
from mucudnn.core.values import format_seconds
from mucudnn.optimizing.confirmation import Confirmation, InTurns, PutBack
from mucudnn.optimizing.steps import ModelSteps, Rounds, StepTimes, TunedModules
from mucudnn.tuning.choose import baseline_of
from mucudnn.tuning.result import TunedProblem, relative_error_of

_Layer = tuple[ConvProblem, int, bool]  # forward problem, batch size, whether in the backward pass

SHORTEST_S, LONGEST_S = 0.002, 2.5  # range of the step time for automatic confirmation


def confirm(steps: ModelSteps, *, automatic: bool = False) -> Confirmation | str:
    """Time interleaved steps of the model; restore torch's convolution where ours is slower by more than the noise.

    First each layer's forward and backward pass is compared inside the step, then the whole step with the remaining
    choices. If that step is slower, torch's convolution is restored everywhere, except where its workspace would exceed
    the limit. Choices without a clear result are kept. Rounds disturbed by other processes are repeated; if the machine
    stays busy, they change no choice. automatic: whether to skip the comparison, returning the reason, if a step is too
    short to measure or too long. Ranks run the same number of steps, and all decide by the times of rank 0.

    Raises any error of a step; the model then keeps the choices that it ran last.
    """
    steps.wait()
    torchs_s = _warm_up(steps)
    if automatic and not SHORTEST_S <= torchs_s <= LONGEST_S:
        return f"a step takes {format_seconds(torchs_s)}; Config(confirm=True) confirms anyway"
    recorded = Rounds.run(steps, recorded=True)
    lost = _lost(steps, steps.ranks.of_rank_0(_layers(recorded)))
    put_back = _put_back(steps, lost)
    if steps.ranks.of_rank_0(bool(put_back)):
        recorded = Rounds.run(steps, recorded=True)
    over_tuned = _over_tuned(recorded, steps.tuned)
    runs_again = steps.ranks.of_rank_0(recorded.is_slowed and not recorded.is_disturbed)
    last = Rounds.run(steps, recorded=False) if runs_again else recorded
    load = max((rounds.load for rounds in (recorded, last) if rounds.load is not None), default=None)
    found = steps.ranks.of_rank_0(
        Confirmation(last.steps, recorded.steps, recorded.convolutions, over_tuned, load=load)
    )
    is_withdrawn = found.step.is_slower and not found.is_disturbed
    if is_withdrawn:
        why = f"the step was slower with the tuned choices, {found.step.in_words}"
        _put_back(steps, _ours(steps, lambda one: why))
    kept = tuple(one for one in lost if one not in put_back)
    return replace(found, put_back=tuple(put_back), is_withdrawn=is_withdrawn, kept=kept)


def _warm_up(steps: ModelSteps) -> float:
    """Run one step with torch's convolutions and one with ours as a warm-up.

    Returns the seconds of torch's step on rank 0: the minimum of two runs if the step is short.
    """
    first_s = steps.ranks.of_rank_0(steps.run(ours=False, recorded=False).time_s)
    steps.run(ours=True, recorded=True)
    if first_s > 1:
        return first_s
    return steps.ranks.of_rank_0(min(first_s, steps.run(ours=False, recorded=True).time_s))


@dataclass(frozen=True, slots=True)
class _InPlace:
    """Times of one pass of all layers with the same problem in a step. operations: those that the pass computes."""

    operations: frozenset[Operation]
    in_turns: InTurns
    loses: bool

    def __str__(self) -> str:
        names = ", with ".join(str(one).replace("_", " ") for one in Operation if one in self.operations)
        return f"{self.in_turns}{f' ({names})' if len(self.operations) > 1 else ''}"


def _layers(rounds: Rounds) -> dict[_Layer, _InPlace]:
    """Compare the times of torch's convolutions with ours in each pass of each layer; equal layers are added up."""
    operations: dict[_Layer, set[Operation]] = {}
    for times in rounds.ours:
        for place in times.convolutions:
            if place.problem is not None:
                layer = place.problem, place.batch_size, place.in_backward
                operations.setdefault(layer, set()).update(place.operations)
    found = {}
    for layer, computed in operations.items():
        torchs_s, ours_s = ([_seconds(layer, times) for times in side] for side in (rounds.torchs, rounds.ours))
        if all((*torchs_s, *ours_s)):
            in_turns = InTurns.of(torchs_s, ours_s)
            loses = in_turns.is_slower and not rounds.is_disturbed
            found[layer] = _InPlace(frozenset(computed), in_turns, loses)
    return found


def _seconds(layer: _Layer, times: StepTimes) -> float:
    of_layer = (
        spent.time_s
        for place, spent in times.convolutions.items()
        if (place.problem, place.batch_size, place.in_backward) == layer
    )
    return sum(of_layer)


def _lost(steps: ModelSteps, layers: Mapping[_Layer, _InPlace]) -> list[PutBack]:
    """Note in all choices how long their layers took in the step; return the choices that lost."""

    def in_place(one: TunedProblem) -> _InPlace | None:
        forward = one.problem.with_operation(Operation.FORWARD)
        passes = (layers.get((forward, one.batch_size, in_backward)) for in_backward in (False, True))
        return next((found for found in passes if found and one.problem.operation in found.operations), None)

    def why(one: TunedProblem) -> str | None:
        found = in_place(one)
        return f"slower in the step, {found.in_turns.in_words}" if found is not None and found.loses else None

    steps.put_in(
        {
            name: tuple(replace(one, in_place=str(in_place(one) or "")) for one in every)
            for name, every in steps.tuned.items()
        }
    )
    return _ours(steps, why)


def _ours(steps: ModelSteps, why: Callable[[TunedProblem], str | None]) -> list[PutBack]:
    """Return the problems for which torch's own does not run, and for which there is a reason why it should."""
    every = ((name, one) for name, of_module in steps.tuned.items() for one in of_module)
    return [
        PutBack(name, one.problem, one.batch_size, reason)
        for name, one in every
        if not one.configuration.is_baseline and (reason := why(one)) is not None
    ]


def _put_back(steps: ModelSteps, lost: list[PutBack]) -> list[PutBack]:
    """Restore torch's own convolution for these problems, where the limit allows it; return those restored."""
    why = {(one.module, one.problem, one.batch_size): one for one in lost}
    done = []
    after: dict[str, tuple[TunedProblem, ...]] = {}
    for name, every in steps.tuned.items():
        chosen = []
        for one in every:
            found = why.get((name, one.problem, one.batch_size))
            if found is not None and steps.may_run_torchs_own(one):
                done.append(found)
                one = _torchs_own(one, found.why)
            chosen.append(one)
        after[name] = tuple(chosen)
    steps.put_in(after)
    return done


def _torchs_own(tuned: TunedProblem, why: str) -> TunedProblem:
    n = tuned.batch_size
    time_s = tuned.time_s if tuned.baseline_s is None else tuned.baseline_s
    own = baseline_of(tuned.measurements, n) or Configuration((MicroConfig(TORCHS_OWN, n),), time_s, 0)
    reason = f"PyTorch's own: {why}; tuning chose {tuned.configuration}"
    error = relative_error_of(own, tuned.measurements)
    return replace(tuned, configuration=own, time_s=time_s, relative_error=error, reason=reason)


def _over_tuned(rounds: Rounds, tuned: TunedModules) -> float | None:
    """Return the median, over the tuned calls, of the time inside a step divided by the time measured in tuning."""
    tuned_s = {(one.problem, one.batch_size): one.time_s for every in tuned.values() for one in every}
    ratios: list[float] = []
    for times in rounds.ours:
        for place, spent in times.convolutions.items():
            if (problem := place.problem) is not None:
                each_s = [tuned_s.get((problem.with_operation(one), place.batch_size)) for one in place.operations]
                known_s = [seconds for seconds in each_s if seconds is not None]
                if len(known_s) == len(each_s):
                    ratios += [spent.time_s / (spent.calls * sum(known_s))] * spent.calls
    return median(ratios) if ratios else None
