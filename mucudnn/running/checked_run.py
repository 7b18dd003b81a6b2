"""Runs one configuration on given tensors, which are checked first.

Nothing is replaced here: what fails is an error, as measuring needs it. Operators run what was tuned.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from mucudnn.kernels.contract.buffers import TORCH_FORMATS
from mucudnn.running.devices import made_current
from mucudnn.running.executable import Executable
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import ConvProblem
from mucudnn.words.results import Configuration


def run(
    problem: ConvProblem,
    configuration: Configuration,
    x: Tensor,
    w: Tensor,
    y: Tensor,
    bias: Tensor | None = None,
    *,
    keeps_workspace: bool = True,
) -> None:
    """Compute a problem as a configuration says, into the tensor that the operation writes.

    x: (N, C, H, W), w: (K, C // groups, R, S), y: (N, K, P, Q), bias: (K,) or None, added to y, only in FORWARD.
    All are dense and in the problem's memory format. The baseline is run as its algorithm here; ``torch_convolution``
    is torch's own call, without this module around it.

    Raises ``InvalidInputError`` for tensors that do not fit the problem or the configuration, and what the methods of
    ``Executable`` raise: what fails is not replaced here.
    """
    _check(problem, configuration, x, w, y)
    _check_bias(problem, x, bias)
    with made_current(x.device):
        executable = _cached_executable(problem, configuration, x.device, torch.get_num_threads(), keeps_workspace)
        executable.execute(x, w, y, bias)


@lru_cache(maxsize=1024)
def _cached_executable(
    problem: ConvProblem, configuration: Configuration, device: torch.device, threads: int, keeps_workspace: bool
) -> Executable:
    """Make an executable once. threads: part of the key, since what algorithms need can depend on them."""
    executable = Executable.of(problem, configuration, device_type=device.type, keeps_workspace=keeps_workspace)
    executable.build()
    return executable


def _check(problem: ConvProblem, configuration: Configuration, x: Tensor, w: Tensor, y: Tensor) -> None:
    n = configuration.batch_size
    expected = {"x": (x, problem.x_shape(n)), "w": (w, problem.w_shape()), "y": (y, problem.y_shape(n))}
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise InvalidInputError(f"{name} has shape {tuple(tensor.shape)}; {problem} with N={n} needs {shape}")
        if tensor.dtype != getattr(torch, problem.dtype):
            raise InvalidInputError(f"{name} has dtype {tensor.dtype}; {problem} needs torch.{problem.dtype}")
        if not tensor.is_contiguous(memory_format=TORCH_FORMATS[problem.memory_format]):
            raise InvalidInputError(f"{name} does not lie {problem.memory_format}; make a copy that does")
        _check_memory(name, tensor, x.device)


def _check_bias(problem: ConvProblem, x: Tensor, bias: Tensor | None) -> None:
    if bias is None:
        return
    if bias.shape != (problem.k,) or bias.dtype != x.dtype or not bias.is_contiguous():
        given = f"shape {tuple(bias.shape)}, dtype {bias.dtype}, stride {bias.stride()}"
        raise InvalidInputError(f"bias has {given}; {problem} needs ({problem.k},), dense, {x.dtype}")
    _check_memory("bias", bias, x.device)


def _check_memory(name: str, tensor: Tensor, device: torch.device) -> None:
    """Require values in memory: algorithms read bytes, in which a sign or a zero that torch only remembers is not."""
    if tensor.device != device:
        raise InvalidInputError(f"{name} is on {tensor.device} and x on {device}; all must be on one device")
    if tensor.is_meta:
        raise InvalidInputError(
            f"{name} is on the device meta, which holds no values; give tensors of the CPU or a GPU"
        )
    if tensor.is_neg() or tensor._is_zerotensor():
        raise InvalidInputError(f"{name} is a lazy negation or zero; give {name}.resolve_neg().clone()")
