"""Which engines the user's torch settings allow: the rules by which torch itself chooses among cuDNN's engines."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Self

from mucudnn.kernels.cudnn.constants import NumericalNote
from mucudnn.kernels.cudnn.engines import Engine


@dataclass(frozen=True, slots=True, order=True)
class Numerics:
    """How exact results must be.

    allow_tf32: tensor cores may round float32 to TF32, 10 bits of mantissa. deterministic: every run must give the same
    bits. tf32_override: of the environment's ``NVIDIA_TF32_OVERRIDE``, which cuDNN itself obeys; 0 forbids TF32.
    """

    allow_tf32: bool = True
    deterministic: bool = False
    tf32_override: str = ""

    @classmethod
    def of_torch(cls) -> Self:
        """As they are set now.

        ``conv.fp32_precision`` is what torch's convolutions obey: it follows from ``allow_tf32``, from the
        ``fp32_precision`` of cuDNN or of all backends, whichever was set for convolutions.
        """
        import torch  # here, since the rest needs no torch

        cudnn = torch.backends.cudnn
        return cls(
            allow_tf32=cudnn.conv.fp32_precision == "tf32",  # type: ignore[attr-defined]
            deterministic=cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
            tf32_override=os.environ.get("NVIDIA_TF32_OVERRIDE", ""),
        )

    def __str__(self) -> str:
        """For keys of databases: ``tf32 deterministic``, ``no-tf32 NVIDIA_TF32_OVERRIDE=0``."""
        parts = ["tf32" if self.allow_tf32 else "no-tf32"]
        parts += ["deterministic"] if self.deterministic else []
        parts += [f"NVIDIA_TF32_OVERRIDE={self.tf32_override}"] if self.tf32_override else []
        return " ".join(parts)

    def why_barred(self, engine: Engine, dtype: str) -> str | None:
        """``None`` if the engine may compute problems of this dtype, else the reason."""
        if NumericalNote.DOWN_CONVERT_INPUTS in engine.numerical_notes:
            return "rounds its inputs to a smaller type"
        if dtype == "float32" and engine.uses_tensor_cores:
            if self.tf32_override == "0":
                return "rounds to TF32, and NVIDIA_TF32_OVERRIDE is 0"
            if not self.allow_tf32:
                return "rounds to TF32, and torch.backends.cudnn.allow_tf32 is off"
        if self.deterministic and not engine.deterministic:
            return "not deterministic, and torch must be"
        return None
