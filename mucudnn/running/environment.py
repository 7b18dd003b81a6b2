"""The environment in which this process measures: its machine, libraries and settings."""

from __future__ import annotations

import platform
import re
from pathlib import Path

from mucudnn.core.errors import UnavailableError, first_line
from mucudnn.core.records import Environment

_CPU_INFO = Path("/proc/cpuinfo")


def current_environment(device: str = "cpu") -> Environment:
    """Return the environment in which this process measures now.

    On the CPU it includes torch's current thread count; for CUDA, the current GPU and torch's settings.

    Raises ``UnavailableError`` for any other device, if CUDA is not available, and for a GPU that is older than all for
    which torch was compiled.
    """
    require_known(device)
    import torch  # lazy, since `import mucudnn` must not load torch

    from mucudnn.core.torch_settings import TorchSettings
    from mucudnn.kernels.registry import compiler_of, library_of

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


def require_known(device: str) -> None:
    """Raise ``UnavailableError`` for a device other than ``"cpu"`` and ``"cuda"``."""
    if device not in ("cpu", "cuda"):
        raise UnavailableError(
            f"device is {device!r}; mucudnn measures on 'cpu' and 'cuda': use device='cpu', or 'cuda' for the current "
            "GPU (CUDA_VISIBLE_DEVICES=1 picks another)"
        )


def require_cuda() -> None:
    """Raise ``UnavailableError``, with the cause and a remedy, unless torch can use a GPU."""
    import torch

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
