"""What runs where a tuned configuration cannot: the next engine that cuDNN offers, or torch's own convolution.

Only for training and inference, which must never stop. While measuring, an engine's failure and a lack of memory are
errors: see ``operators.Measured``. What is replaced is said once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace

import torch

from mucudnn.kernels.cudnn.algorithms import CapturingError, CudnnEngine, EngineError, Plan
from mucudnn.kernels.cudnn.barred import why_barred
from mucudnn.kernels.cudnn.engines import Engine
from mucudnn.kernels.cudnn.library import CudnnError
from mucudnn.running.execution import Recipe, release_workspaces
from mucudnn.words.errors import UnavailableError
from mucudnn.words.problem import ConvProblem
from mucudnn.words.results import Configuration, MicroConfig
from mucudnn.words.torch_settings import Numerics

_failed: dict[tuple[torch.device, Plan], str] = {}  # in cuDNN's words; for the rest of the process
_said: set[str] = set()


def working_recipe(
    problem: ConvProblem, configuration: Configuration, device_type: str, *, keeps_workspace: bool = True
) -> Recipe | None:
    """The configuration's recipe for the current device, built, with the next engines in the place of failed ones.

    ``None``: torch's own convolution, where the device or torch's settings are not those that it was tuned for, or no
    engine works. Raises ``InvalidInputError`` for an algorithm that is not registered or cannot compute the problem,
    ``CapturingError`` where a CUDA graph is being captured, ``EngineError`` where there is no memory to build with.
    """
    if device_type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise CapturingError(f"{problem} was not run before a CUDA graph is captured: run it once, then capture it")
    try:
        recipe = Recipe.of(problem, configuration, device_type=device_type, keeps_workspace=keeps_workspace)
        if not recipe.has_engines:
            return recipe
        reason = _why_not_here(recipe)
    except (CudnnError, UnavailableError) as error:
        reason = str(error)
    if reason is not None:
        say_once(f"{problem}: {configuration} cannot run here: {reason}; torch's own convolution runs instead")
        return None
    return _first_that_works(recipe, _current_device(device_type))


def note_failure(error: EngineError, device: torch.device) -> None:
    """From now on no recipe that ``working_recipe`` makes for this device has the engine that failed.

    Raises what torch raises where the error has broken the CUDA context: then nothing can run any more.
    """
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize(device)
    _failed.setdefault((device, error.plan), str(error))


def note_lack_of_memory(text: str, device: torch.device) -> None:
    """Say it once. On the CPU what is kept for speed alone is given back: torch's own convolution, which runs next, has
    then as much memory as without this package.
    """
    if device.type == "cpu":
        release_workspaces()
    say_once(text)


def say_once(text: str) -> None:
    """A warning, where it was not given before."""
    if text not in _said:
        _said.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def _first_that_works(recipe: Recipe, device: torch.device) -> Recipe | None:
    limit_bytes = recipe.workspace_bytes
    while (failed := _failed_plan(recipe, device)) is not None:
        alternative = next(_alternatives(recipe, failed, limit_bytes, device), None)
        runs = "torch's own convolution" if alternative is None else alternative.configuration
        say_once(
            f"{failed.config.name} failed for {failed.micro_batch_size} sample(s) of {failed.problem}: "
            f"{_failed[device, failed]}; from now on {runs} runs there"
        )
        if alternative is None:
            return None
        recipe = alternative
    return recipe


def _failed_plan(recipe: Recipe, device: torch.device) -> Plan | None:
    """The first that has failed before, or cannot be built now; ``None`` once all are built."""
    for engine, size in recipe.engine_steps:
        plan = engine.plan(recipe.problem, size)
        if (device, plan) not in _failed:
            try:
                engine.build(recipe.problem, size)
            except EngineError as error:
                if error.is_lack_of_memory:
                    raise
                note_failure(error, device)
        if (device, plan) in _failed:
            return plan
    return None


def _alternatives(recipe: Recipe, failed: Plan, limit_bytes: int, device: torch.device) -> Iterator[Recipe]:
    """The recipe with other engines in the place of the failed plan, in cuDNN's order, as far as the workspace goes."""
    problem, size = recipe.problem, failed.micro_batch_size
    engine = next(engine for engine, n in recipe.engine_steps if engine.plan(problem, n) == failed)
    numerics, before = Numerics.of_torch(), engine.backend.engine(failed)
    for offered in engine.backend.offered(problem, size):
        another = replace(engine, config=offered.config)
        has_failed = (device, another.plan(problem, size)) in _failed
        if has_failed or why_barred(numerics, offered, problem.dtype) or not _is_as_exact(offered, before, problem):
            continue
        configuration = _with_another(recipe.configuration, MicroConfig(engine.name, size), another.name)
        try:
            alternative = Recipe.of(
                problem, configuration, device_type=device.type, keeps_workspace=recipe.keeps_workspace
            )
        except EngineError:
            continue
        if alternative.workspace_bytes <= limit_bytes:
            yield alternative


def _is_as_exact(engine: Engine, before: Engine, problem: ConvProblem) -> bool:
    """Whether it may stand in for what was chosen under bounds that are not known here: it rounds no more, and is
    deterministic and local where that was.
    """
    rounds_more = problem.dtype == "float32" and engine.uses_tensor_cores and not before.uses_tensor_cores
    repeats, stays_local = engine.deterministic >= before.deterministic, engine.local >= before.local
    return not rounds_more and repeats and stays_local


def _with_another(configuration: Configuration, failed: MicroConfig, name: str) -> Configuration:
    changed = MicroConfig(name, failed.micro_batch_size)
    micro_configs = tuple(changed if m == failed else m for m in configuration.micro_configs)
    return replace(configuration, micro_configs=micro_configs)


def _why_not_here(recipe: Recipe) -> str | None:
    """Why an engine may not run now: the device does not offer it, or torch's settings forbid it."""
    problem, numerics = recipe.problem, Numerics.of_torch()
    for engine, size in recipe.engine_steps:
        reason = engine.supports_micro_batch(problem, size) or _why_barred(engine, problem, size, numerics)
        if reason is not None:
            return f"{engine.name}: {reason}"
    return None


def _why_barred(engine: CudnnEngine, problem: ConvProblem, size: int, numerics: Numerics) -> str | None:
    return why_barred(numerics, engine.backend.engine(engine.plan(problem, size)), problem.dtype)


def _current_device(device_type: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device(device_type)
