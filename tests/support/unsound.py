"""Algorithms of another package with a fault each, for which they must not be run; and one that is right."""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from mucudnn import BaseAlgorithm
from mucudnn.core.problem import ConvProblem


@dataclass(frozen=True, slots=True)
class Product(BaseAlgorithm):
    """A forward 1x1 convolution as a product, which needs no workspace; what goes wrong is ``fault``."""

    fault: str = ""
    version: int = 1

    @property
    def name(self) -> str:
        return f"test/{self.fault or 'right'}"

    def supports(self, problem: ConvProblem) -> str | None:
        return None

    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        return 0

    def step(self, problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor, bias: Tensor | None, *rest: Tensor) -> None:
        y.copy_(torch.einsum("nchw,kc->nkhw", x, w[:, :, 0, 0]))
        if bias is not None:
            y.add_(bias.view(-1, 1, 1))
        match self.fault:
            case "writes-past-its-output":
                ctypes.memset(y.data_ptr() + y.nbytes, 0, 16)
            case "writes-past-a-tensor-of-its-own":
                own = torch.zeros(8)
                ctypes.memset(own.data_ptr() + own.nbytes, 0, 16)
            case "reads-unwritten-memory":
                y.add_(torch.empty_like(y))
            case "aborts":
                os.abort()
            case "dawdles":
                time.sleep(0.1 * len(x))
            case "sleeps":
                time.sleep(3600)
            case "raises":
                raise ValueError("no such thing")
            case "is-killed":
                os.kill(os.getpid(), 9)
