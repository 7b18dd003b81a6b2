"""Tensors on a CUDA device without memory: shapes, strides, dtypes and devices are real, and nothing is computed.

Torch's CPU build has no autograd for them: use them where gradients are off.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

MODE = FakeTensorMode(allow_non_fake_inputs=True)


def on_cuda(tensor: Tensor, index: int = 0) -> Tensor:
    """As ``tensor.cuda(index)``."""
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(MODE, like, torch.device("cuda", index))


def module_on_cuda(module: nn.Module, index: int = 0) -> nn.Module:
    """A copy, as ``module.cuda(index)``, without gradients."""
    moved = copy.deepcopy(module).requires_grad_(False)
    for part in moved.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(on_cuda(parameter, index), requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = on_cuda(buffer, index)
    return moved
