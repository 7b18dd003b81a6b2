"""Confirms a tuned model in steps of its own: the user's, or those that a sample input makes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn

from mucudnn.bench.timing.candidate_errors import give_back_cache
from mucudnn.bench.timing.load import watch_of
from mucudnn.bench.timing.synchronized_clock import wall_clock
from mucudnn.bench.timing.timer import Clock
from mucudnn.database.database import Database
from mucudnn.database.environment_store import EnvironmentStore
from mucudnn.modules.conv2d import Conv2d
from mucudnn.modules.tuned_module import TunedModule
from mucudnn.optimizing.confirm import confirm
from mucudnn.optimizing.in_place import InPlaceTimes
from mucudnn.optimizing.kept_confirmation import KeptConfirmation
from mucudnn.optimizing.steps_in_turns import StepTimes, TunedModules
from mucudnn.running.dispatcher import untouched
from mucudnn.running.environment import current_environment
from mucudnn.running.filter_cache import FilterCache
from mucudnn.tracing.own_step import OwnStep
from mucudnn.tuning.choose import baseline_of
from mucudnn.tuning.confirmation import Confirmation, PutBack
from mucudnn.tuning.quiet import Quiet
from mucudnn.tuning.result import TunedProblem, tuned_of
from mucudnn.words.config import Config
from mucudnn.words.errors import first_line
from mucudnn.words.problem import ConvProblem
from mucudnn.words.progress import Progress

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
    progress: Progress,
) -> Confirmation | None:
    """Run the model's own step in turns, torch's own convolutions and ours; put torch's own back where ours is slower.

    step: the user's; ``None``: forward and backward pass on the sample input, in ``eval()`` the forward pass alone.
    What such steps have shown is kept in the database; unless it is asked for, none is run again for what is known.
    Nobody can tell whether a user's step is the same: it is run each time, and nothing of it is kept.
    Returns what was found, which every module has as ``confirmation``, too; ``None`` where nothing was to be confirmed,
    or, after a warning, where a step failed: then all runs as it did before. Parameters are kept where a step may
    change them. Nothing else is: call it where buffers, gradients, mode and random state are kept.
    """
    modules = {
        name: module for name, module in model.named_modules() if isinstance(module, TunedModule) and module.tuned
    }
    if config.confirm is False or all(m.choices is None and _cache_of(m) is None for m in modules.values()):
        return None
    try:
        with Database(config.database) as database:
            store = EnvironmentStore(database, current_environment(device_type))
            quiet = Quiet(watch_of(device_type), store, lambda text: progress(text, 1.0))
            steps = _ModelSteps(model, modules, step or OwnStep(sample_input), config, put_in, device_type, quiet)
            kept = None if step is not None else KeptConfirmation(store, model, sample_input, modules, steps, config)
            found = kept.put_back() if kept is not None and config.confirm is None else None
            if found is None and _is_wanted(config, model, step):
                progress("confirming in the model's own step", 1.0)
                found = _confirmed(steps, automatic=config.confirm is None and step is None, is_users=step is not None)
                if found is not None and kept is not None:
                    kept.add(found)
    except Exception as error:
        give_back_cache()
        why = f"{type(error).__name__}: {first_line(error)}"
        warnings.warn(f"what was tuned is not confirmed in the model's own step: {why}", RuntimeWarning, stacklevel=3)
        return None
    for module in modules.values():
        module.confirmation = found
    if found is not None:
        progress(str(found), 1.0)
    return found


def _is_wanted(config: Config, model: nn.Module, step: Step | None) -> bool:
    """Whether steps were asked for or can be run without asking.

    Steps of processes that work together must be equal in number, and hooks of gradients may train the model.
    """
    if config.confirm or step is not None:
        return True
    return model.training and not _is_one_of_several() and not _has_gradient_hooks(model)


def _confirmed(steps: _ModelSteps, *, automatic: bool, is_users: bool) -> Confirmation | None:
    """Run steps. is_users: they may do whatever training does."""
    before = {name: tuned_of(module) for name, module in steps.modules.items()}
    with ExitStack() as stack:
        if is_users or _has_gradient_hooks(steps.model):
            stack.enter_context(_parameters_kept(steps.model))
        return confirm(steps, before, automatic=automatic)


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
    ) -> None:
        self.model, self.modules, self.step = model, modules, step
        self.config, self._put_in, self.device_type, self.quiet = config, put_in, device_type, quiet

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
        return StepTimes(time_s, self.times.take() if recorded else {}, watch.since(mark).share)

    def is_ours(self, module: str, tuned: TunedProblem) -> bool:
        cache = _cache_of(self.modules[module])
        has_cached_filter = cache is not None and any(each.problem == tuned.problem for each in cache.filters)
        return has_cached_filter or not tuned.configuration.is_baseline

    def may_run_torchs_own(self, tuned: TunedProblem) -> bool:
        if self.config.has_headroom_limit or self.config.torchs_own_fits or tuned.limit_bytes is None:
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
    before = [(module, module.choices, _cache_of(module)) for module in modules]
    try:
        for module, _, cache in before:
            module.choices = None
            if cache is not None:
                cast(Conv2d, module).filter_cache = None
        yield
    finally:
        for module, choices, cache in before:
            module.choices = choices
            if cache is not None:
                cast(Conv2d, module).filter_cache = cache


def _cache_of(module: TunedModule) -> FilterCache | None:
    return module.filter_cache if isinstance(module, Conv2d) else None


def _without(cache: FilterCache, problems: set[ConvProblem]) -> FilterCache | None:
    """Return a cache without the filters of these problems; ``None``: there are no others."""
    kept = [each for each in cache.filters if each.problem not in problems]
    if len(kept) == len(cache.filters):
        return cache
    return FilterCache(kept, cache.keeps_workspace) if kept else None
