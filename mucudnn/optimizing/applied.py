"""Choices of a model's convolutions, applied to its modules: all that were tuned, and others for a budget of memory.

Within such a budget workspaces may have to be smaller, and bands of rows are convolutions of other sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from mucudnn.core.answers import TunedProblem
from mucudnn.core.config import Config
from mucudnn.core.records import Configuration, Task
from mucudnn.core.team import Team
from mucudnn.core.terminal import Progress
from mucudnn.core.torch_settings import TORCHS_OWN
from mucudnn.core.values import grouped
from mucudnn.optimizing.steps import Step
from mucudnn.running.choices import Choices
from mucudnn.running.devices import device_of_convolutions
from mucudnn.running.modules import TunedModule
from mucudnn.tuning.result import configurations_of
from mucudnn.tuning.trace import call_of, observed
from mucudnn.tuning.tuner import tune_tasks


def put_in(module: TunedModule, tuned: Sequence[TunedProblem], config: Config, kept_bytes: int = 0) -> None:
    """Apply tuned choices to their module.

    tuned: the module's problems, largest batch first.
    kept_bytes: workspace that the calls of any module may leave allocated.

    A module whose convolutions are all torch's own calls torch directly, and saves the operator's overhead. But if a
    limit also applies to torch's convolution, and ``kept_bytes`` would exceed it, the module gets choices, since the
    operator frees those bytes before it calls torch's convolution.
    """
    configurations = {
        problem: _by_batch_size(tunings, config)
        for problem, tunings in grouped((problem.problem, problem) for problem in tuned).items()
    }
    chosen = [configuration for by_size in configurations.values() for configuration in by_size.values()]

    # The limit on what is kept, for which torch's own convolution counts unless it is exempt.
    limit_bytes = config.workspace_budget_bytes
    if limit_bytes is None and not config.has_headroom_limit:
        limit_bytes = config.workspace_limit_bytes
    needed_bytes = kept_bytes + max((configuration.workspace_bytes for configuration in chosen), default=0)

    choices = None
    is_beyond = limit_bytes is not None and needed_bytes > limit_bytes
    if is_beyond or config.batch_invariant or not all(configuration.is_baseline for configuration in chosen):
        choices = Choices.of(
            configurations,
            cast(_ConvNd, module).weight.device.type,
            batch_invariant=config.batch_invariant,
            keeps_workspace=not config.has_headroom_limit,
            limit_bytes=limit_bytes,
            computes_moments=module.computes_moments,
            normalizes=module.normalizes,
        )
    vars(module).update(tuned=tuple(tuned), choices=choices)


def _by_batch_size(tunings: Sequence[TunedProblem], config: Config) -> dict[int, Configuration]:
    """Return what runs for each batch size, up to the largest at which a problem was tuned.

    tunings: of one problem, largest batch first, so that those of smaller batches count there.
    Torch's own in micro-batches runs only at the batch size at which it was tuned: at smaller ones nothing compared it
    with the undivided convolution, which runs there.
    """
    chosen = {}
    for tuned in tunings:
        sizes = {tuned.batch_size: tuned.configuration} if config.batch_invariant else configurations_of(tuned)
        for batch_size, configuration in sizes.items():
            if config.baseline_exempt and configuration.is_baseline:
                configuration = replace(configuration, workspace_bytes=0)
            if batch_size == tuned.batch_size or configuration.algorithms != (TORCHS_OWN,):
                chosen[batch_size] = configuration
    return chosen


def limit_workspaces(
    model: nn.Module, limits: Mapping[str, int], config: Config, team: Team, progress: Progress
) -> None:
    """Choose again for modules whose workspaces exceed a limit, by what is measured.

    limits: bytes, by module name. Those for which nothing is small enough get the smallest workspace there is.

    Raises the errors of ``tune``.
    """
    modules = {name: cast(TunedModule, model.get_submodule(name)) for name in limits}
    wanted = {
        name: [_within(tuned, limits[name], config) for tuned in module.tuned] for name, module in modules.items()
    }
    _put_in_tuned(model, wanted, config, team, progress)


def _put_in_tuned(
    model: nn.Module,
    wanted: Mapping[str, Sequence[TunedProblem | Task]],
    config: Config,
    team: Team,
    progress: Progress,
) -> None:
    """Apply choices to modules, by name; tasks are tuned before."""
    tasks = list(dict.fromkeys(one for of_module in wanted.values() for one in of_module if isinstance(one, Task)))
    if not tasks:
        return
    tuning = tune_tasks(tasks, config, device=device_of_convolutions(model).type, progress=progress, team=team)
    chosen = dict(zip(tasks, tuning.problems, strict=True))
    problems = {
        name: [chosen[one] if isinstance(one, Task) else one for one in of_module] for name, of_module in wanted.items()
    }
    others = [
        tuned
        for name, module in model.named_modules()
        if isinstance(module, TunedModule) and name not in problems
        for tuned in module.tuned
    ]
    kept_bytes = largest_workspace(chain(others, *problems.values()))
    for name, of_module in problems.items():
        put_in(cast(TunedModule, model.get_submodule(name)), of_module, config, kept_bytes)


def choices_of_convolutions(model: nn.Module) -> list[tuple[TunedModule, dict[str, Any]]]:
    """Return the choices of the model's modules, for ``put_back``."""
    modules = (module for module in model.modules() if isinstance(module, TunedModule) and module.tuned)
    return [(module, {"tuned": module.tuned, "choices": module.choices}) for module in modules]


def put_back(choices: Iterable[tuple[TunedModule, dict[str, Any]]]) -> None:
    """Apply choices to the modules that had them."""
    for module, of_module in choices:
        vars(module).update(of_module)


def tune_bands(model: nn.Module, step: Step, config: Config, team: Team, progress: Progress) -> list[str]:
    """Tune convolutions that a step runs in bands of segments, and that were not tuned; return the names of modules.

    Each may have the workspace of ``config.workspace_limit``. Where that is the free memory below the peak of a step,
    or several share a budget, nothing is tuned, and PyTorch's convolutions run.

    Raises the errors of ``tune``, and any of the step.
    """
    wanted: dict[str, list[TunedProblem | Task]] = {}

    def record(name: str, module: nn.Module, compute: Callable[..., Tensor], *arguments: Any, **named: Any) -> Tensor:
        call = call_of(name, module, arguments, named)
        known = module.tuned if isinstance(module, TunedModule) else ()
        if call is not None and call.problem not in {tuned.problem for tuned in known}:
            for operation in dict.fromkeys(tuned.problem.operation for tuned in known):
                problem, n = call.problem.with_operation(operation), call.batch_size
                task = Task(problem, n, config.workspace_limit_bytes, baseline_exempt=config.baseline_exempt)
                if task not in wanted.setdefault(name, [*known]):
                    wanted[name].append(task)
        return compute(*arguments, **named)

    if config.has_headroom_limit or config.workspace_budget_bytes is not None:
        return []
    with observed(model, record):
        step(model)
    wanted = team.of_rank_0(wanted)
    _put_in_tuned(model, wanted, config, team, progress)
    return list(wanted)


def _within(tuned: TunedProblem, limit_bytes: int, config: Config) -> TunedProblem | Task:
    """Return a choice that is within a limit as it is, or else what is to be chosen again."""
    if tuned.configuration.is_baseline or tuned.configuration.workspace_bytes <= limit_bytes or tuned.account is None:
        return tuned
    limit_bytes = max(limit_bytes, tuned.account.smallest_feasible_bytes)
    return Task(tuned.problem, tuned.batch_size, limit_bytes, baseline_exempt=config.baseline_exempt)


def largest_workspace(problems: Iterable[TunedProblem]) -> int:
    """Return the bytes of the largest workspace of ours among tuned choices; 0 if there are none."""
    configurations = (tuned.configuration for tuned in problems)
    return max((one.workspace_bytes for one in configurations if not one.is_baseline), default=0)
