"""Runs on a GPU, or on the CPU in its place: guarded memory, memory that is counted, graphs and streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.kernels.algorithm import Algorithm
from mucudnn.measuring.operands import Operands, random_operands
from mucudnn.testing.checks import GuardedMemory


@dataclass
class Guarded(GuardedMemory):
    """Memory on a device, with operands of a problem in it."""

    guard_bytes: int = 64 * 2**10

    def like(self, tensor: Tensor) -> Tensor:
        """Of the same shape, strides and dtype."""
        flat = self.buffer(tensor.numel() * tensor.element_size()).view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride())

    def operands(self, problem: ConvProblem, batch_size: int) -> Operands:
        """Random ones, of which only the written one is guarded: NaN, or zero where it is added to."""
        random = random_operands(problem, batch_size, self.device)
        result = self.like(random.written(problem.operation))
        if problem.operation is Operation.BACKWARD_FILTER:
            return Operands(random.x, result.zero_(), random.y)
        forward = problem.operation is Operation.FORWARD
        return Operands(random.x if forward else result, random.w, result if forward else random.y)


def run_in_slices(
    algorithm: Algorithm, problem: ConvProblem, operands: Operands, sizes: Sequence[int], memory: Guarded
) -> None:
    """Open, step over consecutive slices, close; prepared and scratch are of exactly the declared bytes."""
    needed = [algorithm.workspace(problem, n) for n in sizes]
    prepared = memory.buffer(max(each.prepared_bytes for each in needed))
    algorithm.open(problem, operands.w, prepared)
    start = 0
    for n, each in zip(sizes, needed, strict=True):
        x, y = operands.x[start : start + n], operands.y[start : start + n]
        algorithm.step(problem, x, operands.w, y, None, prepared, memory.buffer(each.scratch_bytes))
        start += n
    algorithm.close(problem, operands.w, prepared)


def new_stream(device: str) -> AbstractContextManager[object]:
    """What runs inside is on a stream of its own, after what was started before."""
    if device == "cpu":
        return nullcontext()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


def captured(work: Callable[[], None], device: str) -> Callable[[], None]:
    """What runs ``work`` again: a CUDA graph of it, captured as torch's notes on CUDA graphs say."""
    if device == "cpu":
        return work
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def wait_for_all(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
