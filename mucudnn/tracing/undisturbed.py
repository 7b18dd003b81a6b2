"""Lets a model run for tracing, and leaves no trace in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore the model's gradients, buffers (running statistics) and mode, and torch's random state, at the end.

    Inside, gradients are enabled and those of the model are ``None``.
    """
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    gpus = {parameter.device.index for parameter in model.parameters() if parameter.is_cuda}
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        with torch.random.fork_rng(sorted(gpus)), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, name, buffer, before in buffers:
            buffer.detach().copy_(before)
            module._buffers[name] = buffer  # a forward pass may have put another tensor in its place
