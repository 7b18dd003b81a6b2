"""A model whose training steps stay within a budget of memory: what its forward passes keep is chosen and counted.

A step is traced with all that PyTorch keeps (``trace.py``). ``solver/keeping.py`` chooses what is kept, and
``segments.py`` what runs in micro-batches. Then steps are counted: what was predicted too low is corrected, and chosen
again. The choices are stored for later runs, under a ``description`` of the model. A run whose convolutions were tuned
otherwise meanwhile counts a step before it takes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from operator import attrgetter
from statistics import median
from typing import Any, cast

from torch import Tensor, nn

from mucudnn.core import VERSION
from mucudnn.core.config import Config
from mucudnn.core.errors import InfeasibleError
from mucudnn.core.records import Comparison
from mucudnn.core.team import Team
from mucudnn.core.terminal import Progress
from mucudnn.core.values import exact_bytes, format_bytes, format_seconds
from mucudnn.measuring.clocks import Clock, wall_clock
from mucudnn.measuring.heap import is_heap_kept
from mucudnn.measuring.turns import Rounds, in_turns
from mucudnn.optimizing.applied import (
    choices_of_convolutions,
    largest_workspace,
    limit_workspaces,
    put_back,
    tune_bands,
)
from mucudnn.optimizing.description import description
from mucudnn.optimizing.segments import Part, chosen_parts, segments_of, without_mixing
from mucudnn.optimizing.steps import Step
from mucudnn.optimizing.trace import MeasuredStep, StepTrace
from mucudnn.running.devices import device_of_convolutions
from mucudnn.running.dispatcher import untouched
from mucudnn.running.keeping import KeepingModule, make_keeping
from mucudnn.running.modules import TunedModule, running_torchs_own
from mucudnn.running.segments import Segment, set_segments
from mucudnn.solver import keeping as solver
from mucudnn.solver.keeping import Choice
from mucudnn.store.tuning_store import EnvironmentStore
from mucudnn.tuning.choose import with_noise
from mucudnn.tuning.model_state import OwnStep, undisturbed
from mucudnn.tuning.tuner import machine_and_database

_VERSION = 4  # raised when other choices would be made; those that are stored are then made again
_COUNTS = 4  # steps that are counted to correct the prediction
_AGAIN = 3  # how often a step is traced again, since convolutions have other workspaces or other sizes
_ROUNDS = Rounds(2, 9, 5.0)  # of steps within the budget and PyTorch's


@dataclass(frozen=True, slots=True)
class Keeping:
    """What the forward passes of a model keep. Prints as one line.

    choices: of the values of a forward pass, each with the operator that computes it; empty to keep all that PyTorch
        keeps.
    budget_bytes: of a step beside parameters, gradients and the input.
    predicted_bytes, peak_bytes: what was predicted and counted.
    time_s: of what is computed again.
    all_bytes: the peak of a step that keeps all that PyTorch keeps.
    step: the time of a step, compared with PyTorch's operators without a budget.
    predicted_s: the predicted time of a step.
    segments: parts of the model that run in micro-batches.
    workspaces: limits of the workspaces of some convolutions, by module, in bytes.
    tunes_bands: whether the convolutions of bands are tuned; else they are PyTorch's.
    """

    choices: tuple[tuple[str, Choice], ...]
    budget_bytes: int
    predicted_bytes: int
    time_s: float
    all_bytes: int
    peak_bytes: int = 0
    step: Comparison | None = None
    predicted_s: float = 0.0
    segments: tuple[Segment, ...] = ()
    workspaces: tuple[tuple[str, int], ...] = ()
    tunes_bands: bool = False

    def __str__(self) -> str:
        kept = sum(choice is Choice.KEPT for _, choice in self.choices)
        parts = [f"steps within {format_bytes(self.budget_bytes)}: peak {format_bytes(self.peak_bytes)}"]
        if self.choices or self.segments:
            predicted, kept_bytes = format_bytes(self.predicted_bytes), format_bytes(self.all_bytes)
            parts[0] += f", predicted {predicted}, {kept_bytes} if all is kept"
            parts.append(
                f"{kept} of {len(self.choices)} tensors are kept, {format_seconds(self.time_s)} computed again"
            )
        else:
            parts.append("all is kept")
        parts += map(str, self.segments)
        if self.workspaces:
            parts.append(f"the workspaces of {len(self.workspaces)} convolutions are limited")
        if self.step is not None:
            parts.append(
                f"a step takes {format_seconds(self.step.time_s)}, predicted {format_seconds(self.predicted_s)}"
            )
            parts.append(f"speedup over PyTorch without a budget {with_noise(self.step)}")
        return "; ".join(parts)


def keep_within(
    model: nn.Module, sample_input: Any, config: Config, step: Step | None, team: Team, progress: Progress
) -> None:
    """Choose what forward passes of a model in training keep, so that a step stays within ``config.memory_budget``.

    The budget is for what a step allocates beside the gradients of the parameters.

    step: the user's step, or None for a forward and backward pass on the sample input.

    Raises ``InfeasibleError`` with the least budget; ``InvalidInputError`` if the class of the model cannot be changed;
    and any error of the step.
    """
    device_type = device_of_convolutions(model).type
    module = make_keeping(model)
    keep(module, None)
    with team.propagate_errors():
        team.require_same("step", "None" if step is None else "given", "give it on all ranks, or on none")
        subject = _subject(model, sample_input, config, step, team)
        stored = team.of_rank_0(None if subject is None or team.rank else _stored(subject, config, device_type))
        choices = choices_of_convolutions(module)
        try:
            with undisturbed(module), ExitStack() as stack:
                if step is None:
                    step = OwnStep(sample_input)
                    stack.enter_context(without_updates(module))
                keeping = None if stored is None else _put_in_stored(module, stored, config, step, team, progress)
                if keeping is None:
                    put_back(choices)
                    keeping = _measured(module, config, step, device_type, team, progress)
                if subject is not None and not team.rank and stored != (keeping, True):
                    _store(subject, keeping, config, device_type)
        except BaseException:
            put_back(choices)
            keep(module, None)
            raise
    keep(module, keeping)


@dataclass(frozen=True, slots=True)
class _Subject:
    """What choices depend on, as texts that are equal on all ranks.

    step: all but the choices of convolutions.
    convolutions: those, as a digest.
    """

    step: str
    convolutions: str


def _subject(model: nn.Module, sample_input: Any, config: Config, step: Step | None, team: Team) -> _Subject | None:
    """Return what choices depend on; None if they are not to be stored.

    They are not if the step is the user's, or a model cannot be described.
    """
    texts = None if step is not None else description(model, sample_input, is_heap_kept(), config.deterministic)
    digests = team.gather(None if texts is None else tuple(map(_digest, texts)))
    if None in digests:
        return None
    of_steps, of_convolutions = (_digest(str(of_ranks)) for of_ranks in zip(*digests, strict=True))
    budget_bytes = config.memory_budget_bytes
    what = f"{VERSION}, step within {budget_bytes} bytes, version {_VERSION}, {of_steps}: "
    return _Subject(what, of_convolutions)


def _digest(text: str) -> str:
    return sha256(text.encode(errors="backslashreplace")).hexdigest()


def _stored(subject: _Subject, config: Config, device_type: str) -> tuple[Keeping, bool] | None:
    """Return what an earlier run has chosen for a step, and whether its convolutions were the same; None if none has.

    Of choices for other convolutions, any.
    """
    with machine_and_database(config, device_type) as (machine, database):
        timings = EnvironmentStore(database, machine.environment).timings(subject.step)
    found = None
    for text, seconds in timings:
        convolutions, _, chosen = text.removeprefix(subject.step).partition(" ")
        is_same = convolutions == subject.convolutions
        with suppress(ValueError, TypeError, LookupError):
            if found is None or not found[1] or is_same:
                found = _read(chosen, *seconds), is_same
    return found


def _put_in_stored(
    module: KeepingModule,
    stored: tuple[Keeping, bool],
    config: Config,
    step: Step,
    team: Team,
    progress: Progress,
) -> Keeping | None:
    """Put stored choices in; return them, or None if a step would not be as they say.

    stored: with whether they were made for the same choices of convolutions. Otherwise a step is counted: its values
        must be those that were chosen for, and its peak within the budget.
    """
    keeping, is_same = stored
    keep(module, keeping)
    if keeping.tunes_bands:
        tune_bands(module, step, config, team.again(), progress)
    limit_workspaces(module, dict(keeping.workspaces), config, team.again(), progress)
    if is_same:
        return keeping
    progress("counting a step with stored choices", 1.0)
    peak_bytes = max(team.gather(max(MeasuredStep(module, step, device_of_convolutions(module).type).peaks())))
    is_as_chosen = all(team.gather(module.is_as_chosen)) and peak_bytes <= keeping.budget_bytes
    return replace(keeping, peak_bytes=peak_bytes) if is_as_chosen else None


def _store(subject: _Subject, keeping: Keeping, config: Config, device_type: str) -> None:
    """Store what was chosen for a step: the times are those of the step with these choices."""
    assert keeping.step is not None
    seconds = keeping.step.baseline_samples_s, keeping.step.time_samples_s
    text = f"{subject.step}{subject.convolutions} {_written(keeping)}"
    with machine_and_database(config, device_type) as (machine, database):
        EnvironmentStore(database, machine.environment).add_timing(text, seconds, None)


def _written(keeping: Keeping) -> str:
    """Return choices as JSON, without the samples of their comparison."""
    return json.dumps(asdict(replace(keeping, step=None)), default=attrgetter("value"))


def _read(text: str, torchs_s: Sequence[float], kept_s: Sequence[float]) -> Keeping:
    """Return choices from their JSON and the samples; raise some error for any other text."""
    fields = json.loads(text)
    fields["choices"] = tuple((name, Choice(choice)) for name, choice in fields["choices"])
    fields["workspaces"] = tuple((name, limit_bytes) for name, limit_bytes in fields["workspaces"])
    fields["segments"] = tuple(Segment.of(**segment) for segment in fields["segments"])
    return Keeping(**fields | {"step": Comparison.of(torchs_s, kept_s)})


def _measured(
    module: KeepingModule, config: Config, step: Step, device_type: str, team: Team, progress: Progress
) -> Keeping:
    """Return what is chosen by steps that are traced, counted and compared."""
    budget_bytes = config.memory_budget_bytes
    assert budget_bytes is not None
    progress("tracing what a step keeps", 1.0)
    measured = MeasuredStep(module, step, device_type)
    keeping = replace(all_kept(module, measured, team), budget_bytes=budget_bytes)
    least_bytes, limits = keeping.all_bytes, dict[str, int]()
    tuned_bands: list[str] = []
    fitting, choices = keeping, choices_of_convolutions(module)
    for left in reversed(range(_AGAIN + 1 if keeping.peak_bytes > budget_bytes else 0)):
        keep(module, None)
        traces = Traces.of(module, measured, team)
        keeping = kept_within(traces, budget_bytes, keeping.all_bytes)
        for name in tuned_bands:
            limits[name] = largest_workspace(cast(TunedModule, module.get_submodule(name)).tuned)
        keeping = replace(keeping, workspaces=tuple(limits.items()), tunes_bands=bool(tuned_bands))
        least_bytes = min(least_bytes, keeping.peak_bytes)
        if keeping.peak_bytes <= budget_bytes:
            fitting, choices = keeping, choices_of_convolutions(module)
        # What is chosen again: convolutions of other sizes in bands, and workspaces where nothing else fits.
        if left and keeping.peak_bytes <= budget_bytes and any(segment.bands for segment in keeping.segments):
            names = tune_bands(module, step, config, team.again(), progress)
            tuned_bands += names
            if not names:
                break
        elif left and keeping.peak_bytes > budget_bytes:
            more = team.of_rank_0({} if team.rank else _smaller_workspaces(module, traces, keeping))
            if not more:  # no workspace is to blame
                break
            limits |= more
            limit_workspaces(module, more, config, team.again(), progress)
        else:
            break
    if keeping.peak_bytes > budget_bytes >= fitting.peak_bytes:  # what was tuned for bands needs too much
        keeping = fitting
        put_back(choices)
        keep(module, keeping)
    if keeping.peak_bytes > budget_bytes:
        raise InfeasibleError(
            f"memory_budget is {exact_bytes(budget_bytes)}; a step of this model needs at least "
            f"{exact_bytes(least_bytes)} beside parameters, gradients and the batch: give that, or a smaller batch",
            least_bytes,
        )
    progress("comparing steps within the budget", 1.0)
    compared, all_s = _compared(module, keeping, step, wall_clock(device_type), team)
    return replace(keeping, step=compared, predicted_s=all_s + keeping.time_s)


def _smaller_workspaces(module: KeepingModule, traces: Traces, keeping: Keeping) -> dict[str, int]:
    """Return limits of workspaces, by module, with which the step that was counted last would be within the budget.

    Convolutions run one after the other, so each is limited by as much as the budget is exceeded while it runs.
    """
    traced, choices = traces.last
    peaks = solver.peaks_bytes(traced.values, choices)
    more_bytes = keeping.peak_bytes - max(peaks, default=0)  # than predicted
    limits: dict[str, int] = {}
    for name, place in traced.convolutions:
        own_bytes = largest_workspace(cast(TunedModule, module.get_submodule(name)).tuned)
        limit_bytes = max(0, own_bytes - (peaks[place] + more_bytes - keeping.budget_bytes))
        if limit_bytes < own_bytes:
            limits[name] = min(limits.get(name, limit_bytes), limit_bytes)
    return limits


def keep(module: KeepingModule, keeping: Keeping | None) -> None:
    """Have a model keep what is chosen; None to keep all that PyTorch keeps."""
    vars(module).update(keeping=keeping, is_as_chosen=True)
    set_segments(module, () if keeping is None else keeping.segments)


def all_kept(module: KeepingModule, measured: MeasuredStep, team: Team) -> Keeping:
    """Have a model keep all that PyTorch keeps, and return the bytes of its step, which are also the budget."""
    keep(module, None)
    measured.peaks()  # a first step, in which libraries allocate what they keep
    all_bytes = max(team.gather(max(measured.peaks())))
    return Keeping((), all_bytes, all_bytes, 0.0, all_bytes, all_bytes)


@dataclass(slots=True)
class Traces:
    """Traces of a step: without segments, and with those that budgets ask for. Rank 0 chooses them.

    parts: what may be a segment.
    segments: those that have been checked, by part.
    by_parts: the traces, by the parts that run in micro-batches in them.
    last: the trace and the choices of the step that was counted last.
    """

    module: KeepingModule
    measured: MeasuredStep
    team: Team
    parts: list[Part]
    by_parts: dict[tuple[Part, ...], StepTrace]
    last: tuple[StepTrace, Sequence[Choice]]
    segments: dict[Part, Segment] = field(default_factory=dict)

    @classmethod
    def of(cls, module: KeepingModule, measured: MeasuredStep, team: Team) -> Traces:
        """Trace a step without segments."""
        whole, parts = team.of_rank_0(measured.traced())
        return cls(module, measured, team, parts, {(): whole}, (whole, [Choice.KEPT] * len(whole.values)))

    def parts_within(self, target_bytes: int) -> tuple[Part, ...]:
        """Choose segments for a budget by estimates, trace the step with them, and put them in.

        target_bytes: the budget; 0 for the least memory.
        """
        whole = self.by_parts[()]
        values = whole.values if target_bytes else _untimed(whole.values)
        keep(self.module, None)
        while True:
            of_this_rank = [] if self.team.rank else chosen_parts(values, whole.numbers, self.parts, target_bytes)
            chosen = tuple(self.team.of_rank_0(of_this_rank))
            unknown = [part for part in chosen if part not in self.segments]
            if not unknown:
                break
            found = self.team.of_rank_0(segments_of(self.module, self.measured.step, unknown))
            self.segments |= {part: segment for part, segment in found.items() if segment is not None}
            self.parts = without_mixing(self.parts, [part for part, segment in found.items() if segment is None])
        set_segments(self.module, [self.segments[part] for part in chosen])
        if chosen not in self.by_parts:
            self.by_parts[chosen], _ = self.team.of_rank_0(self.measured.traced())
        return chosen

    def counted(self, parts: Sequence[Part], solved: solver.Keeping, budget_bytes: int, all_bytes: int) -> Keeping:
        """Put choices in, with the segments that are in, and count a step."""
        traced = self.by_parts[tuple(parts)]
        self.last = traced, solved.choices
        keeping = Keeping(
            choices=traced.choices(solved.choices),
            budget_bytes=budget_bytes,
            predicted_bytes=max(solved.peak_bytes, traced.rest_bytes),
            time_s=solver.recomputation_s(traced.values, solved.choices) + traced.segments_s,
            all_bytes=all_bytes,
            segments=tuple(self.segments[part] for part in parts),
        )
        vars(self.module)["keeping"] = keeping
        return replace(keeping, peak_bytes=max(self.team.gather(max(self.measured.peaks()))))


def kept_within(traces: Traces, budget_bytes: int, all_bytes: int) -> Keeping:
    """Return choices within a budget, or if none are found, those of the least memory; and put them in.

    Segments are chosen by estimates; where these were too low, again for a smaller budget, and for the least memory.

    budget_bytes: 0 for the least memory.
    """
    team, tried = traces.team, set[tuple[Part, ...]]()
    for target_bytes in (budget_bytes, int(0.8 * budget_bytes), 0):
        parts = traces.parts_within(target_bytes)
        if parts in tried or not budget_bytes:
            continue
        tried.add(parts)
        allowed_bytes = budget_bytes
        for _ in range(_COUNTS):
            values = traces.by_parts[parts].values
            solved = team.of_rank_0(None if team.rank else solver.least_time(values, allowed_bytes))
            if solved is None:
                break
            keeping = traces.counted(parts, solved, budget_bytes, all_bytes)
            if keeping.peak_bytes <= budget_bytes:
                return keeping
            allowed_bytes -= keeping.peak_bytes - budget_bytes
    values = _untimed(traces.by_parts[parts].values)
    least = team.of_rank_0(None if team.rank else solver.least_memory(values))
    assert least is not None  # rank 0 sends it
    return traces.counted(parts, least, budget_bytes, all_bytes)


def _untimed(values: Sequence[solver.Value]) -> list[solver.Value]:
    """Return values with bytes in place of seconds, so that the least budget is the same each time."""
    return [replace(value, time_s=float(value.size_bytes)) for value in values]


@contextmanager
def without_updates(model: nn.Module) -> Iterator[None]:
    """Have hooks that get the gradient of a parameter, as soon as it is there, do nothing: they may train the model."""
    hooks = [parameter._post_accumulate_grad_hooks for parameter in model.parameters()]
    saved = [(of_one, {**of_one}) for of_one in hooks if of_one]
    for of_one, _ in saved:
        of_one.update(dict.fromkeys(of_one, _no_update))
    try:
        yield
    finally:
        for of_one, entries in saved:
            of_one.update(entries)


def _no_update(_: Tensor) -> None:
    pass


def _compared(model: KeepingModule, keeping: Keeping, step: Step, clock: Clock, team: Team) -> tuple[Comparison, float]:
    """Compare steps within the budget with those of PyTorch's operators, which keep all, by the times of rank 0.

    Return also the time of steps by the model's own operators that keep all.
    """
    tuned = [module for module in model.modules() if isinstance(module, TunedModule)]

    def timed(kept: Keeping | None) -> float:
        vars(model)["keeping"] = kept
        begun_s = clock.now()
        step(model)
        return clock.now() - begun_s

    def by_torch() -> float:
        with running_torchs_own(tuned), untouched:
            return timed(None)

    times: list[list[float]] = []
    for of_round in in_turns([by_torch, lambda: timed(keeping), lambda: timed(None)]):
        times.append(of_round)
        if team.of_rank_0(_ROUNDS.is_enough(len(times), sum(map(sum, times)))):
            break
    torchs_s, kept_s, all_s = zip(*times, strict=True)
    return team.of_rank_0((Comparison.of(torchs_s, kept_s), median(all_s)))
