"""The measuring environment: the machine, libraries and settings that affect an algorithm's time."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mucudnn.core.errors import UnavailableError, first_line

_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True, order=True)
class Environment:
    """Machine and software of a measurement: part of its key, since times differ between machines.

    device: CPU model or GPU name. capability: instruction set that torch uses (``AVX512``), or the GPU's (``sm90``).
    threads: torch's number of threads; 1 on a GPU. torch, library: versions (``2.13.0+cpu``, ``oneDNN 3.12.0``).
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

    Raises ``UnavailableError`` for any other device, and if CUDA is not available.
    """
    require_known(device)
    return _on_cpu() if device == "cpu" else _on_cuda()


def require_known(device: str) -> None:
    """Raise ``UnavailableError`` for a device other than ``"cpu"`` and ``"cuda"``."""
    if device not in ("cpu", "cuda"):
        raise UnavailableError(
            f"device is {device!r}; mucudnn measures on 'cpu' and 'cuda': use device='cpu', or 'cuda' for the current "
            "GPU (CUDA_VISIBLE_DEVICES=1 picks another)"
        )


def _on_cpu() -> Environment:
    import torch  # lazy, since `import mucudnn` must not load torch

    from mucudnn.kernels.registry import compiler_of, library_of

    return Environment(
        device=cpu_model(),
        capability=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        torch=str(torch.__version__),  # which compares as a version, and not as text
        library=library_of("cpu"),
        compiled=compiler_of("cpu"),
    )


def _on_cuda() -> Environment:
    import torch

    from mucudnn.core.torch_settings import TorchSettings
    from mucudnn.kernels.registry import compiler_of, library_of

    require_cuda()
    library = library_of("cuda")
    major, minor = torch.cuda.get_device_capability()
    _require_young_enough((major, minor), torch.cuda.get_arch_list())
    return Environment(
        device=torch.cuda.get_device_name(),
        capability=f"sm{major}{minor}",
        threads=1,
        torch=str(torch.__version__),  # which compares as a version, and not as text
        library=library,
        compiled=compiler_of("cuda"),
        numerics=str(TorchSettings.current()),
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


def _require_young_enough(capability: tuple[int, int], architectures: Sequence[str]) -> None:
    """Raise ``UnavailableError`` for a GPU older than all GPUs that torch was compiled for.

    architectures: torch's compiled architectures, such as ``sm_75``, ``sm_90a``, ``compute_120``; empty if unknown.
    """
    import torch

    numbers = [int(re.sub(r"\D", "", name)) for name in architectures]
    oldest = divmod(min(numbers, default=0), 10)
    if capability < oldest:
        raise UnavailableError(
            f"device is 'cuda', but {torch.cuda.get_device_name()} (compute capability {capability[0]}."
            f"{capability[1]}) is too old for torch {torch.__version__}, which is built for {oldest[0]}.{oldest[1]} "
            "and later: install an older torch, or use device 'cpu'"
        )


def cpu_model() -> str:
    """Return the CPU's model name from ``/proc/cpuinfo``, or its architecture (``aarch64``) if there is none."""
    text = _CPU_INFO.read_text(encoding="utf-8", errors="replace") if _CPU_INFO.exists() else ""
    match = re.search(r"^model name\s*:\s*(\S.*?)\s*$", text, re.MULTILINE)
    return match.group(1) if match else platform.machine()
