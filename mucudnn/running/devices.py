"""The device of a model, and the current GPU."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, islice

import torch
from torch import Tensor, nn

from mucudnn.core.errors import InvalidInputError, UnavailableError
from mucudnn.core.tables import listed
from mucudnn.core.values import grouped, shown, text
from mucudnn.running.environment import require_cuda

_NAMES_SHOWN = 3
_TUNABLE = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d)


def device_named(device: object) -> torch.device:
    """Return the ``torch.device`` of this name, or the argument itself if it is a device already.

    Raises ``InvalidInputError`` for an invalid name, and ``UnavailableError`` for a GPU number that does not exist.

    >>> device_named("cpu")
    device(type='cpu')
    """
    try:
        named = device if isinstance(device, torch.device) else torch.device(text(device, "device"))
    except (RuntimeError, InvalidInputError):
        raise InvalidInputError(f"device is {shown(device)}; use 'cpu', 'cuda', 'cuda:1' or a torch.device") from None
    if named.type == "cuda" and named.index is not None:
        require_cuda()
        if named.index >= torch.cuda.device_count():
            raise UnavailableError(
                f"device is '{named}', but there are {torch.cuda.device_count()} GPUs, numbered from 0: use another"
            )
    return named


def device_of_convolutions(model: nn.Module) -> torch.device:
    """Return the device of the filters of a model's tunable convolutions; the CPU for a model without any.

    Raises ``InvalidInputError`` for a model with convolutions on several devices.
    """
    convolutions = ((name, m) for name, m in model.named_modules() if isinstance(m, _TUNABLE))
    return _only_device(  # of parameters: reading a parametrized weight computes it, and may change buffers
        ((name or "the model itself", one) for name, module in convolutions for one in islice(module.parameters(), 1)),
        "has convolutions on several devices",
        "call mucudnn.optimize on each part, with the input of that part",
    )


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's parameters and buffers; the CPU for a model without any.

    Raises ``InvalidInputError`` for a model that is on several devices.
    """
    return _only_device(
        chain(model.named_parameters(), model.named_buffers()),
        "is on several devices",
        "its headroom is known on one: move it there, or give a limit in bytes",
    )


def made_current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one inside the context, on which torch allocates and runs by default.

    If the GPU is already current, nothing is done, since the check is cheaper than a switch.
    """
    if device.type != "cuda" or device.index is None or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def _only_device(tensors: Iterable[tuple[str, Tensor]], what: str, remedy: str) -> torch.device:
    """Return the only device of the tensors. The error names some tensors of each, such as ``cuda:1 (head)``."""
    named = grouped((tensor.device, name) for name, tensor in tensors)
    if len(named) > 1:
        places = ", ".join(f"{device} ({listed(names, _NAMES_SHOWN)})" for device, names in named.items())
        raise InvalidInputError(f"the model {what}: {places}; {remedy}")
    return next(iter(named), torch.device("cpu"))
