"""Runs on a GPU, or on the CPU in its place: guarded memory, memory that is counted, graphs and streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.kernels import registry
from mucudnn.kernels.algorithm import Algorithm
from mucudnn.kernels.cudnn.algorithms import CudnnEngine, CudnnEngines
from mucudnn.kernels.cudnn.library import CudnnError
from mucudnn.measuring.operands import Operands, random_operands
from mucudnn.testing.checks import GuardedMemory


def offered_engines(problem: ConvProblem, sizes: Sequence[int]) -> list[CudnnEngine]:
    """What cuDNN, or what stands in for it, offers for micro-batches of these sizes, as torch's settings allow."""
    return CudnnEngines(registry.cudnn_backend()).offered(problem, sizes)


def buildable_engines(problem: ConvProblem, sizes: Sequence[int], refused: list[str]) -> list[CudnnEngine]:
    """Those whose plans cuDNN builds for every size that they support; the names of the others are added to `refused`.

    cuDNN's heuristics propose engines of which it then refuses to finalize a plan, or one that adds in place. Raises
    ``CudnnError`` where a plan cannot be built for another reason than that it is not supported.
    """
    offered = offered_engines(problem, sizes)
    unsupported = [
        engine
        for engine in offered
        if all(engine.supports_micro_batch(problem, n) is not None for n in sizes)
        or not all(_builds(engine, problem, n) for n in sizes)
    ]
    refused += [engine.name for engine in unsupported]
    return [engine for engine in offered if engine not in unsupported]


def _builds(engine: CudnnEngine, problem: ConvProblem, n: int) -> bool:
    if engine.supports_micro_batch(problem, n) is not None:
        return True
    try:
        engine.build(problem, n)
    except CudnnError as error:
        if error.is_unsupported:
            return False
        raise
    return True


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


def new_stream(device: str) -> AbstractContextManager[object]:
    """What runs inside is on a stream of its own, after what was started before."""
    if device == "cpu":
        return nullcontext()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


def wait_for_all(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
