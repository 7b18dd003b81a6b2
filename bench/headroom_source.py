"""The headroom in a training step of a source's model."""

from __future__ import annotations

import torch

from mucudnn.bench.layers import load_model
from mucudnn.headroom import Headroom, find_headroom
from mucudnn.kernels.buffers import TORCH_FORMATS
from mucudnn.problem import MemoryFormat


def headroom_of_source(
    source: str,
    *,
    batch: int | None = None,
    input_shape: tuple[int, int, int] | None = None,
    dtype: str = "float32",
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS,
) -> Headroom:
    """Of one step with ``batch`` samples (None: one). Arguments as for ``load_source``.

    Raises ``InvalidInputError`` for sources without a model, and as ``find_headroom``.
    """
    model, shape = load_model(source, input_shape=input_shape, dtype=dtype, memory_format=memory_format)
    sample = torch.zeros(batch or 1, *shape, dtype=getattr(torch, dtype))
    return find_headroom(model, sample.to(memory_format=TORCH_FORMATS[memory_format]))
