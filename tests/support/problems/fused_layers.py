"""A small fused convolution that is tuned by hand, and what torch makes of it in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mucudnn.kernels.contract.epilogue import ACTIVATIONS
from mucudnn.modules.conv2d import Conv2d
from mucudnn.modules.fused import FusedConvolution
from mucudnn.running.choices import Choices
from mucudnn.running.filter_cache import CachedFilter, FilterCache
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.words.results import Configuration, MicroConfig

N = 5
FORMATS = {MemoryFormat.CONTIGUOUS: torch.contiguous_format, MemoryFormat.CHANNELS_LAST: torch.channels_last}


def layer(
    *parts: tuple[str, int],
    activation: str | None = "ReLU",
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS,
    keeps_filter: bool = False,
) -> FusedConvolution:
    """A fused 3x3 convolution that runs these micro-batches."""
    convolution = Conv2d(9, 9, 3, padding=1).to(memory_format=FORMATS[memory_format]).eval()  # type: ignore[call-overload]
    problem = ConvProblem(Operation.FORWARD, 9, 13, 11, 9, 3, 3, padding=(1, 1), memory_format=memory_format)
    configuration = Configuration(tuple(MicroConfig(*part) for part in parts), 1.0, 0)
    if keeps_filter:
        convolution.filter_cache = FilterCache([CachedFilter(problem, parts[0][0], 0, {N: configuration})])
    else:
        convolution.choices = Choices.of({problem: {N: configuration}})
    return FusedConvolution(convolution, batch_norm=None, adds=True, activation=activation)


def images(memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS) -> Tensor:
    return torch.randn(N, 9, 13, 11).contiguous(memory_format=FORMATS[memory_format])


def exact(module: FusedConvolution, x: Tensor, added: Any) -> Tensor:
    """In float64, by torch."""
    convolution: Any = module.convolution
    y = nn.functional.conv2d(x.double(), convolution.weight.double(), convolution.bias.double(), padding=1)
    y = y if added is None else y + added
    return y if module.activation is None else ACTIVATIONS[module.activation](y)
