"""What torch's settings say about convolutions on a GPU: how exact, how repeatable, and by which library."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

# What torch has by default. These change torch's own times and those of our matrix products, but bar no engine.
_DEFAULTS_OF_CUDNN = {"depthwise_kernel": "auto"}  # older torch lacks it
_DEFAULTS_OF_MATMUL = {
    "allow_fp16_accumulation": False,
    "allow_fp16_reduced_precision_reduction": True,
    "allow_bf16_reduced_precision_reduction": True,
}


@dataclass(frozen=True, slots=True, order=True)
class Numerics:
    """How exact results must be, and what else is set that changes times.

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
    def of_torch(cls) -> Self:
        """As they are set now.

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
        """For keys of databases: ``tf32``, ``tf32 deterministic``, ``no-tf32 NVIDIA_TF32_OVERRIDE=0 benchmark=10``.

        What is as torch has it by default adds no word, but for TF32 in convolutions.
        """
        parts = ["tf32" if self.allow_tf32 else "no-tf32"]
        parts += ["deterministic"] if self.deterministic else []
        parts += [f"NVIDIA_TF32_OVERRIDE={self.tf32_override}"] if self.tf32_override else []
        parts += [] if self.cudnn else ["no-cudnn"]
        parts += ["matmul-tf32"] if self.matmul_tf32 else []
        return " ".join([*parts, *self.others])


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
    """Inside, torch's own convolutions on GPUs are deterministic if that is asked for, else as they are set.

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
