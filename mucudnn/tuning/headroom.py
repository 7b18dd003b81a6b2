"""Workspace that does not raise the peak memory of a training step: the headroom at each of its convolutions.

With ``P0``, the peak of the step as torch runs it, a convolution that runs while ``in_use`` bytes are in use may take
``P0 - in_use`` as its workspace. The peak is then unchanged if

- the step is like the traced one: same batch size and mode, gradients ``None`` at its start (the default of
  ``zero_grad``), optimizer state of constant size;
- a workspace is allocated after the result and the copies of operands in another memory format, which are part of
  ``in_use``, and freed before the call returns;
- dx is computed before dw, as in torch, which frees the memory needed for dx before it allocates that for dw.

Bytes are counted for the tensors that operators make, without rounding and fragmentation of the allocator, and on CUDA
in the caching allocator's blocks, without the unused remainders of blocks above 1 MiB and the workspace that cuBLAS
keeps. Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import torch

from mucudnn.core.errors import UnavailableError
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.torch_settings import TorchSettings
from mucudnn.kernels.memory import empty_activation, largest_within, peak_allocated_bytes
from mucudnn.measuring.operands import Operands
from mucudnn.measuring.whole_runs import run_torch
from mucudnn.running.devices import device_of, made_current
from mucudnn.running.executable import BUFFER_BYTES
from mucudnn.tuning.training_step import TracedStep, trace_step

InnerBytes = Callable[[ConvProblem, int], int]
Limits = Mapping[tuple[str, Operation], int]  # module name and operation -> bytes

MOST_LOST_BYTES = 4 * BUFFER_BYTES  # upper bound of the padding between the aligned parts of a workspace


def find_headroom(model: torch.nn.Module, sample_input: Any) -> Limits:
    """Trace one training step of ``model(sample_input)``; return the workspace limits. The model is not changed.

    On CUDA this needs additional memory, since torch's convolutions are run separately to count their bytes.

    Raises the errors of ``trace_step``, ``InvalidInputError`` for a model on several devices, and ``UnavailableError``
    for one that is neither on the CPU nor on a CUDA device.
    """
    device = device_of(model)
    if device.type not in ("cpu", "cuda"):
        raise UnavailableError(
            f"the model is on {device}; the headroom is available on cpu and cuda only: give a limit in bytes"
        )
    with made_current(device):
        traced = trace_step(model, sample_input)
        return headroom_limits(traced, partial(torch_inner_bytes, device_type=device.type), device.type)


def reference_peak_bytes(traced: TracedStep, inner_bytes: InnerBytes) -> int:
    """Return ``P0``: the peak bytes of the step as torch runs it, including memory allocated inside its convolutions.

    Memory allocated inside other operators is not known, so the true peak may be higher.
    """
    inside = (call.in_use_bytes + inner_bytes(call.problem, call.batch_size) for call in traced.calls)
    return max([traced.peak_bytes, *inside])


def headroom_limits(traced: TracedStep, inner_bytes: InnerBytes, device_type: str = "cpu") -> Limits:
    """Return the workspace limits, in bytes, that leave the peak of the step unchanged, by module and operation.

    A module that is called several times gets the minimum over its calls. Limits are a little lower than the exact
    headroom, since workspaces are aligned, and on CUDA up to 1 MiB lower, since the allocator may return larger blocks
    than requested.

    inner_bytes: what torch's own convolution of a problem and batch size allocates.
    """
    peak_bytes = reference_peak_bytes(traced, inner_bytes)
    limits: dict[tuple[str, Operation], int] = {}
    for call in traced.calls:
        free_bytes = largest_within(max(peak_bytes - call.in_use_bytes - MOST_LOST_BYTES, 0), device_type)
        key = call.name, call.operation
        limits[key] = min(free_bytes, limits.get(key, free_bytes))
    return limits


def torch_inner_bytes(problem: ConvProblem, batch_size: int, device_type: str = "cpu") -> int:
    """Return the bytes that torch's own undivided convolution allocates in addition to its result, by running it.

    On CUDA it runs on the current device, after a warm-up in which libraries allocate the memory that they keep.
    Results are cached by the settings that they depend on.
    """
    on_cuda = device_type == "cuda"
    settings = (torch.cuda.current_device(), TorchSettings.current()) if on_cuda else (torch.get_num_threads(),)
    return _counted(problem, batch_size, device_type, settings)


@lru_cache(maxsize=4096)
def _counted(problem: ConvProblem, n: int, device_type: str, _settings: tuple[object, ...]) -> int:
    shapes = problem.x_shape(n), problem.w_shape(), problem.y_shape(n)
    operands = Operands(*(empty_activation(problem, shape, device_type).zero_() for shape in shapes))
    run = torch.no_grad()(partial(run_torch, problem, operands))
    if device_type == "cuda":
        run()
    written = operands.written(problem.operation)
    return max(peak_allocated_bytes(run, device_type, in_blocks=False) - written.nbytes, 0)
