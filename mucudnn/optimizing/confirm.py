"""Confirmation of tuned choices in steps of the model, to restore torch's own convolution where it is faster.

Steps of the model are timed in turns with torch's convolutions and with ours, layers that are slower get torch's back,
and the whole step is compared again. The steps are the user's, or steps on the sample input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from mucudnn.core.answers import TunedProblem, relative_error_of
from mucudnn.core.config import Config
from mucudnn.core.errors import SharingError, first_line, raise_interruption, warn
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Comparison, Configuration, MicroConfig, is_busy
from mucudnn.core.team import ALONE, Team
from mucudnn.core.terminal import Progress
from mucudnn.core.torch_settings import TORCHS_OWN
from mucudnn.core.values import format_bytes, format_seconds, grouped
from mucudnn.kernels.memory import give_back_cache
from mucudnn.measuring.clocks import wall_clock
from mucudnn.measuring.heap import (
    FAULT_S,
    LEAST_GAIN,
    HeapComparison,
    is_heap_kept,
    keep_heap,
    why_fixed,
    with_resident_bytes,
)
from mucudnn.measuring.load import watch_of
from mucudnn.measuring.quiet import Quiet
from mucudnn.measuring.turns import Rounds
from mucudnn.optimizing.steps import (
    LEAST_CHANGE,
    InPlaceTimes,
    Layer,
    ModelSteps,
    PutIn,
    Step,
    StepTimes,
    TimedRounds,
    TunedModules,
    compared,
    load_of,
    step_s,
    steps_in_turns,
)
from mucudnn.running.modules import TunedModule
from mucudnn.running.norms import TunedNorm
from mucudnn.tuning.choose import baseline_of, with_noise
from mucudnn.tuning.model_state import OwnStep, is_training, undisturbed

SHORTEST_S, LONGEST_S = 0.002, 2.5  # range of the step time for automatic confirmation
RECORD_S = 6e-5  # upper bound on the time to record a call, reached by torch's own
HEAP_ROUNDS = Rounds(2, 9, 4.0, sure=3)  # of steps with and without a kept heap, each after one that is not timed
NEGLIGIBLE = 0.01  # share of recording in a step up to which recorded steps represent the user's


@dataclass(frozen=True, slots=True)
class PutBack:
    """A problem of a module for which ours is slower in the step, with the reason."""

    module: str
    problem: ConvProblem
    batch_size: int
    why: str

    def __str__(self) -> str:
        return f"{self.module or 'the model itself'}: {self.problem}, batch {self.batch_size}: {self.why}"


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Comparison of a model's own step with torch's convolutions and with ours, in turns. Prints as one line.

    step: the whole step.
    recorded: steps in which each convolution is timed, with a small overhead.
    convolutions: summed time of all convolutions in such a step.
    put_back: problems for which torch's own was restored, since ours was slower in place.
    is_withdrawn: whether torch's own was restored everywhere, since the step was still slower.
    kept: problems for which ours stays all the same, since torch's own needs more workspace than the limit.
    load: as in ``Measurement``.
    heap: the comparison of steps with a kept heap, under which the others ran if it was faster; None if it was not
    compared.
    groups: steps with norms as groups, compared with steps without; None if no norm runs as a group.
    peak_bytes: most bytes that torch allocates in a step, with torch's operators and with ours; 0 if not counted.
    """

    step: Comparison
    recorded: Comparison
    convolutions: Comparison
    put_back: tuple[PutBack, ...] = ()
    is_withdrawn: bool = False
    kept: tuple[PutBack, ...] = ()
    load: float | None = None
    heap: HeapComparison | None = None
    groups: Comparison | None = None
    peak_bytes: tuple[int, int] = 0, 0

    @property
    def is_disturbed(self) -> bool:
        """Whether the machine was too busy for a conclusive comparison of steps."""
        return is_busy(self.load)

    @property
    def share(self) -> float:
        """Share of the convolutions in the time of torch's recorded steps, from 0 to 1."""
        return min(1.0, self.convolutions.baseline_s / self.recorded.baseline_s)

    def __str__(self) -> str:
        step = self.step
        verdict = ", no clear difference"
        if step.is_faster(LEAST_CHANGE):
            verdict = ""
        elif step.is_slower(LEAST_CHANGE):
            verdict = ", slower"
        before, after = (
            f"{seconds * 1e3:.0f}" if seconds >= 0.0995 else f"{seconds * 1e3:.3g}"
            for seconds in (step.baseline_s, step.time_s)
        )
        # the speedup of the step if convolutions took no time (Amdahl's law)
        bound = "" if self.share == 1 else f", so at most {1 / (1 - self.share):.2f}x"
        parts = [
            f"step {before} -> {after} ms, {step.speedup:.2f}x ± {step.noise:.2f}{verdict}",
            f"convolutions {self.convolutions.speedup:.2f}x",
            f"{100 * self.share:.0f} % of the step were convolutions{bound}",
        ]
        if self.groups is not None:
            is_slower = self.groups.is_slower(LEAST_CHANGE)
            why = ", slower, so that norms are PyTorch's own" if is_slower and not self.is_disturbed else ""
            parts.append(f"norms as groups {self.groups.speedup:.2f}x ± {self.groups.noise:.2f}{why}")
        if all(self.peak_bytes):
            parts.append(f"peak {' -> '.join(map(format_bytes, self.peak_bytes))}")
        if self.is_withdrawn:
            parts.append(f"PyTorch's own runs {'where the limit allows it' if self.kept else 'everywhere'}")
        if self.is_disturbed:
            parts.append(f"measured on a busy machine, {self.load:.0%} of its speed was missing")
        return "; ".join(parts)

    def details(self) -> str:
        """Return the summary line of the confirmation and its details, one per line."""
        lines = [str(self), *([] if self.heap is None else [str(self.heap)])]
        lines += [f"PyTorch's own again in {problem}" for problem in self.put_back]
        lines += [f"PyTorch's own needs more than the workspace limit in {problem}" for problem in self.kept]
        return "\n".join(lines)


def confirm_model(
    model: nn.Module,
    sample_input: Any,
    config: Config,
    put_in: PutIn,
    *,
    device_type: str,
    step: Step | None = None,
    team: Team = ALONE,
    progress: Progress,
) -> Confirmation | None:
    """Time interleaved steps with torch's convolutions and with ours, and restore torch's where ours are slower.

    put_in: applies choices to a module.
    step: the user's step, or None for a forward and backward pass on the sample input, in ``eval()`` mode a forward
    pass.
    team: the ranks that tuned the model together. All of them must call this function; they run the same number of
    steps, rank 0 decides for all, and the team is closed.

    Returns the confirmation (the result of the comparison), which is also set on every module as ``confirmation``.
    Returns None if there was nothing to confirm, if torch's convolution must not run somewhere, or, after a warning, if
    a step failed on any rank; the tuned choices then stay. What steps change in the model is put back.

    Raises ``SharingError`` if a rank has ended, or has no ``step`` while others have one.
    """
    tuned_modules = {name: module for name, module in model.named_modules() if isinstance(module, TunedModule)}
    modules = {name: module for name, module in tuned_modules.items() if module.tuned}
    norms = {
        name: module
        for name, module in tuned_modules.items()
        if isinstance(module, TunedNorm) and module.choices is not None
    }
    try:
        with team.propagate_errors():
            has_hooks = any(p._post_accumulate_grad_hooks or p._backward_hooks for p in model.parameters())
            outcome: Confirmation | str | None = _agreed_reason(
                model, {**modules, **norms}, config, team, step, has_hooks=has_hooks
            )
            if outcome is None:
                progress("confirming in the model's own step", 1.0)
                steps = ModelSteps(
                    model=model,
                    modules=modules,
                    norms=norms,
                    tuned={name: module.tuned for name, module in modules.items()},
                    step=step or OwnStep(sample_input),
                    config=config,
                    into_module=put_in,
                    clock=wall_clock(device_type),
                    times=InPlaceTimes(device_type),
                    quiet=Quiet(watch_of(device_type), progress, at=1.0),
                    ranks=team,
                )
                with undisturbed(model, with_values=step is not None or has_hooks):  # which may train it
                    outcome = confirm(steps, automatic=step is None and not config.confirm)
    except Exception as error:
        raise_interruption(error)
        if isinstance(error, SharingError) and not error.failures:
            raise
        give_back_cache()
        if isinstance(error, SharingError):
            why = "; ".join(f"rank {rank}: {failure}" for rank, failure in error.failures.items())
        else:
            why = f"{type(error).__name__}: {first_line(error)}"
        outcome = f"the step failed: {why}"
        warn(f"the tuned choices could not be confirmed in the model's own step: {why}", RuntimeWarning)
    confirmation, unconfirmed = (None, outcome) if isinstance(outcome, str) else (outcome, None)
    for module in (*modules.values(), *norms.values()):
        vars(module).update(confirmation=confirmation, unconfirmed=unconfirmed)
    if confirmation is not None:
        progress(str(confirmation), 1.0)
    return confirmation


def _agreed_reason(
    model: nn.Module,
    modules: Mapping[str, TunedModule],
    config: Config,
    ranks: Team,
    step: Step | None,
    *,
    has_hooks: bool,
) -> str | None:
    """Return the reason why no steps of this model are compared, the same on all ranks; None to compare them."""
    if config.confirm is False:
        return "confirm=False"
    if not ranks.anywhere(holds=any(module.choices is not None for module in modules.values())):
        return "PyTorch's own operators run everywhere"
    if ranks.anywhere(holds=any(tuned.barred for module in modules.values() for tuned in module.tuned)):
        return "PyTorch's own convolution is barred in some layers, so there is no step to compare with"
    ranks.require_same("step", "None" if step is None else "given", "give it on all ranks, or on none")
    # Cooperating processes must run the same number of steps, and gradient hooks may train the model
    trains = is_training(model)
    runs_unasked = trains and not has_hooks and (ranks.are_several or not _is_one_of_several())
    if ranks.everywhere(holds=bool(config.confirm) or step is not None or runs_unasked):
        return None
    if not trains:
        return "the model is in eval mode; Config(confirm=True) confirms anyway"
    if has_hooks:
        return "its parameters have gradient hooks, which may train the model; Config(confirm=True) confirms anyway"
    return "this process is one of several that do not tune together; Config(confirm=True) confirms anyway"


def _is_one_of_several() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def confirm(steps: ModelSteps, *, automatic: bool = False) -> Confirmation | str:
    """Time interleaved steps of the model; restore torch's convolution where ours is slower by more than the noise.

    First steps with a kept heap are compared with others, and it is kept if they are faster. Then each layer's forward
    and backward pass is compared inside the step, then the whole step with the remaining choices. If that step is
    slower, torch's convolution is restored everywhere, except where its workspace would exceed the limit. Choices
    without a clear result are kept. Rounds disturbed by other processes are repeated; if the machine stays busy, they
    change no choice. Ranks run the same number of steps, and all decide by the times of rank 0.

    automatic: whether to skip the comparison, returning the reason, if a step is too short to measure or too long.

    Raises any error of a step; the model then keeps the choices that it ran last.
    """
    of_rank_0 = steps.ranks.of_rank_0

    # Warm up, and see whether a step can be compared at all.
    steps.quiet.wait()
    torchs_s = of_rank_0(steps.run(ours=False, recorded=False).time_s)
    steps.run(ours=True, recorded=True)
    if torchs_s <= (2 * LONGEST_S if automatic else 1):  # the first step takes longer than others
        torchs_s = of_rank_0(min(torchs_s, steps.run(ours=False, recorded=True).time_s))
    if automatic and not SHORTEST_S <= torchs_s <= LONGEST_S:
        return f"a step takes {format_seconds(torchs_s)}; Config(confirm=True) confirms anyway"
    heap = compare_heaps(steps)

    # Compare steps with norms as groups with steps without, and run PyTorch's own norms where groups are slower.
    groups = _compare_groups(steps)

    # Compare the passes of each layer in the step, and put torch's own back where they are slower.
    tuned_rounds = steps_in_turns(steps, steps.torchs_and_ours(recorded=True))
    passes, is_disturbed = of_rank_0((_passes(tuned_rounds), is_busy(load_of(tuned_rounds))))
    slower = [] if is_disturbed else _slower_in_place(steps.tuned, passes)
    steps.put_in(_changed(steps.tuned, lambda _, tuned: replace(tuned, in_place=_in_words(_pass_of(tuned, passes)))))
    put_back, kept = _put_back(steps, slower)

    # Compare the whole step with the choices that remain: again if there are others, or recording slows it.
    recorded = tuned_rounds
    if of_rank_0(bool(put_back)):
        recorded = steps_in_turns(steps, steps.torchs_and_ours(recorded=True))
    is_slowed = _is_slowed(recorded) and not is_busy(load_of(recorded))
    whole = steps_in_turns(steps, steps.torchs_and_ours(recorded=False)) if of_rank_0(is_slowed) else recorded
    confirmation = of_rank_0(
        Confirmation(
            step=compared(whole, step_s),
            recorded=compared(recorded, step_s),
            convolutions=compared(recorded, _convolutions_s),
            load=load_of(recorded, whole),
            heap=heap,
            groups=groups,
        )
    )

    # Where the whole step is slower, put torch's own back everywhere.
    is_withdrawn = confirmation.step.is_slower(LEAST_CHANGE) and not confirmation.is_disturbed
    if is_withdrawn:
        why = f"the step was slower with the tuned choices, {with_noise(confirmation.step)}"
        ours = [PutBack(name, tuned.problem, tuned.batch_size, why) for name, tuned in _ours(steps.tuned)]
        _, kept = _put_back(steps, ours)
    return replace(
        confirmation,
        put_back=tuple(put_back),
        is_withdrawn=is_withdrawn,
        kept=tuple(kept),
        peak_bytes=of_rank_0((steps.peak_bytes(ours=False), steps.peak_bytes(ours=True))),
    )


def compare_heaps(steps: ModelSteps) -> HeapComparison | None:
    """Compare steps of the tuned model with and without a kept heap, and keep the heap if that is faster.

    Where the times are not clear, or other programs disturbed them, the kernel's share of the processor time decides
    whether the gain is real.

    Returns None, and changes nothing, if the config or the C library decides, if the heap is kept already, if the peak
    of memory must not rise, or if a step has too few page faults to gain from it, and spends too little time in the
    kernel. All ranks do the same.
    """
    config, of_rank_0 = steps.config, steps.ranks.of_rank_0
    is_open = config.keep_heap is None and not config.has_headroom_limit and not is_heap_kept()
    if not steps.ranks.everywhere(holds=is_open and steps.times.device_type == "cpu" and why_fixed() is None):
        return None
    trial = steps.run(ours=True, recorded=False)
    has_few = trial.faults * FAULT_S < LEAST_GAIN * trial.time_s  # of which each may zero a huge page
    if of_rank_0(has_few and trial.kernel_share < LEAST_GAIN):
        return None

    def run(*, kept: bool) -> StepTimes:
        keep_heap(kept=kept)
        steps.run(ours=True, recorded=False)  # the heap grows, or shrinks
        times, _, peak_bytes = with_resident_bytes(partial(steps.run, ours=True, recorded=False))
        return replace(times, peak_bytes=peak_bytes)

    is_kept = False
    try:
        rounds = steps_in_turns(steps, (partial(run, kept=False), partial(run, kept=True)), HEAP_ROUNDS)
        step = compared(rounds, step_s)
        without, within = zip(*rounds, strict=True)
        saved = median(times.kernel_share for times in without) - median(times.kernel_share for times in within)
        is_clear = saved >= LEAST_GAIN or (step.is_faster(LEAST_GAIN) and not is_busy(load_of(rounds)))
        is_kept = of_rank_0(is_clear and step.speedup > 1 + LEAST_GAIN)
    finally:
        keep_heap(kept=is_kept)
    return HeapComparison(
        step,
        (round(median(times.faults for times in without)), round(median(times.faults for times in within))),
        (max(times.peak_bytes for times in without), max(times.peak_bytes for times in within)),
        is_kept,
    )


def _compare_groups(steps: ModelSteps) -> Comparison | None:
    """Compare steps with norms as groups with steps without them, and take the groups out if they are slower.

    Before that, they are tried with results that are kept, and not computed again in the backward pass.

    Returns the last comparison; None if no norm runs as a group on any rank.
    """
    if not steps.ranks.anywhere(holds=bool(steps.norms)):
        return None
    without, within = (partial(steps.run, ours=True, recorded=False, groups=groups) for groups in (False, True))
    choices = [norm.choices for norm in steps.norms.values() if norm.choices is not None]
    while True:
        rounds = steps_in_turns(steps, (without, within))
        comparison, is_disturbed = steps.ranks.of_rank_0((compared(rounds, step_s), is_busy(load_of(rounds))))
        if is_disturbed or not comparison.is_slower(LEAST_CHANGE):
            return comparison
        if not steps.ranks.anywhere(holds=any(of_norm.computes_again for of_norm in choices)):
            break
        for of_norm in choices:
            of_norm.computes_again = of_norm.defers_activations = False
    for norm in steps.norms.values():
        vars(norm).update(choices=None, why_torchs=f"steps were slower, {with_noise(comparison)}")
    for module in steps.modules.values():
        vars(module).update(computes_moments=False, normalizes=frozenset())
    steps.put_in(steps.tuned)
    return comparison


Passes = Mapping[Layer, tuple[frozenset[Operation], Comparison]]  # what a layer's pass computes, and all its times


def _passes(rounds: TimedRounds) -> Passes:
    """Compare the times of torch's convolutions with ours in each pass of each layer; equal layers are added up."""
    calls = [call for _, ours in rounds for call in ours.convolutions if call.problem is not None]
    operations = grouped((call.layer, operation) for call in calls for operation in call.operations)
    passes = {}
    for layer, computed in operations.items():
        seconds = partial(_convolutions_s, layer=layer)
        if all(seconds(times) for pair in rounds for times in pair):
            passes[layer] = frozenset(computed), compared(rounds, seconds)
    return passes


def _pass_of(tuned: TunedProblem, passes: Passes) -> tuple[frozenset[Operation], Comparison | None]:
    """Return the pass in which a tuned problem was computed; None without one."""
    forward = tuned.problem.with_operation(Operation.FORWARD)
    for in_backward in (False, True):
        operations, comparison = passes.get((forward, tuned.batch_size, in_backward), (frozenset[Operation](), None))
        if tuned.problem.operation in operations:
            return operations, comparison
    return frozenset(), None


def _in_words(in_place: tuple[frozenset[Operation], Comparison | None]) -> str:
    operations, comparison = in_place
    if comparison is None:
        return ""
    names = ", with ".join(str(operation).replace("_", " ") for operation in Operation if operation in operations)
    seconds = f"PyTorch {format_seconds(comparison.baseline_s)}, ours {format_seconds(comparison.time_s)}"
    return f"{seconds}, {with_noise(comparison)}{f' ({names})' if len(operations) > 1 else ''}"


def _ours(tuned_modules: TunedModules) -> list[tuple[str, TunedProblem]]:
    """Return the problems for which ours runs, each with the name of its module."""
    return [
        (name, tuned)
        for name, problems in tuned_modules.items()
        for tuned in problems
        if not tuned.configuration.is_baseline
    ]


def _changed(tuned_modules: TunedModules, change: Callable[[str, TunedProblem], TunedProblem]) -> TunedModules:
    """Return what ``change`` makes of each problem of a module, given its name."""
    return {name: tuple(change(name, tuned) for tuned in problems) for name, problems in tuned_modules.items()}


def _slower_in_place(tuned_modules: TunedModules, passes: Passes) -> list[PutBack]:
    """Return the problems for which ours is slower in its pass, by more than the noise."""
    slower = []
    for name, tuned in _ours(tuned_modules):
        _, comparison = _pass_of(tuned, passes)
        if comparison is not None and comparison.is_slower(LEAST_CHANGE):
            why = f"slower in the step, {with_noise(comparison)}"
            slower.append(PutBack(name, tuned.problem, tuned.batch_size, why))
    return slower


def _put_back(steps: ModelSteps, slower: list[PutBack]) -> tuple[list[PutBack], list[PutBack]]:
    """Restore torch's own convolution for these problems, where the limit allows it.

    Returns the problems for which that was done, and the others.
    """
    reasons = {(slow.module, slow.problem, slow.batch_size): slow for slow in slower}
    restored = []

    def restore(name: str, tuned: TunedProblem) -> TunedProblem:
        slow = reasons.get((name, tuned.problem, tuned.batch_size))
        if slow is None or not steps.may_run_torchs_own(tuned):
            return tuned
        restored.append(slow)
        time_s = tuned.time_s if tuned.baseline_s is None else tuned.baseline_s
        parts = (MicroConfig(TORCHS_OWN, tuned.batch_size),)
        baseline = baseline_of(tuned.measurements, tuned.batch_size) or Configuration(parts, time_s, 0)
        return replace(
            tuned,
            configuration=baseline,
            time_s=time_s,
            relative_error=relative_error_of(baseline, tuned.measurements),
            reason=f"PyTorch's own: {slow.why}; tuning chose {tuned.configuration}",
        )

    steps.put_in(_changed(steps.tuned, restore))
    return restored, [slow for slow in slower if slow not in restored]


def _is_slowed(rounds: TimedRounds) -> bool:
    """Whether recording the time of each convolution takes more than a negligible share of the steps."""
    return any(
        RECORD_S * sum(spent.calls for spent in times.convolutions.values()) > NEGLIGIBLE * times.time_s
        for pair in rounds
        for times in pair
    )


def _convolutions_s(times: StepTimes, layer: Layer | None = None) -> float:
    """Return the seconds of a layer's convolutions in a step, in one pass; of all without a layer."""
    return sum(spent.time_s for call, spent in times.convolutions.items() if layer in (None, call.layer))
