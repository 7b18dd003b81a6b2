"""``optimize``, which tunes the convolutions of a whole model and applies the choices to it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from mucudnn.core.answers import TunedProblem
from mucudnn.core.config import Config, config_or_default, without_cache_budget
from mucudnn.core.errors import InvalidInputError, warn, warnings_deferred
from mucudnn.core.problem import Operation
from mucudnn.core.records import Task
from mucudnn.core.tables import short_name
from mucudnn.core.team import ALONE, Team
from mucudnn.core.terminal import Progress, progress_of
from mucudnn.core.torch_settings import DETERMINISTIC_SETTING, TorchSettings
from mucudnn.core.values import grouped, instance, shown
from mucudnn.measuring.heap import settle_heap
from mucudnn.optimizing.applied import largest_workspace, put_in
from mucudnn.optimizing.batch_invariant import batch_invariant
from mucudnn.optimizing.confirm import confirm_model
from mucudnn.optimizing.groups import tune_groups
from mucudnn.optimizing.keeping import keep_within
from mucudnn.optimizing.steps import Step
from mucudnn.running.devices import device_of_convolutions, made_current
from mucudnn.running.dispatcher import DEVICE_TYPES, untouched
from mucudnn.running.keeping import KeepingModule
from mucudnn.running.modules import TunedModule, make_tunable, why_left_alone
from mucudnn.tuning.model_state import is_training, undisturbed
from mucudnn.tuning.trace import trace
from mucudnn.tuning.tuner import openmp_threads_ended, team_of, tune_tasks

_Wanted = dict[str, list[Task]]  # module name -> its tasks, largest batch first


@warnings_deferred()
@openmp_threads_ended()
def optimize(
    model: nn.Module,
    sample_input: Any,
    config: Config | None = None,
    *,
    progress: Progress | bool | None = None,
    step: Step | None = None,
    process_group: ProcessGroup | None = None,
) -> nn.Module:
    """Tune the convolutions that ``model(sample_input)`` runs, convert them to mucudnn modules, and return the model.

    Each ``torch.nn.Conv2d`` becomes a ``mucudnn.Conv2d``, likewise ``Conv1d``, ``Conv3d`` and the transposed ones.
    Modules are converted in place: parameters, hooks, names, mode and device stay the same, and shared modules stay
    shared. An instance of a subclass stays an instance of it and keeps its ``forward``: tuned is the convolution in
    which ``super().forward(...)`` ends. What runs of the model assign, in attributes, containers, buffers, gradients or
    random states, is put back. ``report(model)`` returns the choices.

    sample_input: what the model is called with; with ``config.memory_budget`` it may be a list of samples, one for each
    size to tune for.
    progress: called with a description of the current measurement and the fraction done. None shows a bar on standard
    error if that is a terminal; False shows nothing.
    step: ``step(model)`` runs one step as in training. If it is None, a step is a forward and backward pass on the
    sample input, in ``eval()`` mode a forward pass.
    process_group: the ranks that tune together, in place of the default group.

    Tuning ends with a few interleaved steps of the whole model, with torch's own convolutions and with ours, unless
    ``config.confirm`` is False. Torch's convolution is restored where ours is slower, and
    ``report(model).confirmation`` has the speedup of the step. Parameters, gradients, buffers, mode and random state
    are restored; the state of an optimizer that ``step`` uses is not. First, steps with a kept heap of the C library
    are compared with others, and it stays kept if that saves more than 3 % (``config.keep_heap``, docs/memory.md).

    With ``config.fuse``, for inference on the CPU, the model is not changed. Another instance of its class is returned,
    with the same attributes, that runs it as a graph, for inputs of this size (docs/inference.md). Where that is not
    possible, a warning says why, and the forward operations of the model are tuned as without ``fuse``.

    With ``config.memory_budget``, for inference on the CPU or on CUDA, the model is not changed either. What is
    returned computes the same in bands of rows, within the budget. The model itself is returned, with a warning, if its
    graph cannot be captured. Of a model in training, the steps stay within the budget: what is not kept of a forward
    pass is computed again in the backward pass (docs/within.md). If none of that is enough, ``InfeasibleError`` has the
    least budget, and the model stays tuned without one.

    A model on a GPU is tuned on that GPU, even if another one is current. Optimize a model before wrapping it in
    ``DistributedDataParallel`` or ``DataParallel``, with the input of one device.

    In an initialized ``torch.distributed`` process group, all ranks must call this with the same model and an input of
    the same shape. Each measures its share, all make the same choices, and all run the same steps to confirm them. So
    ``step`` may contain collectives; pass it on all ranks or on none.

    A model whose convolutions are neither on the CPU nor on CUDA is returned as it is, with a warning.

    Raises the errors of ``tune``; ``InvalidInputError`` for convolutions on several devices, for parameters made in
    ``torch.inference_mode()``, and for a model in training mode with ``config.fuse``; and any error of the model on
    ``sample_input``. The model is then unchanged. Warnings are issued at the end, so that the model is tuned even if
    they are errors.
    """
    config = config_or_default(config)
    fits_steps = config.memory_budget_bytes is not None and is_training(model) and not config.fuse
    runs_modules = fits_steps or (config.memory_budget_bytes is None and not config.fuse)
    if runs_modules:
        config = without_cache_budget(config)
    if config.batch_invariant and fits_steps:
        raise InvalidInputError("batch_invariant and the memory budget of a training step exclude each other")
    if not (step is None or callable(step)):
        raise InvalidInputError(f"step is {shown(step)}; give a function that runs a step of a model, or None")
    for name, tensor in chain(instance(nn.Module, model, "model").named_parameters(), model.named_buffers()):
        with torch._C.DisableTorchFunctionSubclass():
            is_inference = not is_lazy(tensor) and tensor.is_inference()
        if is_inference:
            raise InvalidInputError(
                f"{name} of the model was made in torch.inference_mode() and can never be saved for gradients: make "
                "the model outside of that mode, or give copy.deepcopy(model), copied outside of it"
            )
    device = device_of_convolutions(model)
    if device.type not in DEVICE_TYPES:
        warn(f"the model runs as it is: it is on {device}, and mucudnn measures on {' and '.join(DEVICE_TYPES)}")
        return model
    settle_heap(config.keep_heap)
    model = getattr(model, "untuned_model", model)  # of one that runs as a graph
    with progress_of(progress) as report_progress:
        if runs_modules:
            team = team_of(process_group) if config.share_tuning else ALONE
            if isinstance(model, KeepingModule):
                vars(model)["keeping"] = None  # of an earlier budget
            _optimize_modules(model, sample_input, config, step, team, report_progress)
            if fits_steps:
                keep_within(model, sample_input, config, step, team.again(), report_progress)
            return model
        return _as_graph(model, sample_input, config, step, process_group, report_progress)


def _optimize_modules(
    model: nn.Module, sample_input: Any, config: Config, step: Step | None, team: Team, progress: Progress
) -> None:
    """Tune the convolutions of the model, apply the choices to its modules, and confirm them in steps of the model.

    With ``batch_invariant`` nothing is confirmed, since torch's convolutions may not come back, and norms are no
    groups, whose sums are shared among threads by the batch.
    """
    device = device_of_convolutions(model)
    if config.batch_invariant:
        config = replace(config, confirm=False, fuse=False)
    if device.type == "cuda" and config.deterministic and not TorchSettings.current().deterministic:
        warn(
            "Config(deterministic=True) holds only for mucudnn's algorithms; PyTorch's own convolutions, which run "
            f"where nothing is faster, are deterministic only with {DETERMINISTIC_SETTING} = True"
        )
    with made_current(device), undisturbed(model):
        # autograd cannot save a tensor that was made in inference mode, but a copy
        sample_input = tree_map(
            lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) and leaf.is_inference() else leaf, sample_input
        )
        with team.propagate_errors(), untouched:
            wanted = _wanted(model, sample_input, config)
            tuned = _tuned(wanted, config, device.type, progress, team)
            kept_bytes = largest_workspace(tuned.values())
            modules = dict(model.named_modules())
            for name, tasks in wanted.items():
                make_tunable(modules[name])
                module = cast(TunedModule, modules[name])
                vars(module).update(confirmation=None, unconfirmed=None)
                put_in(module, [tuned[task] for task in tasks], config, kept_bytes)
            tune_groups(model, sample_input, config, team.again(), progress)
            progress("done", 1.0)
        confirm_model(
            model,
            sample_input,
            config,
            partial(put_in, config=config, kept_bytes=kept_bytes),
            device_type=device.type,
            step=step,
            team=team.again(),
            progress=progress,
        )


def _tuned(
    wanted: _Wanted, config: Config, device_type: str, progress: Progress, team: Team
) -> dict[Task, TunedProblem]:
    """Tune all tasks, each once, under a name such as ``layer1.0.conv1 +3, forward ...``.

    ``+3`` counts the other modules that share the task with the first one.
    """
    names = grouped((task, name) for name, tasks in wanted.items() for task in tasks)
    one = {task: replace(task, batch_size=1) for task in names if config.batch_invariant and not _sums_batch(task)}
    names |= grouped((one[task], name) for task, of_task in [*names.items()] if task in one for name in of_task)
    tasks = sorted(names, key=lambda task: -task.batch_size)
    named = [replace(task, count=len(names[task]), name=f"{short_name(names[task])}, {task.problem}") for task in tasks]
    tuning = tune_tasks(named, config, device=device_type, progress=progress, team=team)
    tuned = dict(zip(tasks, tuning.problems, strict=True))
    return tuned | {task: batch_invariant(tuned[task], tuned[one[task]], device_type) for task in one}


def _sums_batch(task: Task) -> bool:
    return task.problem.operation is Operation.BACKWARD_FILTER


def _wanted(model: nn.Module, sample_input: Any, config: Config) -> _Wanted:
    """Trace the model, and return a task for each operation to tune, but not for the unused gradient of its input.

    The config's operations are the modules': FORWARD of a transposed convolution has a backward data problem. With a
    headroom limit, each call has the memory that is free below the peak of a training step, and one outside such a step
    has none.
    """
    calls, limits = trace(model, sample_input), None
    if config.has_headroom_limit:
        from mucudnn.tuning.headroom import find_headroom  # lazy, since few calls need it

        limits = find_headroom(model, sample_input)
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


# Inference as a graph


def _as_graph(
    model: nn.Module,
    sample_input: Any,
    config: Config,
    step: Step | None,
    process_group: ProcessGroup | None,
    progress: Progress,
) -> nn.Module:
    """Return the model as a graph within ``config.memory_budget``, or as one that is fused.

    Where it cannot be fused, a warning says why, and the forward operations of its modules are tuned.
    """
    from mucudnn.graph.memory_budget import fit_in_memory, run_as_graph  # imported here, since most calls need neither

    if config.memory_budget_bytes is not None:
        samples = sample_input if isinstance(sample_input, list) else [sample_input]
        return fit_in_memory(model, samples, config, progress)
    team = team_of(process_group) if config.share_tuning else ALONE
    why_not_fused = "ranks tune together" if team.are_several else "its step is given" if step else None
    graph = run_as_graph(model, sample_input, config, progress, why_not_fused)
    if graph is not None:
        return graph
    config = replace(config, operations=(Operation.FORWARD,), cache_budget=0)
    _optimize_modules(model, sample_input, config, step, team, progress)
    return model
