"""The measuring environment: the machine, libraries and settings that affect an algorithm's time."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from pathlib import Path

from mucudnn.core.errors import UnavailableError, first_line

_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True, order=True)
class Environment:
    """Machine and software of a measurement: part of its key, since times differ between machines.

    device: CPU model or GPU name. capability: instruction set that torch uses (``AVX512``), or the GPU's (``sm90``).
    threads: torch's number of threads; 1 on a GPU. torch, library: versions (``2.13.0+cpu``, ``oneDNN 3.12.0``), and
    whether the C library's heap is another than the kept one in which candidates are timed (measuring/heap.py).
    compiled: loaded build of mucudnn's C++ code (``avx512``, ``avx2``, ``plain``), the CUDA compiler on a GPU (``CuPy
    14.2.0``), or ``torch`` if there is neither. numerics: ``TorchSettings`` as text; empty on the CPU.
    """

    device: str
    capability: str
    threads: int
    torch: str
    library: str
    compiled: str
    numerics: str = ""

    @property
    def device_type(self) -> str:
        """Type of the device: ``cpu`` or ``cuda``."""
        return "cuda" if self.numerics else "cpu"

    def __str__(self) -> str:
        """Return text such as ``AMD EPYC (AVX512), 2 threads, torch 2.13.0, oneDNN 3.12.0, compiled for avx512``."""
        device, versions = f"{self.device} ({self.capability})", f"torch {self.torch}, {self.library}"
        if self.device_type == "cuda":
            return ", ".join((device, versions, *([] if self.compiled == "torch" else [self.compiled]), self.numerics))
        threads = f"{self.threads} thread" + ("" if self.threads == 1 else "s")
        build = "nothing compiled" if self.compiled == "torch" else f"compiled for {self.compiled}"
        return f"{device}, {threads}, {versions}, {build}"


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
