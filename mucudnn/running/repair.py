"""Executables that can run here; where a step fails, torch's own convolution runs instead from then on."""

from __future__ import annotations

import torch

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
    """Build the executable of a configuration for the current device.

    Returns None, for torch's own convolution, if the device or torch's settings have changed since tuning, or if a step
    cannot be built or has failed before. Raises ``InvalidInputError`` for an algorithm that is not registered or cannot
    compute the problem, ``CapturingError`` while a CUDA graph is captured, and ``StepError`` if there is no memory to
    build it.
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
    device = torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device(device_type)
    for algorithm, size in executable.steps:
        step = device, problem, MicroConfig(algorithm.name, size)
        if step not in _failed:
            try:
                executable.build_step(algorithm, size)
                continue
            except StepError as error:
                if error.is_lack_of_memory:
                    raise
                note_failure(error, device)
        say_once(
            f"{algorithm.name} failed for {size} sample(s) of {problem}: {_failed[step]}; from now on torch's own "
            "convolution runs there"
        )
        return None
    return executable


def note_failure(error: StepError, device: torch.device) -> None:
    """Record a failed step, which ``working_executable`` will no longer use on this device.

    Raises torch's error if the failure has broken the CUDA context, so that nothing can run any more.
    """
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize(device)
    _failed.setdefault((device, error.problem, error.micro_config), str(error))


def _why_not_here(executable: Executable) -> str | None:
    """Return the reason why a step of the executable may not run on this machine now; None if all may run."""
    for algorithm, size in executable.steps:
        if reason := algorithm.why_not_here(executable.problem, size):
            return f"{algorithm.name}: {reason}"
    return None
