"""The device of a model, the current GPU, and the environment in which this process measures."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, islice
from pathlib import Path

import torch
from torch import Tensor, nn

from mucudnn.core.errors import InvalidInputError, UnavailableError, first_line
from mucudnn.core.records import Environment
from mucudnn.core.tables import listed
from mucudnn.core.torch_settings import TorchSettings
from mucudnn.core.values import grouped, require_device_type, shown, text
from mucudnn.kernels.registry import compiler_of, library_of

_CPU_INFO = Path("/proc/cpuinfo")
_NAMES_SHOWN = 3
_TUNABLE = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


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
        ((name or "the model itself", p) for name, module in convolutions for p in islice(module.parameters(), 1)),
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


def _only_device(tensors: Iterable[tuple[str, Tensor]], fault: str, remedy: str) -> torch.device:
    """Return the only device of the tensors. The error names some tensors of each, such as ``cuda:1 (head)``."""
    named = grouped((tensor.device, name) for name, tensor in tensors)
    if len(named) > 1:
        places = ", ".join(f"{device} ({listed(names, _NAMES_SHOWN)})" for device, names in named.items())
        raise InvalidInputError(f"the model {fault}: {places}; {remedy}")
    return next(iter(named), torch.device("cpu"))


def current_environment(device: str = "cpu") -> Environment:
    """Return the environment in which this process measures now.

    On the CPU it includes torch's current thread count; for CUDA, the current GPU and torch's settings.

    Raises ``UnavailableError`` for any other device, if CUDA is not available, and for a GPU that is older than all for
    which torch was compiled.
    """
    require_device_type(device)
    version = str(torch.__version__)  # torch's own compares as a version, and not as text
    if device == "cpu":
        instructions = torch.backends.cpu.get_cpu_capability()
        threads, library, compiled = torch.get_num_threads(), library_of("cpu"), compiler_of("cpu")
        return Environment(cpu_model(), instructions, threads, version, library, compiled)
    require_cuda()
    library, name = library_of("cuda"), torch.cuda.get_device_name()
    capability = torch.cuda.get_device_capability()
    # The architectures for which torch was compiled, such as sm_75, sm_90a, compute_120; none if unknown.
    numbers = [int(re.sub(r"\D", "", architecture)) for architecture in torch.cuda.get_arch_list()]
    oldest = divmod(min(numbers, default=0), 10)
    if capability < oldest:
        raise UnavailableError(
            f"device is 'cuda', but {name} (compute capability {capability[0]}.{capability[1]}) is too old for torch "
            f"{version}, which is built for {oldest[0]}.{oldest[1]} and later: install an older torch, or use device "
            "'cpu'"
        )
    numerics = str(TorchSettings.current())
    return Environment(name, f"sm{capability[0]}{capability[1]}", 1, version, library, compiler_of("cuda"), numerics)


def require_cuda() -> None:
    """Raise ``UnavailableError``, with the cause and a remedy, unless torch can use a GPU."""
    if torch.version.cuda is None:
        raise UnavailableError(
            f"device is 'cuda', but torch {torch.__version__} is built without CUDA: install a CUDA build of torch, or "
            "use device 'cpu'"
        )
    if torch.cuda.is_available():
        return
    reason = "there is none"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # distinguishes a missing driver, an old driver, and no device
        reason = first_line(error)
    raise UnavailableError(
        f"device is 'cuda', but torch can use no GPU: {reason}; see nvidia-smi for the driver, or use device 'cpu'"
    )


def cpu_model() -> str:
    """Return the CPU's model name from ``/proc/cpuinfo``, or its architecture (``aarch64``) if there is none."""
    text = _CPU_INFO.read_text(encoding="utf-8", errors="replace") if _CPU_INFO.exists() else ""
    match = re.search(r"^model name\s*:\s*(\S.*?)\s*$", text, re.MULTILINE)
    return match.group(1) if match else platform.machine()
