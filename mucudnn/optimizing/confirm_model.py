"""Confirms a tuned model in steps of its own: the user's, or those that a sample input makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn

from mucudnn.database.database import Database
from mucudnn.database.environment_store import EnvironmentStore
from mucudnn.distributed.team import Team, propagate_errors
from mucudnn.measuring.quiet import Quiet
from mucudnn.measuring.timing.candidate_errors import give_back_cache
from mucudnn.measuring.timing.load import watch_of
from mucudnn.measuring.timing.synchronized_clock import wall_clock
from mucudnn.measuring.timing.timer import Clock
from mucudnn.modules.conv2d import Conv2d
from mucudnn.modules.tuned_module import TunedModule
from mucudnn.optimizing.confirm import confirm
from mucudnn.optimizing.in_place import InPlaceTimes
from mucudnn.optimizing.kept_confirmation import KeptConfirmation
from mucudnn.optimizing.ranks import Alone, Together
from mucudnn.optimizing.steps_in_turns import StepTimes, TunedModules
from mucudnn.running.dispatcher import untouched
from mucudnn.running.environment import current_environment
from mucudnn.running.filter_cache import FilterCache
from mucudnn.tracing.own_step import OwnStep
from mucudnn.tuning.choose import baseline_of
from mucudnn.tuning.confirmation import Confirmation, PutBack
from mucudnn.tuning.result import TunedProblem, tuned_of
from mucudnn.words.config import Config
from mucudnn.words.errors import SharingError, first_line
from mucudnn.words.problem import ConvProblem
from mucudnn.words.progress import Progress
from mucudnn.words.warning import warn

Step = Callable[[nn.Module], object]  # runs one step of the model that it is given
PutIn = Callable[[TunedModule, Sequence[TunedProblem]], None]  # has a module run what was chosen


def confirm_model(
    model: nn.Module,
    sample_input: Any,
    config: Config,
    put_in: PutIn,
    *,
    device_type: str,
    step: Step | None = None,
    team: Team | None = None,
    progress: Progress,
) -> Confirmation | None:
    """Run the model's own step in turns, torch's own convolutions and ours; put torch's own back where ours is slower.

    step: the user's; ``None``: forward and backward pass on the sample input, in ``eval()`` the forward pass alone.
    What such steps have shown is kept in the database; unless it is asked for, none is run again for what is known.
    Nobody can tell whether a user's step is the same: it is run each time, and nothing of it is kept.
    team: the ranks that have tuned the model together; all of them call it, run equally many steps, and put back the
    same. It ends with this.
    Returns what was found, which every module has as ``confirmation``, too; ``None`` where nothing was to be confirmed,
    where torch's own is barred somewhere, or, after a warning, where a step failed, on any rank: then all runs as it
    did before. Parameters are kept where a step may change them. Nothing else is: call it where buffers, gradients,
    mode and random state are kept.

    Raises ``SharingError`` where a rank has ended, has no ``step`` while others do, or has decided differently.
    """
    modules = {
        name: module for name, module in model.named_modules() if isinstance(module, TunedModule) and module.tuned
    }
    if config.confirm is False:
        return None
    ranks = Alone() if team is None else Together(team)
    try:
        with propagate_errors(team), _restored_on_failure(modules.values()):
            if not ranks.anywhere(any(map(_runs_ours, modules.values()))):
                return None
            if ranks.anywhere(any(one.barred for module in modules.values() for one in tuned_of(module))):
                return None
            ranks.require_same("step", "None" if step is None else "given", "give it on all ranks, or on none")
            with Database(config.database) as database:
                store = EnvironmentStore(database, current_environment(device_type))
                quiet = Quiet(watch_of(device_type), store, lambda text: progress(text, 1.0))
                its_step = step or OwnStep(sample_input)
                steps = _ModelSteps(model, modules, its_step, config, put_in, device_type, quiet, ranks)
                kept = None
                if step is None:
                    kept = KeptConfirmation(store, model, sample_input, modules, steps, config)
                found = _known_or_confirmed(steps, kept, progress)
            if found is not None:
                ranks.agree(_decided(found, modules))
    except Exception as error:
        if isinstance(error, SharingError) and not error.failures:
            raise
        give_back_cache()
        why = f"what was tuned is not confirmed in the model's own step: {_in_words(error)}"
        warn(why, RuntimeWarning, stacklevel=3)
        return None
    for module in modules.values():
        module.confirmation = found
    if found is not None:
        progress(str(found), 1.0)
    return found


def _known_or_confirmed(steps: _ModelSteps, kept: KeptConfirmation | None, progress: Progress) -> Confirmation | None:
    """Put back what is known, or run steps. kept: ``None``: they are the user's, and nothing is known of them."""
    is_asked_for = bool(steps.config.confirm)
    found = kept.put_back(steps.ranks) if kept is not None and not is_asked_for else None
    is_users = kept is None
    if found is None and steps.ranks.everywhere(is_asked_for or is_users or _runs_unasked(steps)):
        progress("confirming in the model's own step", 1.0)
        found = _confirmed(steps, automatic=not (is_asked_for or is_users), is_users=is_users)
        if found is not None and kept is not None:
            kept.add(found, steps.ranks)
    return found


def _runs_unasked(steps: _ModelSteps) -> bool:
    """Whether steps can be run without asking.

    Those of processes that work together must be equal in number, which they are where ranks run them together. Hooks
    of gradients may train the model.
    """
    is_by_itself = _is_one_of_several() and not isinstance(steps.ranks, Together)
    return steps.model.training and not is_by_itself and not _has_gradient_hooks(steps.model)


def _confirmed(steps: _ModelSteps, *, automatic: bool, is_users: bool) -> Confirmation | None:
    """Run steps. is_users: they may do whatever training does."""
    before = {name: tuned_of(module) for name, module in steps.modules.items()}
    with ExitStack() as stack:
        if is_users or _has_gradient_hooks(steps.model):
            stack.enter_context(_parameters_kept(steps.model))
        return confirm(steps, before, automatic=automatic)


def _decided(found: Confirmation, modules: Mapping[str, TunedModule]) -> dict[str, dict[str, str]]:
    """Return what ranks compare: what runs in each module, and the times that it follows from."""
    convolutions = {
        f"{name}, {one.problem}, batch {one.batch_size}": {
            "configuration": repr(one.configuration.micro_configs),
            "time in the step": repr(one.in_place),
        }
        for name, module in modules.items()
        for one in tuned_of(module)
    }
    return {**convolutions, "the step": {"what it has shown": repr(found)}}


def _in_words(error: Exception) -> str:
    """Say what failed here, or on other ranks."""
    if isinstance(error, SharingError):
        return "; ".join(f"rank {rank}: {why}" for rank, why in error.failures.items())
    return f"{type(error).__name__}: {first_line(error)}"


def _is_one_of_several() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _has_gradient_hooks(model: nn.Module) -> bool:
    return any(p._post_accumulate_grad_hooks or p._backward_hooks for p in model.parameters())


@contextmanager
def _parameters_kept(model: nn.Module) -> Iterator[None]:
    """Restore the values of all parameters at the end."""
    before = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, value in before:
            parameter.detach().copy_(value)


class _ModelSteps:
    """Steps of a model, and the choices in its modules."""

    def __init__(
        self,
        model: nn.Module,
        modules: Mapping[str, TunedModule],
        step: Step,
        config: Config,
        put_in: PutIn,
        device_type: str,
        quiet: Quiet,
        ranks: Alone,
    ) -> None:
        self.model, self.modules, self.step = model, modules, step
        self.config, self._put_in, self.device_type, self.quiet = config, put_in, device_type, quiet
        self.ranks = ranks

    @cached_property
    def clock(self) -> Clock:
        return wall_clock(self.device_type)

    @cached_property
    def times(self) -> InPlaceTimes:
        return InPlaceTimes(self.model, self.device_type)

    def wait(self) -> None:
        self.quiet.wait()

    def run(self, *, ours: bool, recorded: bool) -> StepTimes:
        watch = self.quiet.watch
        mark = watch.mark()
        with ExitStack() as stack:
            if not ours:
                stack.enter_context(_torchs_own(self.modules.values()))
            stack.enter_context(self.times.recording() if recorded else untouched)
            begun_s = self.clock.now()
            self.step(self.model)
            time_s = self.clock.now() - begun_s
        own = StepTimes(time_s, self.times.take() if recorded else {}, watch.since(mark).share)
        return self.ranks.of_all(own)

    def anywhere(self, holds: bool) -> bool:
        return self.ranks.anywhere(holds)

    def is_ours(self, module: str, tuned: TunedProblem) -> bool:
        cache = _cache_of(self.modules[module])
        has_cached_filter = cache is not None and any(each.problem == tuned.problem for each in cache.filters)
        return has_cached_filter or not tuned.configuration.is_baseline

    def may_run_torchs_own(self, tuned: TunedProblem) -> bool:
        if self.config.has_headroom_limit or self.config.baseline_exempt or tuned.limit_bytes is None:
            return True
        baseline = baseline_of(tuned.measurements, tuned.batch_size)
        return baseline is not None and baseline.workspace_bytes <= tuned.limit_bytes

    def put_in(self, tuned: TunedModules, put_back: Sequence[PutBack]) -> None:
        for name, module in self.modules.items():
            self._put_in(module, tuned[name])
            if isinstance(module, Conv2d) and module.filter_cache is not None:
                torchs = {one.problem for one in put_back if one.module == name}
                module.filter_cache = _without(module.filter_cache, torchs)


@contextmanager
def _torchs_own(modules: Iterable[TunedModule]) -> Iterator[None]:
    """Have the modules run torch's own convolution inside.

    An ``nn.Conv3d`` stays divided: that is for the sake of memory, which torch's own may not take, and nothing that a
    comparison of times could put back.
    """
    every = [*modules]
    restore = _restoring(every)
    try:
        for module in every:
            module.choices = None
            if isinstance(module, Conv2d):
                module.filter_cache = None
        yield
    finally:
        restore()


@contextmanager
def _restored_on_failure(modules: Iterable[TunedModule]) -> Iterator[None]:
    """Have the modules run what they run now, and nothing else, if what is inside fails."""
    restore = _restoring(modules)
    try:
        yield
    except BaseException:
        restore()
        raise


def _restoring(modules: Iterable[TunedModule]) -> Callable[[], None]:
    """Return a function that has the modules run what they run now."""
    before = [(module, module.tuned, module.choices, _cache_of(module)) for module in modules]

    def restore() -> None:
        for module, tuned, choices, cache in before:
            module.tuned, module.choices = tuned, choices
            if isinstance(module, Conv2d):
                module.filter_cache = cache

    return restore


def _runs_ours(module: TunedModule) -> bool:
    return module.choices is not None or _cache_of(module) is not None


def _cache_of(module: TunedModule) -> FilterCache | None:
    return module.filter_cache if isinstance(module, Conv2d) else None


def _without(cache: FilterCache, problems: set[ConvProblem]) -> FilterCache | None:
    """Return a cache without the filters of these problems; ``None``: there are no others."""
    kept = [each for each in cache.filters if each.problem not in problems]
    if len(kept) == len(cache.filters):
        return cache
    return FilterCache(kept, cache.keeps_workspace) if kept else None
