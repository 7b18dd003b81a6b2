"""Torch's own convolution: its name, and the torch settings that change its results and speed on a GPU."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

TORCHS_OWN = "native"  # name of the algorithm, also in databases; runs in the tensors' memory format

DETERMINISTIC_SETTING = "torch.backends.cudnn.deterministic"

# Defaults of torch. Other values change times of torch's and our matrix products, but exclude no engine.
_DEFAULTS_OF_CUDNN = {"depthwise_kernel": "auto"}  # older torch lacks it
_DEFAULTS_OF_MATMUL = {
    "allow_fp16_accumulation": False,
    "allow_fp16_reduced_precision_reduction": True,
    "allow_bf16_reduced_precision_reduction": True,
}


@dataclass(frozen=True, slots=True, order=True)
class TorchSettings:
    """Settings of torch that affect the accuracy or the speed of convolutions.

    allow_tf32: convolutions may round float32 to TF32, 10 bits of mantissa.
    deterministic: every run must give the same bits.
    tf32_override: environment variable ``NVIDIA_TF32_OVERRIDE``, which cuDNN and cuBLAS obey; 0 forbids TF32.
    cudnn: torch may use cuDNN.
    matmul_tf32: matrix products may round to TF32.
    others: other settings that differ from torch's defaults, such as ``benchmark=10``.
    """

    allow_tf32: bool = True
    deterministic: bool = False
    tf32_override: str = ""
    cudnn: bool = True
    matmul_tf32: bool = False
    others: tuple[str, ...] = ()

    @classmethod
    def current(cls) -> Self:
        """Read torch's current settings.

        Torch's convolutions obey ``conv.fp32_precision``, which torch derives from ``allow_tf32`` and the
        ``fp32_precision`` of cuDNN or of all backends (torch 2.11 ignores the latter two for convolutions, and so do
        we). ``matmul.fp32_precision`` holds for matrix products, also from ``set_float32_matmul_precision``. The older
        ``allow_tf32`` flags are not read: reading them raises an error if old and new settings were mixed, and torch
        2.9 warns.
        """
        import torch  # the rest of the module needs no torch

        cudnn = torch.backends.cudnn
        return cls(
            allow_tf32=cudnn.conv.fp32_precision == "tf32",  # type: ignore[attr-defined]
            deterministic=cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
            tf32_override=os.environ.get("NVIDIA_TF32_OVERRIDE", ""),
            cudnn=cudnn.enabled,
            matmul_tf32=torch.backends.cuda.matmul.fp32_precision == "tf32",
            others=tuple(_others(cudnn, torch.backends.cuda.matmul)),
        )

    def __str__(self) -> str:
        """Return text for database keys: TF32 in convolutions, and other settings that differ from torch's defaults.

        >>> str(TorchSettings()), str(TorchSettings(allow_tf32=False, deterministic=True))
        ('tf32', 'no-tf32 deterministic')
        """
        parts = ["tf32" if self.allow_tf32 else "no-tf32"]
        parts += ["deterministic"] if self.deterministic else []
        parts += [f"NVIDIA_TF32_OVERRIDE={self.tf32_override}"] if self.tf32_override else []
        parts += [] if self.cudnn else ["no-cudnn"]
        parts += ["matmul-tf32"] if self.matmul_tf32 else []
        return " ".join([*parts, *self.others])


def rounds_to_tf32(settings: str) -> bool:
    """Return whether torch's own convolutions may round float32 to TF32, given the text of ``TorchSettings``.

    With cuDNN the setting of convolutions applies, without cuDNN that of matrix products.
    """
    words = settings.split()
    allowing = "matmul-tf32" if "no-cudnn" in words else "tf32"
    return allowing in words and "NVIDIA_TF32_OVERRIDE=0" not in words


def _others(cudnn: Any, matmul: Any) -> Iterator[str]:
    if cudnn.benchmark:
        yield f"benchmark={cudnn.benchmark_limit}"
    for owner, defaults in ((cudnn, _DEFAULTS_OF_CUDNN), (matmul, _DEFAULTS_OF_MATMUL)):
        for name, default in defaults.items():
            if (value := getattr(owner, name, default)) != default:
                yield f"{name}={value}"
    if cublas := os.environ.get("CUBLAS_WORKSPACE_CONFIG"):
        yield f"CUBLAS_WORKSPACE_CONFIG={cublas}"


def deterministic_torch(*, asked: bool) -> AbstractContextManager[None]:
    """Make torch's own convolutions on GPUs deterministic in the block, if asked.

    The setting is global to the process: other threads see it too.
    """
    import torch

    cudnn = torch.backends.cudnn
    return _set(cudnn, "deterministic", True) if asked and not cudnn.deterministic else nullcontext()


def searching(*, asked: bool) -> AbstractContextManager[None]:
    """Set ``torch.backends.cudnn.benchmark`` in the block: whether torch times cuDNN's engines for new sizes."""
    import torch

    return _set(torch.backends.cudnn, "benchmark", asked)


@contextmanager
def _set(settings: object, name: str, value: object) -> Iterator[None]:
    """Set a setting in the block."""
    before = getattr(settings, name)
    setattr(settings, name, value)
    try:
        yield
    finally:
        setattr(settings, name, before)


@contextmanager
def rounding_to_tf32(*, allowed: bool) -> Iterator[None]:
    """Allow or forbid convolutions and matrix products on GPUs to round float32 to TF32 in the block.

    Sets torch's older flags: once torch's newer flags are set, reading the older ones raises an error.
    """
    before = _allow_tf32((allowed, allowed))
    try:
        yield
    finally:
        _allow_tf32(before)


def _allow_tf32(allowed: tuple[bool, bool]) -> tuple[bool, bool]:
    """Set whether convolutions and matrix products may round to TF32. Return the previous settings of both."""
    import torch

    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 warns about the older flags
        before = cudnn.allow_tf32, matmul.allow_tf32
        cudnn.allow_tf32, matmul.allow_tf32 = allowed
    return before
