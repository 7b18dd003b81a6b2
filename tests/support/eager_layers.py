"""Layers whose calls go past the registered operators, and torch's own beside them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import mucudnn
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.core.records import Configuration, MicroConfig
from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.running.choices import Choices

N, C, K = 3, 4, 6
GEOMETRY: tuple[Any, ...] = ((1, 1), (1, 1), (1, 1), 1)
COMPILED = "implicit-gemm" if loaded_build().library is not None else "gemm"
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def choices_of(
    *algorithms: str, memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS, n: int = N, dtype: str = "float32"
) -> Choices:
    """All three operations, each sample by one of these in turn, or all by the only one."""
    names = [algorithms[i % len(algorithms)] for i in range(n)]
    parts = tuple(MicroConfig(name, 1) for name in names) if len(algorithms) > 1 else (MicroConfig(names[0], n),)
    shape = (C, 9, 8, K, 3, 3)
    problem = ConvProblem(Operation.FORWARD, *shape, padding=(1, 1), dtype=dtype, memory_format=memory_format)
    chosen = Choices.of({problem.with_operation(o): {n: Configuration(parts, 1.0, 0)} for o in Operation})
    chosen.executables.clear()
    return chosen


def layer(chosen: Choices | None = None, bias: bool = True) -> mucudnn.Conv2d:
    torch.manual_seed(0)
    made = mucudnn.Conv2d(C, K, 3, padding=1, bias=bias)
    made.choices = choices_of(COMPILED) if chosen is None else chosen
    return made


def torchs(ours: mucudnn.Conv2d) -> nn.Conv2d:
    """Torch's layer with the same values."""
    theirs = nn.Conv2d(C, K, 3, padding=1, bias=ours.bias is not None)
    theirs.load_state_dict(ours.state_dict())
    return theirs


def images(requires_grad: bool = False) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(N, C, 9, 8, requires_grad=requires_grad)


def ran(chosen: Choices | None) -> set[Operation]:
    assert chosen is not None
    return {executable.problem.operation for executable in chosen.executables.values() if executable is not None}
