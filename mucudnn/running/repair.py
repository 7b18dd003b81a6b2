"""Fallbacks of executables: another algorithm, or else torch's own convolution, replaces a failing step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from mucudnn.kernels.contract.algorithm import Algorithm
from mucudnn.running.executable import Executable, StepError
from mucudnn.words.errors import CapturingError, LibraryError, UnavailableError
from mucudnn.words.problem import ConvProblem
from mucudnn.words.results import Configuration, MicroConfig
from mucudnn.words.warning import say_once

# Steps that have failed in this process, with the library's error
_failed: dict[tuple[torch.device, ConvProblem, MicroConfig], str] = {}


def working_executable(
    problem: ConvProblem, configuration: Configuration, device_type: str, *, keeps_workspace: bool = True
) -> Executable | None:
    """Build the executable of a configuration for the current device, with alternatives in place of failed steps.

    Returns None, for torch's own convolution, if the device or torch's settings have changed since tuning, or if no
    alternative works. Raises ``InvalidInputError`` for an algorithm that is not registered or cannot compute the
    problem, ``CapturingError`` while a CUDA graph is captured, and ``StepError`` if there is no memory to build it.
    """
    if device_type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise CapturingError(f"{problem} was not run before a CUDA graph is captured: run it once, then capture it")
    try:
        executable = Executable.of(problem, configuration, device_type=device_type, keeps_workspace=keeps_workspace)
        reason = _why_not_here(executable)
    except (LibraryError, UnavailableError) as error:
        reason = str(error)
    if reason is not None:
        say_once(f"{problem}: {configuration} cannot run here: {reason}; torch's own convolution runs instead")
        return None
    return _first_that_works(executable, _current_device(device_type))


def note_failure(error: StepError, device: torch.device) -> None:
    """Record a failed step, which ``working_executable`` will no longer use on this device.

    Raises torch's error if the failure has broken the CUDA context, so that nothing can run any more.
    """
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize(device)
    _failed.setdefault((device, error.problem, error.micro_config), str(error))


def _first_that_works(executable: Executable, device: torch.device) -> Executable | None:
    problem, limit_bytes = executable.problem, executable.workspace_bytes
    while (step := _failed_step(executable, device)) is not None:
        failed = _micro_config(*step)
        alternative = next(_alternatives(executable, *step, limit_bytes, device), None)
        runs = "torch's own convolution" if alternative is None else alternative.configuration
        say_once(
            f"{failed.algorithm} failed for {failed.micro_batch_size} sample(s) of {problem}: "
            f"{_failed[device, problem, failed]}; from now on {runs} runs there"
        )
        if alternative is None:
            return None
        executable = alternative
    return executable


def _failed_step(executable: Executable, device: torch.device) -> tuple[Algorithm, int] | None:
    """Return the executable's first step that has failed before or cannot be built; None if all are built."""
    for step in executable.steps:
        key = device, executable.problem, _micro_config(*step)
        if key not in _failed:
            try:
                executable.build_step(*step)
            except StepError as error:
                if error.is_lack_of_memory:
                    raise
                note_failure(error, device)
        if key in _failed:
            return step
    return None


def _alternatives(
    executable: Executable, failed: Algorithm, size: int, limit_bytes: int, device: torch.device
) -> Iterator[Executable]:
    """Yield executables with other algorithms in place of the failed step, within the workspace limit."""
    problem = executable.problem
    for another in failed.alternatives(problem, size):
        instead = _micro_config(another, size)
        if (device, problem, instead) in _failed:
            continue
        configuration = _with_another(executable.configuration, _micro_config(failed, size), instead)
        try:
            alternative = Executable.of(
                problem, configuration, device_type=device.type, keeps_workspace=executable.keeps_workspace
            )
        except LibraryError:
            continue
        if alternative.workspace_bytes <= limit_bytes:
            yield alternative


def _with_another(configuration: Configuration, failed: MicroConfig, instead: MicroConfig) -> Configuration:
    micro_configs = tuple(instead if m == failed else m for m in configuration.micro_configs)
    return replace(configuration, micro_configs=micro_configs)


def _micro_config(algorithm: Algorithm, size: int) -> MicroConfig:
    return MicroConfig(algorithm.name, size)


def _why_not_here(executable: Executable) -> str | None:
    """Return the reason why a step of the executable may not run on this machine now; None if all may run."""
    for algorithm, size in executable.steps:
        if reason := algorithm.why_not_here(executable.problem, size):
            return f"{algorithm.name}: {reason}"
    return None


def _current_device(device_type: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device(device_type)
