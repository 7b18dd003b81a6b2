"""Lets work of ours run inside a user's call, and leaves no trace in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from mucudnn.running.dispatcher import untouched


@contextmanager
def aside(device_type: str) -> Iterator[None]:
    """Compute inside as if nothing surrounded it: autocast, inference mode, function modes and hooks of saved tensors.

    Convolutions are torch's own, past all wrappers. What was set before is set again at the end.
    """
    with ExitStack() as stack:
        stack.enter_context(untouched)
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.autocast(device_type, enabled=False))
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:  # only the last ones are called
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_itself, _itself))
        yield


def _itself(tensor: Tensor) -> Tensor:
    return tensor
