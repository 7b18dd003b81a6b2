"""The model of a source, with parameters that can be computed with."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from mucudnn.bench.sources.layers import NETWORKS, load_model
from mucudnn.bench.sources.networks import build, input_shape_of
from mucudnn.kernels.contract.buffers import TORCH_FORMATS
from mucudnn.words.problem import MemoryFormat, dtype_name


def trainable_model(
    source: str,
    *,
    input_shape: tuple[int, int, int] | None = None,
    dtype: str = "float32",
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS,
) -> tuple[nn.Module, tuple[int, int, int]]:
    """Return the model of a source on the CPU, and the (C, H, W) of one sample, as ``load_model`` does.

    The parameters of built-in networks are drawn from torch's random state, as torch initialises them; those of
    ``load_model`` are arbitrary. Raises as that.
    """
    if source not in NETWORKS:
        return load_model(source, input_shape=input_shape, dtype=dtype, memory_format=memory_format)
    torch_dtype, torch_format = getattr(torch, dtype_name(dtype)), TORCH_FORMATS[memory_format]
    model = build(source).to(dtype=torch_dtype, memory_format=torch_format)  # type: ignore[call-overload]
    return model, input_shape or input_shape_of(source)


def settle_statistics(model: nn.Module, arguments: tuple[Tensor, ...]) -> None:
    """Give batch norms the statistics of a batch, the first argument, as training would.

    Those of a fresh network, 0 and 1, let what it is given fade from layer to layer: its outputs are then the same
    whatever its convolutions compute, and comparing them tells nothing.
    """
    update_bn([arguments], model)
