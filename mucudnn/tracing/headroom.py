"""Workspace that does not raise the peak memory of a training step: the headroom at each of its convolutions.

In a training step the memory in use rises through the forward pass and falls through the backward pass. With ``P0``,
the peak of the step as torch runs it, a convolution that runs while ``in_use`` bytes are in use may take
``P0 - in_use`` as its workspace, and the peak is unchanged.

The peak is unchanged if
- the step is like the traced one: same batch size and mode, gradients ``None`` at its start (the default of
  ``zero_grad``), optimizer state of constant size;
- a workspace is allocated after the result and the copies of operands in another memory format, which are part of
  ``in_use``, and freed before the call returns;
- dx is computed before dw, as in torch, which frees the memory needed for dx before it allocates that for dw.

Bytes are counted for the tensors that operators make, without rounding and fragmentation of the allocator, and without
the 5 KiB of random state that ``torch.utils.checkpoint`` saves for each checkpoint.

On CUDA, bytes are those of the caching allocator's blocks, and the block of a workspace within its limit fits into the
headroom (``kernels/contract/allocation.py``). These bytes do not include the unused remainders of blocks above 1 MiB,
in torch's step as in ours, nor the workspace that cuBLAS keeps from its first product on. Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch

from mucudnn.kernels.contract.allocation import largest_within, peak_requested_bytes
from mucudnn.kernels.contract.buffers import empty_activation
from mucudnn.kernels.torch_ops.torch_convolution import torch_convolution
from mucudnn.running.devices import device_of, made_current
from mucudnn.running.executable import BUFFER_BYTES
from mucudnn.words.errors import UnavailableError
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.torch_settings import TorchSettings

if TYPE_CHECKING:
    from mucudnn.tracing.training_step import MemoryTimeline

InnerBytes = Callable[[ConvProblem, int], int]
Limits = Mapping[tuple[str, Operation], int]  # module name and operation -> bytes

# Upper bound of the padding between the aligned parts of a workspace
MOST_LOST_BYTES = 4 * BUFFER_BYTES


@dataclass(frozen=True, slots=True)
class Headroom:
    """Memory of a model's training step: the bytes in use, the peak as torch runs it, and the convolutions' limits.

    limits: bytes of workspace by module name and operation, as returned by ``headroom_limits``.
    """

    timeline: MemoryTimeline
    peak_bytes: int
    limits: Limits


def find_headroom(model: torch.nn.Module, sample_input: Any) -> Headroom:
    """Trace one training step of ``model(sample_input)``; return its memory and the workspace limits.

    The model is not changed.

    On CUDA this needs additional memory, since torch's convolutions are run separately to count their bytes.

    Raises the errors of ``trace_step``, ``InvalidInputError`` for a model on several devices, and ``UnavailableError``
    for one that is neither on the CPU nor on a CUDA device.
    """
    from mucudnn.tracing.training_step import trace_step  # lazy, as running a tuned model needs no tracing

    device = device_of(model)
    if device.type not in ("cpu", "cuda"):
        raise UnavailableError(
            f"the model is on {device}; the headroom is available on cpu and cuda only: give a limit in bytes"
        )
    inner_bytes = partial(torch_inner_bytes, device_type=device.type)
    with made_current(device):
        timeline = trace_step(model, sample_input)
        limits = headroom_limits(timeline, inner_bytes, device.type)
        return Headroom(timeline, reference_peak_bytes(timeline, inner_bytes), limits)


def reference_peak_bytes(timeline: MemoryTimeline, inner_bytes: InnerBytes) -> int:
    """Return ``P0``: the peak bytes of the step as torch runs it, including memory allocated inside its convolutions.

    inner_bytes: function of a problem and a batch size, such as ``torch_inner_bytes``. Memory allocated inside other
    operators is not known, so the true peak may be higher.
    """
    inside = (call.in_use_bytes + inner_bytes(call.problem, call.batch_size) for call in timeline.calls)
    return max([timeline.peak_bytes, *inside])


def headroom_limits(
    timeline: MemoryTimeline, inner_bytes: InnerBytes, device_type: str = "cpu"
) -> dict[tuple[str, Operation], int]:
    """Return the workspace limits, in bytes, that leave the peak of the step unchanged, by module and operation.

    A module that is called several times gets the minimum over its calls. The peak includes the ``inner_bytes`` that
    torch's own convolutions allocate. Limits are a little lower than the exact headroom, since workspaces are aligned,
    and on CUDA up to 1 MiB lower, since the allocator may return larger blocks than requested.
    """
    peak_bytes = reference_peak_bytes(timeline, inner_bytes)
    limits: dict[tuple[str, Operation], int] = {}
    for call in timeline.calls:
        free_bytes = largest_within(max(peak_bytes - call.in_use_bytes - MOST_LOST_BYTES, 0), device_type)
        key = call.name, call.operation
        limits[key] = min(free_bytes, limits.get(key, free_bytes))
    return limits


def torch_inner_bytes(problem: ConvProblem, batch_size: int, device_type: str = "cpu") -> int:
    """Return the bytes that torch's own undivided convolution allocates in addition to its result, by running it.

    Operands are in the problem's memory format, without a bias, which may add a few bytes. On CUDA it runs on the
    current device, after a warm-up in which torch chooses an algorithm and libraries allocate the memory that they
    keep. Results are cached by the settings that they depend on: the number of threads, since libraries allocate
    scratch for each, and on CUDA the device and torch's settings.
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
