"""Finds workspace that costs nothing: at each convolution of a training step the memory below the peak of the step.

In a training step the memory in use rises through the forward pass and falls through the backward pass. With ``P0``,
the peak of the step as torch runs it, a convolution that runs while ``in_use`` bytes are in use may take
``P0 - in_use`` as its workspace, and the peak is unchanged.

This holds if
- the step is like the one that was traced: same batch size and mode, gradients ``None`` at its start (the default of
  ``zero_grad``); what the optimizer keeps does not change in size, so that it only shifts every number;
- a workspace lives for one call: allocated when the result and the copies of operands in another memory format are
  there already (they are part of ``in_use``), and freed before the call returns;
- dx is computed before dw, as in torch, which frees what it needed for dx before it allocates what it needs for dw.

Bytes are those of the tensors that operators make. What an allocator rounds up or keeps in fragments is not in them,
nor are the 5 KiB of random state that ``torch.utils.checkpoint`` saves for each checkpoint.

On CUDA they are bytes of the caching allocator's blocks, and a workspace within its limit takes no larger a block than
there is room for (``kernels/contract/allocation.py``). Not in them are what the allocator does not cut off
other blocks above 1 MiB, in torch's step as in ours, and the workspace that cuBLAS keeps from its first product on. Not
run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from mucudnn.kernels.contract.allocation import largest_within, peak_requested_bytes
from mucudnn.kernels.contract.buffers import empty_activation
from mucudnn.kernels.torch_ops.torch_convolution import torch_convolution
from mucudnn.running.devices import device_of, made_current
from mucudnn.running.executable import BUFFER_BYTES
from mucudnn.tracing.memory_timeline import MemoryTimeline
from mucudnn.words.errors import UnavailableError
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.torch_settings import TorchSettings

InnerBytes = Callable[[ConvProblem, int], int]
Limits = Mapping[tuple[str, Operation], int]  # module name and operation -> bytes

# A workspace is cut into parts that begin on multiples of the alignment: so much may be lost between them
MOST_LOST_BYTES = 4 * BUFFER_BYTES


@dataclass(frozen=True, slots=True)
class Headroom:
    """Memory of one model's training step: what is in use, the peak as torch runs it, the limit of each convolution.

    limits: module name and operation -> bytes, as ``headroom_limits``.
    """

    timeline: MemoryTimeline
    peak_bytes: int
    limits: Limits


def find_headroom(model: torch.nn.Module, sample_input: Any) -> Headroom:
    """Trace one training step of ``model(sample_input)``, which leaves no trace in the model.

    On CUDA some memory is needed beside the model: torch's convolutions are run by themselves, to count what they need.

    Raises as ``trace_step``, ``InvalidInputError`` for a model on several devices, and ``UnavailableError`` for one
    that is neither on the CPU nor on a CUDA device.
    """
    from mucudnn.tracing.training_step import trace_step  # here and not above: running a tuned model needs no tracing

    device = device_of(model)
    if device.type not in ("cpu", "cuda"):
        raise UnavailableError(
            f"the model is on {device}; the headroom is known on cpu and cuda: give a limit in bytes"
        )
    inner_bytes = partial(torch_inner_bytes, device_type=device.type)
    with made_current(device):
        timeline = trace_step(model, sample_input)
        limits = headroom_limits(timeline, inner_bytes, device.type)
        return Headroom(timeline, reference_peak_bytes(timeline, inner_bytes), limits)


def reference_peak_bytes(timeline: MemoryTimeline, inner_bytes: InnerBytes) -> int:
    """Return ``P0``: most bytes in use in the step as torch runs it, with what its convolutions allocate inside.

    inner_bytes: of a problem and a batch size, see ``torch_inner_bytes``. Nothing is known of what other operators
    allocate inside: the true peak is this one or higher.
    """
    inside = (call.in_use_bytes + inner_bytes(call.problem, call.batch_size) for call in timeline.calls)
    return max([timeline.peak_bytes, *inside])


def headroom_limits(
    timeline: MemoryTimeline, inner_bytes: InnerBytes, device_type: str = "cpu"
) -> dict[tuple[str, Operation], int]:
    """Find the workspace limits (bytes) with which the peak of the step stays what it is, by module and operation.

    A module that is called several times gets the least of its calls. Torch's own convolution, which needs
    ``inner_bytes``, is below the peak by construction; the limits are a little less, since workspaces are aligned, and
    on CUDA up to 1 MiB less, since the allocator may hand out more than it is asked for.
    """
    peak_bytes = reference_peak_bytes(timeline, inner_bytes)
    limits: dict[tuple[str, Operation], int] = {}
    for call in timeline.calls:
        free_bytes = largest_within(max(peak_bytes - call.in_use_bytes - MOST_LOST_BYTES, 0), device_type)
        key = call.name, call.operation
        limits[key] = min(free_bytes, limits.get(key, free_bytes))
    return limits


def torch_inner_bytes(problem: ConvProblem, batch_size: int, device_type: str = "cpu") -> int:
    """Count the bytes that torch's own undivided convolution allocates inside, beside its result, by running it.

    Operands lie in the problem's memory format, and there is no bias: with one it may be a few bytes more. On CUDA it
    is run on the current device, first without counting: then torch chooses an algorithm, and libraries create what
    they keep. The answer is kept for the settings on which it depends: the number of threads, for each of which
    libraries take scratch, and on CUDA the device and torch's settings.
    """
    if device_type == "cuda":
        return _counted(problem, batch_size, device_type, (torch.cuda.current_device(), TorchSettings.current()))
    return _counted(problem, batch_size, device_type, (torch.get_num_threads(),))


@lru_cache(maxsize=4096)
def _counted(problem: ConvProblem, n: int, device_type: str, _settings: tuple[object, ...]) -> int:
    shapes = problem.x_shape(n), problem.w_shape(), problem.y_shape(n)
    x, w, y = (empty_activation(problem, shape, device_type).zero_() for shape in shapes)
    geometry = (problem.stride, problem.padding, problem.dilation, problem.groups)
    third = None if problem.operation is Operation.FORWARD else y

    @torch.no_grad()
    def run() -> None:
        torch_convolution(problem.operation, x, w, third, geometry)

    if device_type == "cuda":
        run()
    written = {Operation.FORWARD: y, Operation.BACKWARD_DATA: x, Operation.BACKWARD_FILTER: w}[problem.operation]
    return max(peak_requested_bytes(run, device_type) - written.nbytes, 0)
