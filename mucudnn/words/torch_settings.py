"""Torch's own convolution: its name here, and what torch's settings make of it on a GPU.

They say how exact and how repeatable it must be, and by which library it is computed.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

TORCHS_OWN = "native"  # as an algorithm, in the tensors' memory format: its name in databases

DETERMINISTIC_SETTING = "torch.backends.cudnn.deterministic"

# What torch has by default. These change torch's own times and those of our matrix products, but bar no engine.
_DEFAULTS_OF_CUDNN = {"depthwise_kernel": "auto"}  # older torch lacks it
_DEFAULTS_OF_MATMUL = {
    "allow_fp16_accumulation": False,
    "allow_fp16_reduced_precision_reduction": True,
    "allow_bf16_reduced_precision_reduction": True,
}


@dataclass(frozen=True, slots=True, order=True)
class TorchSettings:
    """Settings that say how exact results must be, and all others that change times.

    allow_tf32: tensor cores may round float32 to TF32, 10 bits of mantissa, in convolutions. deterministic: every run
    must give the same bits. tf32_override: of the environment's ``NVIDIA_TF32_OVERRIDE``, which cuDNN and cuBLAS obey;
    0 forbids TF32. cudnn: torch may use cuDNN. matmul_tf32: matrix products may round to TF32. others: words for the
    other settings that are not as torch has them by default, such as ``benchmark=10``.
    """

    allow_tf32: bool = True
    deterministic: bool = False
    tf32_override: str = ""
    cudnn: bool = True
    matmul_tf32: bool = False
    others: tuple[str, ...] = ()

    @classmethod
    def current(cls) -> Self:
        """Read the settings.

        ``conv.fp32_precision`` is what torch's convolutions obey: it follows from ``allow_tf32``, from the
        ``fp32_precision`` of cuDNN or of all backends, whichever was set for convolutions (with torch 2.11 the general
        two do not count, neither for torch nor here). So does ``matmul.fp32_precision`` for matrix products, from
        ``set_float32_matmul_precision``, too. The older ``allow_tf32`` are not read: they raise where both kinds of
        setting were used, and torch 2.9 warns.
        """
        import torch  # here, since the rest needs no torch

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
        """Words for keys of databases: what is as torch has it by default adds none, but for TF32 in convolutions.

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
    """Tell from the text of ``TorchSettings`` whether torch's own convolutions may round float32 to TF32.

    Those of cuDNN do as they are set, those without it as matrix products are.
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


@contextmanager
def deterministic_torch(asked: bool) -> Iterator[None]:
    """Make torch's own convolutions on GPUs deterministic inside, if that is asked for.

    The setting is the process's: other threads see it, too.
    """
    import torch

    cudnn = torch.backends.cudnn
    if not asked or cudnn.deterministic:
        yield
        return
    cudnn.deterministic = True
    try:
        yield
    finally:
        cudnn.deterministic = False


@contextmanager
def computed_without_libraries() -> Iterator[None]:
    """Let torch's own convolutions on GPUs be matrix products inside: cuDNN must not confirm itself.

    Torch refuses to call cuBLAS where results must be deterministic and an environment variable is not set; here they
    need not be. ``torch.use_deterministic_algorithms`` itself would load the compiler. Not run on a GPU yet.
    """
    import torch

    enabled = torch._C._get_cudnn_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch._C._set_cudnn_enabled(False)
    torch._C._set_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch._C._set_cudnn_enabled(enabled)
        torch._C._set_deterministic_algorithms(deterministic, warn_only=warn_only)


@contextmanager
def rounding_to_tf32(allowed: bool) -> Iterator[None]:
    """Let convolutions and matrix products on GPUs round float32 to TF32 inside, or not.

    By torch's older switches: after the newer ones are used, torch refuses to read the older.
    """
    before = _allow_tf32((allowed, allowed))
    try:
        yield
    finally:
        _allow_tf32(before)


def _allow_tf32(allowed: tuple[bool, bool]) -> tuple[bool, bool]:
    """Set it for convolutions and for matrix products. Return what it was for both."""
    import torch

    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 warns of the older switches
        before = cudnn.allow_tf32, matmul.allow_tf32
        cudnn.allow_tf32, matmul.allow_tf32 = allowed
    return before


@contextmanager
def searching(asked: bool) -> Iterator[None]:
    """Let torch time cuDNN's engines inside when a size first comes (``torch.backends.cudnn.benchmark``), or not."""
    import torch

    cudnn = torch.backends.cudnn
    before, cudnn.benchmark = cudnn.benchmark, asked
    try:
        yield
    finally:
        cudnn.benchmark = before
