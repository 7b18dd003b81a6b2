"""``optimize``, which tunes the convolutions of a whole model and applies the choices to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed import ProcessGroup
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from mucudnn.core.config import Config, config_or_default
from mucudnn.core.errors import InvalidInputError, warn, warnings_deferred
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Configuration, Task
from mucudnn.core.terminal import Progress, progress_of
from mucudnn.core.torch_settings import DETERMINISTIC_SETTING, TORCHS_OWN, TorchSettings
from mucudnn.core.values import instance, shown
from mucudnn.distributed import propagate_errors, team_of
from mucudnn.optimizing.confirm import confirm_model
from mucudnn.optimizing.steps import Step
from mucudnn.running.choices import Choices
from mucudnn.running.devices import device_of_convolutions, made_current
from mucudnn.running.dispatcher import untouched
from mucudnn.running.modules import TunedModule, make_tunable, why_left_alone
from mucudnn.tuning.own_step import undisturbed
from mucudnn.tuning.result import TunedProblem, configurations_of
from mucudnn.tuning.trace import Call, trace
from mucudnn.tuning.tuner import machine_and_database, tune_tasks

if TYPE_CHECKING:
    from mucudnn.distributed import Team
    from mucudnn.tuning.headroom import Limits

_Wanted = dict[str, list[Task]]  # module name -> its tasks, largest batch first


@warnings_deferred()
def optimize(
    model: torch.nn.Module,
    sample_input: Any,
    config: Config | None = None,
    *,
    progress: Progress | bool | None = None,
    step: Step | None = None,
    process_group: ProcessGroup | None = None,
) -> torch.nn.Module:
    """Tune the convolutions that ``model(sample_input)`` runs, convert them to mucudnn modules, and return the model.

    Each ``torch.nn.Conv2d`` becomes a ``mucudnn.Conv2d``, likewise ``Conv1d`` and ``ConvTranspose2d``; all
    others, such as ``Conv3d``, are left alone. Modules are converted in place: parameters, hooks, names, mode and
    device stay the same, and shared modules stay shared. An instance of a subclass stays an instance of it; modules
    that define their own ``forward`` are skipped. The forward pass that finds the shapes does not change mode, buffers,
    gradients or random state. ``progress`` is called with a
    description of the current measurement and the fraction done. None shows a bar on standard error if that is a
    terminal; False shows nothing. ``report(model)`` returns the choices.

    Tuning ends with a few interleaved steps of the whole model, with torch's own convolutions and with ours, unless
    ``config.confirm`` is False. Torch's convolution is restored where ours is slower, and
    ``report(model).confirmation`` has the speedup of the step. ``step(model)`` runs one step as in training. If it is
    None, a step is a forward and backward pass on the sample input, in ``eval()`` mode a forward pass. Parameters,
    gradients, buffers, mode and random state are restored; the state of an optimizer that ``step`` uses is not.

    With ``config.fuse``, for inference on the CPU, the model is not changed. A module is returned that runs the model
    as a graph, for inputs of this size (docs/inference.md). Where that is not possible, a warning says why, and the
    forward operations of the model are tuned as without ``fuse``.

    With ``config.memory_budget``, for inference on the CPU, the model is not changed either. A module is returned that
    computes the same in bands of rows, within the budget; ``sample_input`` may then be a list of samples, one for each
    size to tune for. The model itself is returned, with a warning, if its graph cannot be captured.

    A model on a GPU is tuned on that GPU, even if another one is current. Optimize a model before wrapping it in
    ``DistributedDataParallel`` or ``DataParallel``, with the input of one device.

    In an initialized ``torch.distributed`` process group, all ranks must call this with the same model and an input of
    the same shape. Each measures its share, all make the same choices, and all run the same steps to confirm them. So
    ``step`` may contain collectives; pass it on all ranks or on none. ``process_group`` replaces the default group.

    Raises the errors of ``tune``; ``InvalidInputError`` for convolutions on several devices, for parameters made in
    ``torch.inference_mode()``, and for a model in training mode with ``config.fuse``; and any error of the model on
    ``sample_input``. The model is then unchanged. Warnings are issued at the end, so that the model is tuned even if
    they are errors.
    """
    config = config_or_default(config)
    _require_step(step)
    _require_own_tensors(instance(torch.nn.Module, model, "model"))
    if config.memory_budget_bytes is not None:
        from mucudnn.graph.memory_budget import fit_in_memory  # lazy, as below

        samples = sample_input if isinstance(sample_input, list) else [sample_input]
        with progress_of(progress) as report_progress:
            return fit_in_memory(model, samples, config, report_progress)
    team = team_of(config, process_group)
    if config.fuse:
        from mucudnn.graph.memory_budget import run_as_graph  # lazy, since most calls do not need it

        with progress_of(progress) as report_progress:
            why = "ranks tune together" if team else "its step is given" if step else None
            graph = run_as_graph(model, sample_input, config, report_progress, why)
        if graph is not None:
            return graph
        config = replace(config, operations=(Operation.FORWARD,))
    elif config.cache_budget_bytes != 0:
        warn("cache_budget keeps filters in models that run as graphs: it has no effect without fuse or memory_budget")
    config = replace(config, cache_budget=0)
    device = device_of_convolutions(model)
    if device.type == "cuda" and config.deterministic and not TorchSettings.current().deterministic:
        warn(
            "Config(deterministic=True) holds only for mucudnn's algorithms; PyTorch's own convolutions, which run "
            f"where nothing is faster, are deterministic only with {DETERMINISTIC_SETTING} = True"
        )
    with progress_of(progress) as report_progress, made_current(device), undisturbed(model):
        sample_input = tree_map(_recordable, sample_input)
        with propagate_errors(team), untouched:
            tuned = _tune(model, sample_input, config, device.type, report_progress, team)
        confirm_model(
            model,
            sample_input,
            config,
            partial(_put_in, config=config, kept_bytes=_most_kept(tuned)),
            device_type=device.type,
            step=step,
            team=None if team is None else team.again(),
            progress=report_progress,
        )
    return model


def _tune(
    model: torch.nn.Module,
    sample_input: Any,
    config: Config,
    device_type: str,
    progress: Progress,
    team: Team | None,
) -> Sequence[TunedProblem]:
    """Tune the convolutions of the model, apply the choices to its modules, and return them."""
    wanted = _wanted(model, trace(model, sample_input), config, _limits(model, sample_input, config))
    needing: dict[Task, list[str]] = {}
    for name, of_module in wanted.items():
        for task in of_module:
            needing.setdefault(task, []).append(name)
    tasks = sorted(needing, key=lambda task: -task.batch_size)
    named = [replace(task, count=len(needing[task]), name=_task_name(task, needing[task])) for task in tasks]
    with machine_and_database(config, device_type) as (machine, database):
        tuning = tune_tasks(named, config, progress=progress, machine=machine, database=database, team=team)
        _swap(model, wanted, dict(zip(tasks, tuning.problems, strict=True)), config)
    return tuning.problems


def _limits(model: torch.nn.Module, sample_input: Any, config: Config) -> Limits | None:
    """Return workspace limits that preserve the peak memory of a training step; None if there is no such limit."""
    if not config.has_headroom_limit:
        return None
    from mucudnn.tuning.headroom import find_headroom

    return find_headroom(model, sample_input)


def _require_step(step: object) -> None:
    if not (step is None or callable(step)):
        raise InvalidInputError(f"step is {shown(step)}; give a function that runs a step of a model, or None")


def _require_own_tensors(model: torch.nn.Module) -> None:
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if not is_lazy(tensor) and tensor.is_inference():
            raise InvalidInputError(
                f"{name} of the model was made in torch.inference_mode() and can never be saved for gradients: make "
                "the model outside of that mode, or give copy.deepcopy(model), copied outside of it"
            )


def _recordable(value: Any) -> Any:
    """Return a value; if it is a tensor made in inference mode, a copy that autograd can save for gradients."""
    return value.clone() if isinstance(value, torch.Tensor) and value.is_inference() else value


def _wanted(model: torch.nn.Module, calls: Iterable[Call], config: Config, limits: Limits | None) -> _Wanted:
    """Return a task for each operation to tune, without the gradient of the model's own input, which is not used.

    The config's operations are the modules': FORWARD of a transposed convolution has a backward data problem. limits:
    the headroom of each call (the memory free below the peak of a training step); 0 for calls outside a training step;
    None to use the config's limit for all calls.
    """
    modules = dict(model.named_modules())
    wanted: _Wanted = {}
    for call in sorted(calls, key=lambda call: -call.batch_size):
        if why_left_alone(modules[call.name]) is not None:
            continue
        for operation in config.operations:
            if operation is Operation.BACKWARD_DATA and not call.input_needs_gradient:
                continue
            problem = call.problem_of(operation)
            task = Task(
                problem,
                call.batch_size,
                config.workspace_limit_bytes if limits is None else limits.get((call.name, problem.operation), 0),
                in_headroom=limits is not None,
                baseline_exempt=config.baseline_exempt,
            )
            if task not in wanted.setdefault(call.name, []):
                wanted[call.name].append(task)
    return wanted


def _task_name(task: Task, modules: Sequence[str]) -> str:
    """Return the name of a task: ``layer1.0.conv1 +3, forward ...``.

    ``+3`` counts the other modules that share the task with the first one.
    """
    more = f" +{len(modules) - 1}" if len(modules) > 1 else ""
    return f"{modules[0] or 'the model itself'}{more}, {task.problem}"


def _swap(model: torch.nn.Module, wanted: _Wanted, tuned: Mapping[Task, TunedProblem], config: Config) -> None:
    modules, kept_bytes = dict(model.named_modules()), _most_kept(tuned.values())
    for name, tasks in wanted.items():
        its_own = tuple(tuned[task] for task in tasks)
        make_tunable(modules[name])
        swapped = cast(TunedModule, modules[name])
        swapped.confirmation = swapped.unconfirmed = None
        _put_in(swapped, its_own, config, kept_bytes)


def _most_kept(tuned: Iterable[TunedProblem]) -> int:
    """Return the largest workspace in bytes that any of these choices keeps allocated between calls."""
    return max((one.configuration.workspace_bytes for one in tuned if not one.configuration.is_baseline), default=0)


def _put_in(module: TunedModule, its_own: Sequence[TunedProblem], config: Config, kept_bytes: int = 0) -> None:
    """Apply tuned choices to their module. kept_bytes: workspace that other modules' calls may leave allocated."""
    module.tuned = tuple(its_own)
    module.choices = _choices(its_own, config, cast(_ConvNd, module).weight.device.type, kept_bytes)


def _choices(its_own: Sequence[TunedProblem], config: Config, device_type: str, kept_bytes: int) -> Choices | None:
    """Return the choices that a module's operator runs; None if torch's convolution won everywhere.

    Without choices the module calls torch directly and saves the operator's overhead. If a limit also applies to
    torch's convolution, and ``kept_bytes`` of other modules would exceed it, choices are returned anyway, since the
    operator frees those bytes before it calls torch's convolution.

    Divisions of torch's own convolution are not used for batches smaller than the tuned one, since they were not
    compared with the undivided convolution there.
    """
    configurations: dict[ConvProblem, dict[int, Configuration]] = {}
    for tuned in its_own:  # largest batch first, so that tuned smaller batches override
        for n, configuration in configurations_of(tuned).items():
            if n == tuned.batch_size or configuration.algorithms != (TORCHS_OWN,):
                configurations.setdefault(tuned.problem, {})[n] = configuration
    limit_bytes = None if config.has_headroom_limit else config.workspace_limit_bytes
    if config.baseline_exempt:
        configurations = {
            problem: {n: replace(c, workspace_bytes=0) if c.is_baseline else c for n, c in by_size.items()}
            for problem, by_size in configurations.items()
        }
    every = [configuration for by_size in configurations.values() for configuration in by_size.values()]
    most_bytes = kept_bytes + max((c.workspace_bytes for c in every), default=0)
    if all(c.is_baseline for c in every) and (limit_bytes is None or most_bytes <= limit_bytes):
        return None
    return Choices.of(configurations, device_type, not config.has_headroom_limit, limit_bytes)
