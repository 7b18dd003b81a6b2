"""A layer that keeps its filters, and what it must compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from support.configured import run
from torch import Tensor, nn

import mucudnn
from mucudnn.kernels.contract.buffers import TORCH_FORMATS
from mucudnn.running.filter_cache import CachedFilter, FilterCache
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.words.results import Configuration, MicroConfig

PROBLEM = ConvProblem(Operation.FORWARD, c=4, h=8, w=8, k=6, r=3, s=3, padding=(1, 1))
PROBLEMS = tuple(replace(PROBLEM, memory_format=memory_format) for memory_format in MemoryFormat)
SIZES = (1, 2, 3)


def configuration(*parts: tuple[str, int]) -> Configuration:
    return Configuration(tuple(MicroConfig(*part) for part in parts), time_s=1e-3, workspace_bytes=0)


def kept_filter(problem: ConvProblem, algorithm: str = "winograd-4x4") -> CachedFilter:
    return CachedFilter(problem, algorithm, 1000, {n: configuration((algorithm, n)) for n in SIZES})


def layer(**options: Any) -> mucudnn.Conv2d:
    """A module in ``eval()`` that keeps its filters, and where it may not runs torch's convolution."""
    module = mucudnn.Conv2d(4, 6, 3, **{"padding": 1, **options}).eval()
    module.filter_cache = FilterCache([kept_filter(problem) for problem in PROBLEMS])
    return module


def images(n: int = 2) -> Tensor:
    return torch.randn(n, 4, 8, 8)


@torch.no_grad()
def fresh(module: nn.Conv2d, x: Tensor, weight: Tensor | None = None) -> Tensor:
    """What the same algorithm gives with nothing kept."""
    w = (module.weight if weight is None else weight).detach()
    channels_last = any(t.is_contiguous(memory_format=torch.channels_last) for t in (x, w))
    problem = PROBLEMS[channels_last]
    torch_format = TORCH_FORMATS[problem.memory_format]
    x, w, y = (t.contiguous(memory_format=torch_format) for t in (x, w, torch.empty(problem.y_shape(len(x)))))
    run(problem, configuration(("winograd-4x4", len(x))), x, w, y, module.bias)
    return y
