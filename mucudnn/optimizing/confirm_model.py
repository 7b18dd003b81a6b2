"""Confirmation of a tuned model in its own steps: the user's, or steps on the sample input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from mucudnn.core.config import Config
from mucudnn.core.errors import SharingError, first_line, warn
from mucudnn.core.terminal import Progress
from mucudnn.distributed.team import Team
from mucudnn.kernels.memory import give_back_cache
from mucudnn.measuring.load import watch_of
from mucudnn.optimizing.confirm import confirm
from mucudnn.optimizing.confirmation import Confirmation
from mucudnn.optimizing.steps import ModelSteps, PutIn, Step, restored_on_failure
from mucudnn.running.modules import TunedModule
from mucudnn.tuning.own_step import OwnStep
from mucudnn.tuning.quiet import Quiet
from mucudnn.tuning.result import tuned_of


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
    """Time interleaved steps with torch's convolutions and with ours, and restore torch's where ours are slower.

    step: the user's step, or None for a forward and backward pass on the sample input, in ``eval()`` mode a forward
    pass. team: the ranks that tuned the model together. All of them must call this function; they run the same number
    of steps, rank 0 decides for all, and the team is closed. Returns the confirmation (the result of the comparison),
    which is also set on every module as ``confirmation``. Returns None if there was nothing to confirm, if torch's
    convolution must not run somewhere, or, after a warning, if a step failed on any rank; the tuned choices then stay.
    Restores parameters that a step may change. The caller restores buffers, gradients, mode and random state.

    Raises ``SharingError`` if a rank has ended, or has no ``step`` while others have one.
    """
    modules = {
        name: module for name, module in model.named_modules() if isinstance(module, TunedModule) and module.tuned
    }
    ranks = team or Team()
    try:
        found = _confirmed(model, modules, sample_input, config, put_in, device_type, step, ranks, progress)
    except Exception as error:
        if isinstance(error, SharingError) and not error.failures:
            raise
        give_back_cache()
        found = f"the step failed: {_in_words(error)}"
        warn(f"the tuned choices could not be confirmed in the model's own step: {_in_words(error)}", RuntimeWarning)
    for module in modules.values():
        module.confirmation, module.unconfirmed = (None, found) if isinstance(found, str) else (found, None)
    if isinstance(found, str):
        return None
    progress(str(found), 1.0)
    return found


def _confirmed(
    model: nn.Module,
    modules: Mapping[str, TunedModule],
    sample_input: Any,
    config: Config,
    put_in: PutIn,
    device_type: str,
    step: Step | None,
    ranks: Team,
    progress: Progress,
) -> Confirmation | str:
    """Compare steps of the model. Return the result, or the reason why no steps were compared."""
    if config.confirm is False:
        return "confirm=False"
    with ranks.propagate_errors(), restored_on_failure(modules.values()):
        if not ranks.anywhere(any(module.choices is not None for module in modules.values())):
            return "PyTorch's own convolutions run everywhere"
        if ranks.anywhere(any(one.barred for module in modules.values() for one in tuned_of(module))):
            return "PyTorch's own convolution is barred in some layers, so there is no step to compare with"
        ranks.require_same("step", "None" if step is None else "given", "give it on all ranks, or on none")
        is_asked_for = bool(config.confirm) or step is not None
        has_hooks = any(p._post_accumulate_grad_hooks or p._backward_hooks for p in model.parameters())
        # Cooperating processes must run the same number of steps, and gradient hooks may train the model
        runs_unasked = model.training and not has_hooks and (ranks.are_several or not _is_one_of_several())
        if not ranks.everywhere(is_asked_for or runs_unasked):
            return _why_not_unasked(model, has_hooks=has_hooks)
        progress("confirming in the model's own step", 1.0)
        with _parameters_kept(model) if step is not None or has_hooks else nullcontext():
            quiet = Quiet(watch_of(device_type), progress, at=1.0)
            its_step = step or OwnStep(sample_input)
            steps = ModelSteps(model, modules, its_step, config, put_in, device_type, quiet, ranks)
            return confirm(steps, automatic=not is_asked_for)


def _why_not_unasked(model: nn.Module, *, has_hooks: bool) -> str:
    """Return the reason why steps of this model are compared only with ``Config(confirm=True)``."""
    if not model.training:
        return "the model is in eval mode; Config(confirm=True) confirms anyway"
    if has_hooks:
        return "its parameters have gradient hooks, which may train the model; Config(confirm=True) confirms anyway"
    return "this process is one of several that do not tune together; Config(confirm=True) confirms anyway"


def _in_words(error: Exception) -> str:
    """Return a description of a step's error on this rank or on other ranks."""
    if isinstance(error, SharingError):
        return "; ".join(f"rank {rank}: {why}" for rank, why in error.failures.items())
    return f"{type(error).__name__}: {first_line(error)}"


def _is_one_of_several() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


@contextmanager
def _parameters_kept(model: nn.Module) -> Iterator[None]:
    """Restore the values of all parameters of the model when the block ends."""
    before = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, value in before:
            parameter.detach().copy_(value)
