"""Confirmation of a tuned model in its own steps: the user's, or steps on the sample input.

Results of steps on the sample input are stored in the database, so that later processes need not run them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from hashlib import sha256
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from mucudnn.database.database import Database
from mucudnn.database.environment_store import EnvironmentStore
from mucudnn.distributed.team import Team
from mucudnn.kernels.registry import algorithm_versions
from mucudnn.measuring.quiet import Quiet
from mucudnn.measuring.timing.candidate_errors import give_back_cache
from mucudnn.measuring.timing.load import watch_of
from mucudnn.modules.tuned_module import TunedModule
from mucudnn.optimizing.confirm import confirm, confirm_again
from mucudnn.optimizing.steps import ModelSteps, PutIn, Step, restored_on_failure, runs_ours
from mucudnn.running.environment import current_environment
from mucudnn.tracing.own_step import OwnStep
from mucudnn.tuning.confirmation import Confirmation, InPlace, InTurns
from mucudnn.tuning.result import tuned_of
from mucudnn.words.config import Config
from mucudnn.words.errors import SharingError, first_line
from mucudnn.words.problem import Operation
from mucudnn.words.progress import Progress
from mucudnn.words.results import Configuration
from mucudnn.words.warning import warn

_IN_TURNS = ("step", "recorded", "convolutions")


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
    pass. Results of these passes are stored in the database and reused unless ``config.confirm`` is True. A user's step
    is always run, since it may have changed. team: the ranks that tuned the model together. All of them must call this
    function; they run the same number of steps and make the same decisions, and the team is closed. Returns the
    confirmation (the result of the comparison), which is also set on every module as ``confirmation``. Returns None if
    there was nothing to confirm, if torch's convolution must not run somewhere, or, after a warning, if a step failed
    on any rank; the tuned choices then stay. Restores parameters that a step may change. The caller restores buffers,
    gradients, mode and random state.

    Raises ``SharingError`` if a rank has ended, has no ``step`` while others have one, or has decided differently.
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
        if not ranks.anywhere(any(map(runs_ours, modules.values()))):
            return "PyTorch's own convolutions run everywhere"
        if ranks.anywhere(any(one.barred for module in modules.values() for one in tuned_of(module))):
            return "PyTorch's own convolution is barred in some layers, so there is no step to compare with"
        ranks.require_same("step", "None" if step is None else "given", "give it on all ranks, or on none")
        with Database(config.database) as database:
            store = EnvironmentStore(database, current_environment(device_type))
            quiet = Quiet(watch_of(device_type), lambda text: progress(text, 1.0))
            its_step = step or OwnStep(sample_input)
            steps = ModelSteps(model, modules, its_step, config, put_in, device_type, quiet, ranks)
            fingerprint = None if step else _fingerprint(store, steps, sample_input)
            found = _known_or_confirmed(steps, store, fingerprint, progress)
        if isinstance(found, Confirmation):
            ranks.agree(_decided(found, modules))
        return found


def _known_or_confirmed(
    steps: ModelSteps, store: EnvironmentStore, fingerprint: str | None, progress: Progress
) -> Confirmation | str:
    """Apply the stored result of an earlier comparison, or run steps of the model to compare.

    fingerprint: key of the result in the database, or None for a user's step, whose result is not stored.
    """
    is_asked_for = bool(steps.config.confirm)
    if fingerprint and not is_asked_for and (known := _stored(store, steps, fingerprint)) is not None:
        return known
    has_hooks = any(p._post_accumulate_grad_hooks or p._backward_hooks for p in steps.model.parameters())
    # Cooperating processes must run the same number of steps, and gradient hooks may train the model
    runs_unasked = steps.model.training and not has_hooks and (steps.ranks.are_several or not _is_one_of_several())
    if not steps.ranks.everywhere(is_asked_for or fingerprint is None or runs_unasked):
        return _why_not_unasked(steps.model, has_hooks=has_hooks)
    progress("confirming in the model's own step", 1.0)
    versions = _versions(store, steps)  # before any choice is withdrawn
    with _parameters_kept(steps.model) if fingerprint is None or has_hooks else nullcontext():
        found = confirm(steps, automatic=fingerprint is not None and not is_asked_for)
    if isinstance(found, Confirmation) and fingerprint:
        _store(store, steps, fingerprint, versions, found)
    return found


def _why_not_unasked(model: nn.Module, *, has_hooks: bool) -> str:
    """Return the reason why steps of this model are compared only with ``Config(confirm=True)``."""
    if not model.training:
        return "the model is in eval mode; Config(confirm=True) confirms anyway"
    if has_hooks:
        return "its parameters have gradient hooks, which may train the model; Config(confirm=True) confirms anyway"
    return "this process is one of several that do not tune together; Config(confirm=True) confirms anyway"


def _decided(found: Confirmation, modules: Mapping[str, TunedModule]) -> dict[str, dict[str, str]]:
    """Return the values that must be equal on all ranks: each module's choices, and the times behind them."""
    convolutions = {
        f"{name}, {one.problem}, batch {one.batch_size}": {
            "configuration": repr(one.configuration.micro_configs),
            "time in the step": repr(one.in_place),
        }
        for name, module in modules.items()
        for one in tuned_of(module)
    }
    return {**convolutions, "the step": {"confirmation": repr(found)}}


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


def _stored(store: EnvironmentStore, steps: ModelSteps, fingerprint: str) -> Confirmation | None:
    """Apply the stored confirmation of this fingerprint without running a step.

    Returns None if none is stored, or if the ranks have different ones.
    """
    known, *others = steps.ranks.of_kind(steps.ranks.gather(store.confirmation(fingerprint)))
    if not steps.ranks.everywhere(known is not None and all(one == known for one in others)):
        return None
    assert known is not None
    measured_at, findings = known
    in_place = (None if one is None else _in_place(**one) for one in findings["in_place"])
    step, recorded, convolutions = (InTurns(**findings[name]) for name in _IN_TURNS)
    day = measured_at.partition("T")[0]
    found = Confirmation(step, recorded, convolutions, findings["over_tuned"], stored_on=day)
    return confirm_again(steps, in_place, found)


def _store(
    store: EnvironmentStore, steps: ModelSteps, fingerprint: str, versions: Mapping[str, int], found: Confirmation
) -> None:
    """Store the confirmation unless it was disturbed, on one rank per database and per kind of device."""
    if found.is_disturbed or not (steps.ranks.is_writer or steps.ranks.is_first):
        return
    every = [one.in_place for of_module in steps.tuned.values() for one in of_module]
    findings = {name: asdict(getattr(found, name)) for name in _IN_TURNS} | {
        "versions": versions,
        "over_tuned": found.over_tuned,
        "in_place": [None if one is None else asdict(one) for one in every],
    }
    store.add_confirmation(fingerprint, findings, found.load)


def _in_place(operations: list[str], call: dict[str, Any], loses: bool) -> InPlace:
    return InPlace(tuple(map(Operation, operations)), InTurns(**call), loses)


def _fingerprint(store: EnvironmentStore, steps: ModelSteps, sample_input: Any) -> str:
    """Return a hash of the tuned choices and all visible properties of the model that affect the time of a step.

    Names are included, since choices are withdrawn by name, and equal layers may have different neighbours.
    """
    model = steps.model
    described = (
        [(name, *_chosen(module, steps)) for name, module in steps.modules.items()],
        steps.config.has_headroom_limit,  # freeing the workspace after each call takes time
        sorted(_versions(store, steps).items()),
        [(name, type(module), module.training) for name, module in model.named_modules()],
        [(name, _described(tensor)) for name, tensor in chain(model.named_parameters(), model.named_buffers())],
        [_described(leaf) for leaf in tree_leaves(sample_input)],
        [torch.is_autocast_enabled(t) and torch.get_autocast_dtype(t) for t in ("cpu", "cuda")],
    )
    return sha256(repr(described).encode()).hexdigest()


def _chosen(module: TunedModule, steps: ModelSteps) -> tuple[object, ...]:
    """Return the tuned choices of a module, and whether torch's convolution may replace each of them."""
    return (
        [(one.problem, one.batch_size, steps.may_run_torchs_own(one)) for one in tuned_of(module)],
        [configuration.micro_configs for configuration in _configurations(module)],
    )


def _configurations(module: TunedModule) -> Iterator[Configuration]:
    """Yield the configurations chosen for a module."""
    yield from (one.configuration for one in tuned_of(module))


def _versions(store: EnvironmentStore, steps: ModelSteps) -> dict[str, int]:
    """Return the versions of the algorithms in the tuned choices."""
    used = {name for module in steps.modules.values() for c in _configurations(module) for name in c.algorithms}
    return {name: v for name, v in algorithm_versions(store.environment.device_type).items() if name in used}


def _described(leaf: object) -> object:
    """Return a tensor's metadata, a plain value itself, or any other object's type."""
    if isinstance(leaf, Tensor):
        return () if is_lazy(leaf) else (*leaf.shape, leaf.dtype, leaf.requires_grad)
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf)
