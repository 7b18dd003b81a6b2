"""Tells which engines torch's settings bar."""

from __future__ import annotations

from mucudnn.kernels.cudnn.constants import NumericalNote
from mucudnn.kernels.cudnn.engines import Engine
from mucudnn.words.torch_settings import TorchSettings


def why_barred(settings: TorchSettings, engine: Engine, dtype: str) -> str | None:
    """Return why the engine may not compute problems of this dtype, or ``None`` if it may."""
    if not settings.cudnn:
        return "an engine of cuDNN, and torch.backends.cudnn.enabled is off"
    if NumericalNote.DOWN_CONVERT_INPUTS in engine.numerical_notes:
        return "rounds its inputs to a smaller type"
    if dtype == "float32" and engine.uses_tensor_cores:
        if settings.tf32_override == "0":
            return "rounds to TF32, and NVIDIA_TF32_OVERRIDE is 0"
        if not settings.allow_tf32:
            return "rounds to TF32, and torch.backends.cudnn.allow_tf32 is off"
    if settings.deterministic and not engine.deterministic:
        return "not deterministic, and torch must be"
    return None
